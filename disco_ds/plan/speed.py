"""The time of a step from its FLOPs and the bytes it receives, at given rates.

Two things are received beside computation, and cost what goes beyond it: the blocks of a ring beside the loss, and at
ZeRO 1 and 2 with overlap_comm the gradients beside the one backward of a step. Not counted: waiting for data,
stragglers, latencies, the optimizer's own work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disco_ds.config import Config, render_ds_config
from disco_ds.config.ds_config import precision, stage
from disco_ds.models.gpus import Gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.losses import loss_cost
from disco_ds.plan.towers import DTYPES, Towers


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, by what its maker promises and what is assumed."""

    gpu: Gpu
    assumed: Assumptions = field(default_factory=Assumptions)

    def link(self, ranks: int) -> float:
        """Bytes/s that a rank receives; between hosts the slowest connection counts."""
        slowest = min(self.gpu.link, self.assumed.between_hosts)
        return 1e9 * (self.gpu.link if ranks <= self.assumed.per_host else slowest)

    def flops(self, kind: str) -> float:
        """FLOP/s of products in fp32, tf32 or 16 bits."""
        promised = {"fp32": self.gpu.fp32, "tf32": self.gpu.tf32}.get(kind, self.gpu.half)
        return 1e12 * self.assumed.efficiency * promised


@dataclass(frozen=True)
class Speed:
    """Times of one step."""

    towers_s: float
    loss_s: float
    comm_s: float
    comm_bytes: int
    """Bytes that a rank receives in a step."""
    exposed_s: float
    """The part of comm_s that no computation hides."""

    @property
    def step_s(self) -> float:
        return self.towers_s + self.loss_s + self.exposed_s


def plan_speed(config: Config, ranks: int, towers: Towers, rates: Rates) -> Speed | None:
    """The time of a step; None where the GPU's rates are not known."""
    if not (rates.gpu.half and rates.gpu.link):
        return None
    K, kind = config.num_micro_batches(ranks), precision(config.deepspeed)
    cost = loss_cost(config.loss.name, config.loss.options, config.global_batch // ranks, ranks, towers.width)
    # All micro-batches but the last are forwarded once more, without a graph.
    flops = (K - 1) * towers.replay_flops + K * towers.flops
    loss_s, link = cost.flops / rates.flops(cost.precision), rates.link(ranks)
    received = _count_engine(config, ranks, K, towers) if ranks > 1 else 0
    of_loss_s, of_engine_s = cost.received_bytes / link, received / link
    # Only gradients travel beside the backward; at ZeRO 1 and 2 the updated parameters are gathered after it.
    zero = render_ds_config(config, ranks)["zero_optimization"]
    backward_s = (towers.flops - towers.replay_flops) / rates.flops(kind)
    beside_s = backward_s if K == 1 and stage(config.deepspeed) in (1, 2) and zero["overlap_comm"] else 0.0
    hidden_s = min(beside_s, 2 / 3 * of_engine_s) + (min(loss_s, of_loss_s) if cost.while_computing else 0.0)
    return Speed(
        towers_s=flops / rates.flops(kind),
        loss_s=loss_s,
        comm_s=of_loss_s + of_engine_s,
        comm_bytes=cost.received_bytes + received,
        exposed_s=of_loss_s + of_engine_s - hidden_s,
    )


def _count_engine(config: Config, ranks: int, K: int, towers: Towers) -> int:
    """Bytes of gradients and parameters that a rank receives in a step; at ZeRO 1 and 2 a third are parameters."""
    level = stage(config.deepspeed)
    parameters = towers.trained * DTYPES[precision(config.deepspeed)].itemsize
    part = (ranks - 1) / ranks
    if level < 2:  # once a step: an all_reduce, and at ZeRO 1 a gather of the updated parameters
        return int(part * parameters * (2 + level))
    if level == 2:  # an all_reduce for every micro-batch
        return int(part * parameters * (2 * K + 1))
    # Parameters for every forward and backward, unless they stay; gradients to their owners.
    return int(part * parameters * (3 * K - 1 + K))
