"""Peak memory of a GPU and of a host, by part and moment of a step. DeepSpeed's own memory is that of version 0.19."""

# b samples of this rank = K micro-batches x m, N ranks, D width; e bytes of a parameter, P trained, F frozen

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disco_ds.config import Config, OptimSettings, render_ds_config
from disco_ds.config.ds_config import precision, stage
from disco_ds.data.staging import LEAST_AHEAD, count_buffers, count_on_device
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.losses import LossCost, loss_cost
from disco_ds.plan.towers import DTYPES, Towers

GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer", "activations", "features", "loss", "pixels", "communication", "slack")
ALLREDUCE = 500_000_000
"""Elements that DeepSpeed flattens at a time at ZeRO 0."""


@dataclass(frozen=True)
class Memory:
    """Memory by part, as planned."""

    moments: dict[str, dict[str, int]]
    """Bytes of a GPU by moment of the step, and then by part."""
    host: dict[str, int]
    """Bytes of the host by part, for one rank."""

    @property
    def peak(self) -> str:
        """The moment that needs the most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part at the peak."""
        return self.moments[self.peak]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())


def plan_memory(config: Config, ranks: int, towers: Towers, assumed: Assumptions | None = None) -> Memory:
    """Memory of one of `ranks` GPUs under this recipe.

    Args:   towers: traced with the recipe's micro_batch; assumed: by default as Assumptions has it.
    Raises: ValueError for a recipe that does not fit the ranks, or a loss or an offload that is not known here.
    """
    ds_config, assumed = render_ds_config(config, ranks), assumed or Assumptions()
    b = config.global_batch // ranks
    num_samples = known_samples(config, assumed.num_samples)
    cost = loss_cost(config.loss.name, config.loss.options, b, ranks, towers.width, num_samples)
    held, host = _states(config, ds_config, ranks, towers)
    half_features = 2 * 4 * b * towers.width
    waiting = config.micro_batch * count_on_device(config.num_micro_batches(ranks), config.pixels)
    moments = {
        # The features of the micro-batches; in the loss the leaves joined from them too; then also their gradients.
        "forward": {"activations": max(towers.replay, towers.forward), "features": half_features},
        "loss": {"activations": towers.held, "features": 2 * half_features, "loss": cost.peak},
        "backward": {"activations": max(towers.backward, towers.forward), "features": 3 * half_features},
        "update": {"features": 3 * half_features},
    }
    for name, moment in moments.items():
        moment |= held[name] | {"pixels": waiting * towers.sample}
        moment["loss"] = moment.get("loss", 0) + (0 if cost.state_on_host else cost.state)
        moment["slack"] = int(assumed.slack * sum(moment.values()) + assumed.context_gib * GIB)
    ordered = {name: {part: moment.get(part, 0) for part in PARTS} for name, moment in moments.items()}
    host |= _host(config, b, towers, cost, assumed.image_bytes)
    if config.checkpoint.asynchronous:
        host["checkpoint, copied"] = _copied(config, ranks, towers, min(ranks, assumed.per_host)) + cost.state
    return Memory(ordered, host)


def known_samples(config: Config, given: int | None) -> int:
    """Number of samples in the data. Raises: ValueError where a loss needs it and it is not given."""
    if config.data.source == "synthetic" and given is None:
        return config.data.num_samples
    if given is None and loss_cost(config.loss.name, config.loss.options, 1, 1, 1, 1).state:
        raise ValueError(f"loss {config.loss.name} keeps state for every sample: give their number, --data-samples N")
    return given or 0


def _states(
    config: Config, ds_config: dict[str, Any], N: int, towers: Towers
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Memory that the engine holds: by moment and part on the GPU, and by part on the host."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero, level = DeepSpeedZeroConfig(**ds_config["zero_optimization"]), stage(ds_config)
    e, K = DTYPES[precision(ds_config)].itemsize, config.num_micro_batches(N)
    P, F = towers.trained, towers.frozen
    share = -(-P // N)  # elements of the trained parameters whose states this rank keeps
    numbers = count_moments(config.optim)
    offloads = [_offloads(part) for part in (zero.offload_optimizer, zero.offload_param)]
    # In fp32: the optimizer's numbers of each element, and at ZeRO 1 to 3 a master copy of the parameters.
    states = 4 * share * (1 + numbers) if level else 4 * P * numbers
    overlaps = bool(zero.overlap_comm)
    bucket = int(zero.reduce_bucket_size)
    # With overlap_comm at ZeRO 2, engine.py widens the bucket to the largest parameter.
    bucket = e * (max(bucket, towers.largest) if level == 2 and overlaps else bucket)
    # Gradients: `left` of them after the backward, `gradients` at its peak.
    parameters, left, always = (P + F) * e, P * e if level == 0 else share * e, 0
    if level == 2 and K > 1:  # the sum over earlier micro-batches beside the new ones
        left *= 2
    gradients = left
    if level == 1 and not (overlaps and K == 1):  # all gradients, until they are copied into the bucket
        gradients += P * e - min(P * e, bucket)
    elif level in (1, 2):  # besides, the one that autograd is computing
        gradients += towers.largest * e
    elif level == 3:
        # This rank's share of the parameters, and as many gathered ones as the ds_config allows at a time.
        own = 0 if offloads[1] else -(-(P + F) // N) * e
        parameters = own + min(P + F, int(zero.max_live_parameters)) * e
        always = bucket if zero.contiguous_gradients else 0
    backward = min(P * e, bucket) if level else 0  # flattened for the reduction
    if level in (1, 2) and zero.contiguous_gradients:
        backward += bucket * (1 + overlaps)
    # At ZeRO 0 the flattened gradients of the all_reduce, else the fp32 gradients of the share.
    update = min(P, ALLREDUCE) * e if level == 0 else 4 * share
    host = {}
    if offloads[0]:
        host["optimizer"], states, update = states + share * (4 + e), 0, 0
        if level > 1:
            backward, gradients, left = backward + towers.largest * e, 0, 0
    if offloads[1]:
        host["parameters"] = -(-(P + F) // N) * e
    common = {"parameters": parameters, "optimizer": states}
    moments = {
        "forward": common | {"communication": always},
        "loss": common | {"communication": always},
        "backward": common | {"communication": always + backward, "gradients": gradients},
        "update": common | {"communication": always + update, "gradients": left},
    }
    return moments, host


def count_moments(optim: OptimSettings) -> int:
    """Numbers that the optimizer keeps for each trained element."""
    return {"adamw": 2, "lamb": 2, "lion": 1, "sgd": int(optim.momentum > 0)}[optim.name]


def count_checkpoint(config: Config, towers: Towers) -> tuple[int, int]:
    """Bytes of a checkpoint's parameters as the engine has them, and of its optimizer states with fp32 copies if any.

    At ZeRO 3 the partitions of the trained parameters are their fp32 copies alone.
    """
    level, itemsize = stage(config.deepspeed), DTYPES[precision(config.deepspeed)].itemsize
    parameters = towers.frozen + (0 if level == 3 else towers.trained)
    return itemsize * parameters, 4 * towers.trained * (count_moments(config.optim) + (level > 0))


def _copied(config: Config, N: int, towers: Towers, per_host: int) -> int:
    """Bytes of one rank's part of a checkpoint, but for the loss's state; rank 0's own part is spread over its host."""
    parameters, states = count_checkpoint(config, towers)
    level = stage(config.deepspeed)
    return parameters // (N if level == 3 else per_host) + states // (N if level else per_host)


def _offloads(settings: Any) -> bool:
    """Whether this part is on the host. Raises: ValueError for any other place, which is not planned for."""
    place = getattr(settings, "device", "none")
    if place not in ("none", "cpu"):
        raise ValueError(f"plan does not know what is offloaded to {settings.device}; it knows cpu")
    return place == "cpu"


def _host(config: Config, b: int, towers: Towers, cost: LossCost, image_bytes: int) -> dict[str, int]:
    """Bytes that one rank holds on the host for data and loss, beside Python and its libraries."""
    m, K = config.micro_batch, b // config.micro_batch
    # A run chooses its workers by the cores of its host, which are not known here.
    workers = 1 if config.data.workers is None else config.data.workers
    buffers = count_buffers(config.data.prefetch, K, config.pixels, workers, most=LEAST_AHEAD)
    host = {"pixels, in buffers": buffers * m * towers.sample}
    if config.pixels == "compressed":
        host["images, compressed"] = b * image_bytes
    if cost.state_on_host:
        host["loss"] = cost.state
    return host


def describe_pixels(b: int, towers: Towers, image_bytes: int) -> str:
    """What it takes to hold the step's images, as pixels and compressed."""
    return (
        f"pixels: {b:,} samples a rank are {b * towers.sample / 1e9:,.1f} GB as uint8, held between the two passes; "
        f"with pixels=compressed {b * image_bytes / 1e9:,.1f} GB (at {image_bytes / 1000:g} kB each), decoded twice"
    )


def search_largest(fits: Callable[[int], bool], at_most: int = 2**40) -> int:
    """The largest n >= 0 with fits(n), by bisection: it must hold up to some n, and for none above."""
    high = 1
    # Double until it fails, then halve the interval.
    while high <= at_most and fits(high):
        high *= 2
    low, high = high // 2, min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def interpolate(known: Sequence[tuple[int, Towers]], m: int) -> Towers:
    """Towers of m samples from the traces of two micro-batches, on the straight line through them."""
    (m0, first), (m1, second) = known
    values = {
        name: value + (getattr(second, name) - value) * (m - m0) // (m1 - m0) for name, value in vars(first).items()
    }
    return Towers(**values)
