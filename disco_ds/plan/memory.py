"""Predict the peak memory of a GPU, by part and moment of a step, and the memory of a rank on its host.

DeepSpeed's memory is predicted for version 0.19.
"""

# b: samples per rank = K micro-batches x m samples; N: number of ranks; e: bytes per parameter;
# P: number of trained parameters; F: number of frozen parameters

from dataclasses import dataclass
from typing import Any

from disco_ds.config import Config, render_ds_config
from disco_ds.data.batches import LEAST_AHEAD, count_buffers, count_on_device
from disco_ds.models.param_groups import PARAMETER_DTYPES
from disco_ds.plan.assumptions import DEFAULTS, Assumptions
from disco_ds.plan.losses import loss_cost
from disco_ds.plan.towers import Towers

GIB = 2**30
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "features",
    "loss",
    "pixels",
    "communication",
    "teacher",
    "slack",
)
ALLREDUCE = 500_000_000
"""At ZeRO 0, DeepSpeed reduces gradients in a flat buffer, into which it copies up to this many elements at a time."""


@dataclass(frozen=True)
class Memory:
    """Planned memory of a GPU and of a host, by part."""

    moments: dict[str, dict[str, int]]
    """Moment of a step (forward, loss, backward or update) -> part in PARTS -> bytes of a GPU."""
    host: dict[str, int]
    """Part, such as "pixels, in buffers" -> bytes of the host that one rank needs."""

    @property
    def peak(self) -> str:
        """The moment of a step at which a GPU needs the most memory."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        """Part -> bytes of a GPU at the moment with the most memory."""
        return self.moments[self.peak]

    @property
    def total(self) -> int:
        """Bytes of a GPU at the moment with the most memory."""
        return sum(self.parts.values())


def plan_memory(
    config: Config, ranks: int, towers: Towers, assumed: Assumptions = DEFAULTS
) -> Memory:
    """Predict the memory of one of `ranks` GPUs.

    Args:
        config: The recipe.
        ranks: Number of GPUs.
        towers: The result of towers.trace for the recipe's micro_batch.
        assumed: Assumptions of the plan.

    Raises:
        ValueError: If the recipe cannot run on this number of ranks, plan/losses.py does not know its loss, or the loss
            needs the number of samples and it is not assumed.
    """
    b, K = config.global_batch // ranks, config.num_micro_batches(ranks)
    cost = loss_cost(
        config.loss.name,
        config.loss_options,
        b,
        ranks,
        towers.width,
        assumed.data_samples or 0,
        towers.teacher_width,
    )
    engine_moments, host = _plan_engine(config, ranks, towers)
    features = 2 * 4 * b * towers.width
    # The forward holds the features of all micro-batches. The loss adds their concatenation, and the
    # backward adds their gradients.
    moments = {
        "forward": {"activations": max(towers.replay, towers.forward), "features": features},
        "loss": {"activations": towers.held, "features": 2 * features, "loss": cost.peak},
        "backward": {
            "activations": max(towers.backward, towers.forward),
            "features": 3 * features,
        },
        "update": {"features": 3 * features},
    }
    num_pixels = config.micro_batch * count_on_device(K, config.image_staging)
    # The teacher's weights, and its features twice: of each micro-batch, and concatenated.
    teacher = towers.teacher * PARAMETER_DTYPES[config.precision].itemsize
    teacher += 2 * 2 * 4 * b * towers.teacher_width
    ordered = {}
    for name, moment in moments.items():
        moment["teacher"] = teacher
        moment |= engine_moments[name]
        moment["pixels"] = num_pixels * towers.sample
        if not cost.state_on_host:
            moment["loss"] = moment.get("loss", 0) + cost.state
        moment["slack"] = int(assumed.slack * sum(moment.values()) + assumed.context_gib * GIB)
        ordered[name] = {part: moment.get(part, 0) for part in PARTS}
    # By default, the number of workers depends on the cores of the host, which are unknown here. Any number above 0
    # needs the same buffers.
    workers = 1 if config.data.workers is None else config.data.workers
    buffers = count_buffers(config.data.prefetch, K, config.image_staging, workers, LEAST_AHEAD)
    host["pixels, in buffers"] = buffers * config.micro_batch * towers.sample
    if cost.state_on_host:
        host["loss"] = cost.state
    return Memory(ordered, host)


def _plan_engine(
    config: Config, N: int, towers: Towers
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Predict the memory of the DeepSpeed engine.

    Returns:
        For the GPU: moment of a step -> part -> bytes. For the host: part -> bytes.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    ds_config = render_ds_config(config, N)
    zero = DeepSpeedZeroConfig(**ds_config["zero_optimization"])
    level = config.zero_stage
    e = PARAMETER_DTYPES[config.precision].itemsize
    K = config.num_micro_batches(N)
    P, F = towers.trained, towers.frozen
    share = -(-P // N)  # trained elements whose optimizer states this rank keeps
    stored = -(-(P + F) // N) * e  # bytes of this rank's part of the parameters, at ZeRO 3
    largest = towers.largest * e
    bucket = e * int(zero.reduce_bucket_size)
    if level == 2 and zero.overlap_comm:  # see deepspeed_quirks.widen_bucket
        bucket = max(bucket, largest)
    flattened = min(P * e, bucket)  # copy of the gradients that are being reduced
    sent = PARAMETER_DTYPES[ds_config["communication_data_type"] or config.precision].itemsize
    # Bytes of a gradient element when it is sent. If this is not e, the conversion takes another copy.
    converted = flattened // e * sent if sent != e else 0
    num_buckets = 1 + bool(zero.overlap_comm) if zero.contiguous_gradients else 0

    # Optimizer states in fp32; at ZeRO 1 to 3 with a master copy of the parameters. For a custom optimizer, two states
    # are assumed. For Muon, two are counted for every element, although it keeps only one for the elements of hidden
    # matrices. The average of optim.ema counts as a state.
    optim = config.optim
    kept = {"adamw": 2, "lamb": 2, "lion": 1, "muon": 2, "sgd": int(optim.momentum > 0)}
    num_states = (2 if optim.factory else kept[optim.name]) + (optim.ema is not None)
    states = 4 * share * (1 + num_states) if level else 4 * P * num_states
    parameters = (P + F) * e
    permanent_buffers = 0
    # `gradients` are held from the backward to the update. `extra_gradients` and `backward_buffers`
    # exist only during the backward, and `update_buffers` only during the update.
    gradients = (share if level else P) * e
    extra_gradients = 0
    backward_buffers = flattened + converted + num_buckets * bucket
    update_buffers = 4 * share
    if level == 0:
        backward_buffers = 0
        update_buffers = min(P, ALLREDUCE) * e
    elif level == 1 and not (zero.overlap_comm and K == 1):
        # All gradients are held until they are copied into the bucket. Without a bucket, they are reduced in flat
        # copies, and this rank keeps slices of these copies as its share. The last slice keeps its whole copy in
        # memory.
        extra_gradients = P * e - (flattened if zero.contiguous_gradients else gradients)
        if not zero.contiguous_gradients:
            update_buffers += min(extra_gradients, flattened)
    elif level < 3:
        extra_gradients = largest  # the one that autograd is computing
        if level == 2 and K > 1:
            # The sum over the earlier micro-batches, and the gradients of the current one.
            gradients *= 2
    else:
        # This rank's share, and as many gathered parameters as the ds_config allows at a time.
        parameters = min(P + F, int(zero.max_live_parameters)) * e
        permanent_buffers = bucket if zero.contiguous_gradients else 0
        backward_buffers = flattened + converted

    host = {}
    if _is_offloaded(zero.offload_param):
        host["parameters"] = stored
    elif level == 3:
        parameters += stored
    if _is_offloaded(zero.offload_optimizer):
        host["optimizer"] = states + share * (4 + e)
        states = update_buffers = 0
        if level > 1:
            gradients = extra_gradients = 0
            backward_buffers += largest

    idle = {"parameters": parameters, "optimizer": states, "communication": permanent_buffers}
    backward = {
        "communication": permanent_buffers + backward_buffers,
        "gradients": gradients + extra_gradients,
    }
    update = {"communication": permanent_buffers + update_buffers, "gradients": gradients}
    moments = {"forward": idle, "loss": idle, "backward": idle | backward, "update": idle | update}
    return moments, host


def _is_offloaded(settings: Any) -> bool:
    """Return whether DeepSpeed's offload_param or offload_optimizer settings offload to the host."""
    return getattr(settings, "device", "none") == "cpu"
