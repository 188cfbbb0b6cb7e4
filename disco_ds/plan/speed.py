"""Predict the time of a step from the FLOPs that each rank computes and the bytes that it receives, at given rates.

Communication is assumed not to overlap with computation. Waiting for data, stragglers, latencies and
the optimizer's computation are not counted. The first step
also tunes the loss's kernels and compiles the towers, which is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_ds.config import Config, render_ds_config
from disco_ds.config.ds_config import precision, zero_stage
from disco_ds.models.dtypes import PARAMETER_DTYPES
from disco_ds.models.gpus import Gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.losses import loss_cost
from disco_ds.plan.towers import Towers


@dataclass(frozen=True)
class Speed:
    """Times of one step."""

    towers_s: float
    loss_s: float
    comm_s: float
    comm_bytes: int
    """Bytes that a rank receives in a step."""

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
    # Tensor cores multiply TF32 at half the rate of 16 bits.
    rates = {"fp32": gpu.fp32, "tf32": gpu.half / 2}

    def flop_rate(kind: str) -> float:
        return 1e12 * assumed.efficiency * rates.get(kind, gpu.half)

    # Across hosts, the slowest connection decides.
    link = gpu.link if ranks <= assumed.per_host else min(gpu.link, assumed.between_hosts)
    # All micro-batches except the last run an additional forward pass, without a graph.
    tower_flops = (K - 1) * towers.replay_flops + K * towers.flops
    comm_bytes = cost.received_bytes + _count_engine(config, ranks, K, towers)
    return Speed(
        towers_s=tower_flops / flop_rate(precision(config.deepspeed)),
        loss_s=cost.flops / flop_rate(cost.precision),
        comm_s=comm_bytes / (1e9 * link),
        comm_bytes=comm_bytes,
    )


def _count_engine(config: Config, ranks: int, K: int, towers: Towers) -> int:
    """Count the bytes of gradients and parameters that a rank receives in a step."""
    ds_config = render_ds_config(config, ranks)
    level = zero_stage(ds_config)
    parameters = towers.trained * PARAMETER_DTYPES[precision(ds_config)].itemsize
    gradients = (
        towers.trained
        * PARAMETER_DTYPES[ds_config["communication_data_type"] or precision(ds_config)].itemsize
    )
    part = (ranks - 1) / ranks
    if level < 2:  # per step: an all_reduce, and at ZeRO 1 a gather of the updated parameters
        return int(part * (2 * gradients + level * parameters))
    if level == 2:  # an all_reduce per micro-batch, and one gather per step
        return int(part * (2 * K * gradients + parameters))
    # ZeRO 3: parameters are gathered for each of the 3K - 1 passes, and each micro-batch's gradients
    # are sent to the ranks that own them.
    return int(part * ((3 * K - 1) * parameters + K * gradients))
