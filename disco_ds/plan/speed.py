"""The time of a step from its FLOPs and the bytes it receives, at rates that are given. Nothing overlaps.

Not in it: waiting for data, stragglers, latencies, the optimizer's own work.
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_ds.config import Config
from disco_ds.config.ds_config import precision, stage
from disco_ds.models.gpus import Gpu
from disco_ds.plan.losses import loss_cost
from disco_ds.plan.towers import DTYPES, Towers

EFFICIENCY = 0.2
"""Of the promised rate: what DisCo-CLIP's Table 4 comes to with ViT-B/32 on A100 (docs/planning.md)."""
BETWEEN_HOSTS = 25.0
"""GB/s that a GPU receives from other hosts: 200 Gbit/s for each GPU."""


@dataclass(frozen=True)
class Rates:
    gpu: Gpu
    efficiency: float = EFFICIENCY
    """Fraction of the GPU's FLOP/s that products reach."""
    between_hosts: float = BETWEEN_HOSTS
    """GB/s."""
    per_host: int = 8
    """GPUs of a host."""

    def link(self, ranks: int) -> float:
        """Bytes/s that a rank receives: the slowest way counts."""
        return 1e9 * (self.gpu.link if ranks <= self.per_host else min(self.gpu.link, self.between_hosts))

    def flops(self, kind: str) -> float:
        """FLOP/s of products in fp32, tf32 or 16 bits."""
        return 1e12 * self.efficiency * {"fp32": self.gpu.fp32, "tf32": self.gpu.tf32}.get(kind, self.gpu.half)


@dataclass(frozen=True)
class Speed:
    towers_s: float
    loss_s: float
    wire_s: float
    wire_bytes: int
    """Received by a rank in a step."""

    @property
    def step_s(self) -> float:
        return self.towers_s + self.loss_s + self.wire_s


def plan_speed(config: Config, ranks: int, towers: Towers, rates: Rates) -> Speed | None:
    """Of a step. None where the GPU's rates are not known."""
    if not (rates.gpu.half and rates.gpu.link):
        return None
    K, kind = config.num_micro_batches(ranks), precision(config.deepspeed)
    cost = loss_cost(config.loss.name, config.loss.options, config.global_batch // ranks, ranks, towers.width)
    flops = (K - 1) * towers.replay_flops + K * towers.flops
    wire = cost.received_bytes + (_engine_wire(config, ranks, K, towers) if ranks > 1 else 0)
    return Speed(
        towers_s=flops / rates.flops(kind),
        loss_s=cost.flops / rates.flops(cost.precision),
        wire_s=wire / rates.link(ranks),
        wire_bytes=wire,
    )


def _engine_wire(config: Config, ranks: int, K: int, towers: Towers) -> int:
    """Bytes of gradients and parameters that a rank receives in a step."""
    level = stage(config.deepspeed)
    parameters = towers.trained * DTYPES[precision(config.deepspeed)].itemsize
    part = (ranks - 1) / ranks
    if level < 2:  # once a step: an all_reduce, and at ZeRO 1 the updated parameters
        return int(part * parameters * (2 + level))
    if level == 2:  # an all_reduce for every micro-batch
        return int(part * parameters * (2 * K + 1))
    # Parameters for every forward and backward, unless they stay; gradients to their owners.
    return int(part * parameters * (3 * K - 1 + K))
