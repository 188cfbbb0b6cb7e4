"""Predict the time of a step from the FLOPs that each rank computes and the bytes that it receives, at given rates.

The default rates are fitted to measured steps (tests/plan/test_measured_steps.py): 0.33 to nine steps of compiled
ViT-B/32 and ViT-B/16, and 0.385 to two steps of compiled ViT-L/14. The factor EAGER is fitted to one step of each of
these models without compilation.

With overlap_comm, gradients are reduced during the backward pass. Only those that have not been reduced by its end, at
least one bucket, are reduced after it. At ZeRO 3, parameters are also gathered during the forward and backward passes.
All other communication is assumed not to overlap with computation. Overlapping communication and computation are
assumed not to slow each other.

Not counted: waiting for data, stragglers, latencies, the optimizer's computation, and in the first step the tuning of
the loss's kernels and the compilation of the towers.
"""

import math
from dataclasses import dataclass

from disco_ds.config import Config, Tree, render_ds_config
from disco_ds.config.ds_config import precision, zero_stage
from disco_ds.models.gpus import Gpu
from disco_ds.models.param_groups import PARAMETER_DTYPES
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.losses import loss_cost
from disco_ds.plan.towers import Towers

RATES = {"ViT-B-32": 0.385, "ViT-B-16": 0.37, "ViT-L-14": 0.41}
"""Model name -> fraction of the GPU's nominal 16-bit FLOP/s that its compiled towers reached in autocast."""
MEASURED_ON = "H200"
"""GPU on which RATES was measured."""
EAGER = 0.82
"""FLOP/s of towers that are not compiled, as a fraction of the FLOP/s of compiled towers."""
OTHER_RATE = 0.37
"""Guess of the rate of models that are not in RATES. It is multiplied by EAGER if the towers are not compiled."""
OPEN_CLIP_RATE = 0.2
"""Guess of the fraction of the GPU's FLOP/s that the towers reach with model.towers=open_clip.

DisCo-CLIP's Table 4 gives 0.19 for ViT-B/32 on A100s.
"""
LOSS_RATE = 0.38
"""Guess of the fraction of the GPU's FLOP/s that the tiled losses reach.

On one H200, disco_fused reached 0.39 and siglip 0.48 (docs/results.md).
"""


@dataclass(frozen=True)
class Speed:
    """Times of one step."""

    towers_s: float
    loss_s: float
    comm_s: float
    """Time of all communication."""
    hidden_s: float
    """Part of comm_s that overlaps with the computation of the towers."""
    comm_bytes: int
    """Bytes that a rank receives in a step."""
    rate: float
    """Fraction of the GPU's FLOP/s that the towers are assumed to reach."""
    source: str
    """Where `rate` comes from, for the plan's text output."""

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.towers_s + self.loss_s + self.comm_s - self.hidden_s


def plan_speed(
    config: Config, ranks: int, towers: Towers, gpu: Gpu, assumed: Assumptions
) -> Speed | None:
    """Predict the times of a step. Return None if the GPU's FLOP/s or the bandwidth of its link is unknown."""
    if not (gpu.half and gpu.link):
        return None
    K = config.num_micro_batches(ranks)
    # Any number of samples: the state that a loss keeps for them takes no time.
    cost = loss_cost(
        config.loss.name,
        config.loss_options,
        config.global_batch // ranks,
        ranks,
        towers.width,
        1,
        towers.teacher_width,
    )
    # Tensor cores multiply TF32 at half the rate of 16 bits.
    rates = {"fp32": gpu.fp32, "tf32": gpu.half / 2}

    rate, source = assumed.efficiency, "given"
    if rate is None:
        rate, source = tower_rate(config, gpu)
    loss_rate = LOSS_RATE if assumed.efficiency is None else rate
    # Across hosts, the slowest connection decides.
    link = gpu.link if ranks <= assumed.per_host else min(gpu.link, assumed.bandwidth)
    # All micro-batches except the last run an additional forward pass, without a graph.
    tower_flops = (K - 1) * towers.replay_flops + K * towers.flops
    ds_config = render_ds_config(config, ranks)
    gradient_bytes, parameter_bytes = _count_engine(ds_config, ranks, K, towers)
    comm_bytes = cost.received_bytes + gradient_bytes + parameter_bytes
    flops_per_s = 1e12 * rate * rates.get(config.precision, gpu.half)
    hidden_s = 0.0
    zero = ds_config["zero_optimization"]
    if zero["stage"] and zero.get("overlap_comm") and ranks > 1:
        # Number of passes during which communication takes place, the bytes that are received in all of them, and the
        # FLOPs of one pass. At ZeRO 1 and 2, these are backward passes.
        num_passes, received = 1, gradient_bytes
        flops: float = towers.flops - towers.replay_flops
        if zero["stage"] == 2:
            num_passes = K
        if zero["stage"] == 3:
            num_passes, received = 3 * K - 1, gradient_bytes + parameter_bytes
            flops = tower_flops / num_passes
        num_buckets = math.ceil(towers.trained / zero["reduce_bucket_size"])
        each_s = received / (1e9 * link) / num_passes
        hidden_s = num_passes * hide(each_s, flops / flops_per_s, num_buckets)
    return Speed(
        towers_s=tower_flops / flops_per_s,
        loss_s=cost.flops / (1e12 * loss_rate * rates.get(cost.precision, gpu.half)),
        comm_s=comm_bytes / (1e9 * link),
        hidden_s=hidden_s,
        comm_bytes=comm_bytes,
        rate=rate,
        source=source,
    )


def tower_rate(config: Config, gpu: Gpu) -> tuple[float, str]:
    """Return the fraction of the GPU's FLOP/s that the towers are expected to reach, and where it comes from."""
    model = config.model
    if model.towers == "open_clip":
        return OPEN_CLIP_RATE, "a guess"
    compiled = model.compile is True or (model.compile == "auto" and config.zero_stage < 3)
    rate = RATES.get(model.label, OTHER_RATE) * (1.0 if compiled else EAGER)
    if model.label not in RATES or config.precision != "autocast":
        return rate, f"a guess from {', '.join(RATES)} on {MEASURED_ON} in autocast"
    how = f"measured for {model.label}, {'compiled' if compiled else 'not compiled'}, on {MEASURED_ON}"
    return rate, how if gpu.name == MEASURED_ON else f"a guess for this GPU: {how}"


def hide(comm_s: float, window_s: float, num_buckets: int) -> float:
    """Return the part of the communication time that overlaps with computation.

    Args:
        comm_s: Time to reduce all buckets.
        window_s: Time of the computation. The buckets become ready at equal intervals, the last one at its end.
        num_buckets: Number of buckets of equal size.
    """
    bucket_s = comm_s / num_buckets
    exposed_s = max(bucket_s, comm_s - window_s * (1 - 1 / num_buckets))
    return comm_s - exposed_s


def _count_engine(ds_config: Tree, ranks: int, K: int, towers: Towers) -> tuple[int, int]:
    """Count the bytes of gradients and of parameters that a rank receives in a step."""
    level, kind = zero_stage(ds_config), precision(ds_config)
    sent = ds_config["communication_data_type"] or kind
    parameters = towers.trained * PARAMETER_DTYPES[kind].itemsize
    gradients = towers.trained * PARAMETER_DTYPES[sent].itemsize
    part = (ranks - 1) / ranks
    if level < 2:  # per step: an all_reduce, and at ZeRO 1 a gather of the updated parameters
        return int(part * 2 * gradients), int(part * level * parameters)
    if level == 2:  # an all_reduce per micro-batch, and one gather per step
        return int(part * 2 * K * gradients), int(part * parameters)
    # ZeRO 3: parameters are gathered for each of the 3K - 1 passes, and each micro-batch's gradients
    # are sent to the ranks that own them.
    return int(part * K * gradients), int(part * (3 * K - 1) * parameters)
