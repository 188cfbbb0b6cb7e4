"""Predict the time of a step from the FLOPs that each rank computes and the bytes that it receives, at given rates.

Communication is assumed not to overlap with computation. Waiting for data, stragglers, latencies and
the optimizer's computation are not counted. The additional time of the first step is only a rough estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_ds.config import Config, render_ds_config
from disco_ds.config.ds_config import precision, stage
from disco_ds.losses import build_loss
from disco_ds.losses.blocks import TiledLoss
from disco_ds.models.dtypes import DTYPES
from disco_ds.models.gpus import Gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.losses import loss_cost
from disco_ds.plan.towers import Towers

TUNING_S = 30.0
"""Seconds in which Triton tunes a loss's kernels, as measured on an H200 (docs/results.md)."""
COMPILE_S = 16.0
"""Seconds that torch.compile takes for the blocks of both towers, as measured on an H100 (docs/results.md)."""


@dataclass(frozen=True)
class Speed:
    """Times of one step."""

    towers_s: float
    loss_s: float
    comm_s: float
    comm_bytes: int
    """Bytes that a rank receives in a step."""
    tuning_s: float
    """Seconds that the first step takes to tune the loss's kernels, unless the results are cached."""
    compile_s: float
    """Seconds that the first step takes to compile the towers, unless the compiled code is cached."""

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.towers_s + self.loss_s + self.comm_s


def plan_speed(
    config: Config, ranks: int, towers: Towers, gpu: Gpu, assumed: Assumptions
) -> Speed | None:
    """Predict the times of a step; None if the GPU's rates are unknown."""
    if not (gpu.half and gpu.link):
        return None
    K = config.num_micro_batches(ranks)
    b = config.global_batch // ranks
    cost = loss_cost(
        config.loss.name, config.loss_options, b, ranks, towers.width, 0, towers.teacher_width
    )
    nominal = {"fp32": gpu.fp32, "tf32": gpu.tf32}

    def flop_rate(kind: str) -> float:
        return 1e12 * assumed.efficiency * nominal.get(kind, gpu.half)

    # Across hosts, the slowest connection decides.
    link = gpu.link if ranks <= assumed.per_host else min(gpu.link, assumed.between_hosts)
    # All micro-batches except the last run an additional forward pass, without a graph.
    tower_flops = (K - 1) * towers.replay_flops + K * towers.flops
    comm_bytes = cost.received_bytes + _count_engine(config, ranks, K, towers)
    loss = build_loss(config.loss.name, **config.loss_options)
    tuned = isinstance(loss, TiledLoss) and loss.tiling.impl != "torch"
    compiled = config.model.compile and stage(config.deepspeed) < 3
    return Speed(
        towers_s=tower_flops / flop_rate(precision(config.deepspeed)),
        loss_s=cost.flops / flop_rate(cost.precision),
        comm_s=comm_bytes / (1e9 * link),
        comm_bytes=comm_bytes,
        tuning_s=TUNING_S if tuned else 0.0,
        compile_s=COMPILE_S if compiled else 0.0,
    )


def _count_engine(config: Config, ranks: int, K: int, towers: Towers) -> int:
    """Count the bytes of gradients and parameters that a rank receives in a step."""
    ds_config = render_ds_config(config, ranks)
    level = stage(ds_config)
    parameters = towers.trained * DTYPES[precision(ds_config)].itemsize
    gradients = (
        towers.trained
        * DTYPES[ds_config["communication_data_type"] or precision(ds_config)].itemsize
    )
    part = (ranks - 1) / ranks
    if level < 2:  # per step: an all_reduce, and at ZeRO 1 a gather of the updated parameters
        return int(part * (2 * gradients + level * parameters))
    if level == 2:  # an all_reduce per micro-batch, and one gather per step
        return int(part * (2 * K * gradients + parameters))
    # ZeRO 3: parameters are gathered for each of the 3K - 1 passes, and each micro-batch's gradients
    # are sent to the ranks that own them.
    return int(part * ((3 * K - 1) * parameters + K * gradients))
