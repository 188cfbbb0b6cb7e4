"""The plan of a run: memory and time of a step, and the search for the fastest settings or the largest batch."""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from disco_ds.config import Config, check_config
from disco_ds.config.recipe_yaml import dump
from disco_ds.data import count_epoch, load_sources
from disco_ds.models.fast.texts import is_small, packs
from disco_ds.models.gpus import Gpu, find_gpu
from disco_ds.plan.assumptions import DEFAULTS, Assumptions
from disco_ds.plan.memory import GIB, Memory, plan_memory
from disco_ds.plan.speed import Speed, plan_speed
from disco_ds.plan.towers import Towers, fake_tensors, prepare_model, trace

Batch = Literal["same", "largest"]
MICRO_BATCHES = (64, 256, 1024, 4096)
"""Micro-batch sizes that are tried. Below 64, temporary copies of the weights dominate the peak memory.

If the global batch is kept, the search instead tries all sizes from the first to the last that divide a rank's samples
per step. Only the smallest and the largest size are traced. For sizes between them, the towers' memory is interpolated
linearly. The interpolated memory is never too low: at each moment of a step, memory is linear in the size, so the peak
is a maximum of linear functions. Such a maximum is convex, so it never exceeds the interpolation.
"""
MAX_GLOBAL_BATCH = 2**26
"""Largest global batch that the search considers."""
ENOUGH = 0.9
"""When `fit` looks for the largest global batch, it accepts batches down to this fraction of the largest one that fits.
Of all accepted settings, it takes the fastest: those with the least time per sample or, if the GPU's rates are unknown,
the fewest FLOPs per sample."""
TIE = 1.05
"""`fit` accepts settings that are slower than the fastest by at most this factor, which is the error of planned times.

Of all accepted settings, it takes those with the fewest changes to the recipe.
"""


@dataclass
class Plan:
    """Memory and time that one step of a run will need.

    Raises:
        ValueError: If the recipe does not suit the number of ranks, or if the cost of the loss is unknown.
    """

    config: Config
    """The recipe, including the settings that the search of plan_run has chosen."""
    ranks: int
    gpu: Gpu
    assumed: Assumptions
    towers: Towers
    """What the towers need for a micro-batch."""
    memory: Memory = field(init=False)
    speed: Speed | None = field(init=False)
    """Times of a step; None if the GPU's FLOP/s or the bandwidth of its link is unknown."""

    def __post_init__(self) -> None:
        self.memory = plan_memory(self.config, self.ranks, self.towers, self.assumed)
        self.speed = plan_speed(self.config, self.ranks, self.towers, self.gpu, self.assumed)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak memory fits in the memory of the GPU."""
        return self.memory.total <= self.gpu.gib * GIB

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on a host: one for each of its GPUs, but not more than the run has."""
        return min(self.ranks, self.assumed.per_host)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the ranks on one host need together, without Python and its libraries."""
        return self.ranks_per_host * sum(self.memory.host.values())

    @property
    def work(self) -> float:
        """Time of a step per sample or, if it is unknown, the FLOPs of the towers per sample."""
        if self.speed:
            return self.speed.step_s / self.config.global_batch
        # All micro-batches except the last run the forward pass twice.
        K = self.config.num_micro_batches(self.ranks)
        flops = K * self.towers.flops + (K - 1) * self.towers.replay_flops
        return flops / (K * self.config.micro_batch)


def plan_run(
    config: Config,
    ranks: int | None = None,
    gpu: str | Gpu = "A100-80G",
    assumed: Assumptions = DEFAULTS,
    search: Batch | None = None,
    host_gib: float | None = None,
) -> Plan:
    """Plan the memory and speed of a run without a GPU, by tracing its towers on fake tensors.

    Args:
        config: The recipe.
        ranks: Number of GPUs; by default the recipe's ranks, or 1.
        gpu: A GPU, its name, or its memory in GiB, as for `disco-ds plan --gpu-memory`.
        assumed: Assumptions of the plan.
        search: None plans the recipe as it is. "same" searches for the fastest settings for the recipe's global batch.
            "largest" searches for the largest global batch that fits, or for a slightly smaller one that is faster.
        host_gib: Memory of a host in GiB. If it is given, the search also varies image_staging.

    Raises:
        ValueError: If the batch cannot be divided evenly among the ranks, the model cannot be traced,
            the cost of the loss is unknown, or, with `search`, nothing fits.

    Example:
        >>> from disco_ds import load_config, plan_run
        >>> plan = plan_run(load_config("quickstart"), ranks=2, gpu="RTX-4090")
        >>> plan.fits, plan.memory.peak
        (True, 'backward')
    """
    chosen = find_gpu(gpu) if isinstance(gpu, str) else gpu
    ranks = ranks or config.ranks or 1
    if search != "largest":
        config.num_micro_batches(ranks)  # raises before the trace if the batch is invalid
    epoch_samples = assumed.data_samples or 0
    # The manifest of remote shards is a local file. Without it, the bucket would have to be listed.
    is_listed = all(
        "://" not in str(part.shards) or part.manifest for part in config.data.per_source
    )
    if is_listed and not epoch_samples:
        with suppress(ValueError, OSError):  # this machine may not have the data
            sources = load_sources(config.data)
            epoch_samples = count_epoch(config.data, sources)
            num_samples = sum(source.num_samples for source in sources)
            assumed = assumed.model_copy(update={"data_samples": num_samples})
    if assumed.text_tokens is not None and not packs_texts(config):
        assumed = assumed.model_copy(update={"text_tokens": None})
    if search:
        made = fit(config, ranks, chosen, host_gib, assumed, search, epoch_samples)
    else:
        towers = trace(config, config.micro_batch, text_tokens=assumed.text_tokens)
        made = Plan(config, ranks, chosen, assumed, towers)
    if epoch_samples:
        made.config = made.config.with_samples(epoch_samples)
    return made


def packs_texts(config: Config) -> bool:
    """Return whether a GPU would pack the texts of a run, so that it does not compute their padding."""
    with fake_tensors(config):
        model: Any = prepare_model(config)
    # Towers that trim a micro-batch to its longest text do not count, because among many texts one is usually long.
    tower = getattr(model, "text", model)
    return not model.two_views and packs(tower) and is_small(tower) and config.precision != "fp32"


def fit(
    config: Config,
    ranks: int,
    gpu: Gpu,
    host_gib: float | None,
    assumed: Assumptions,
    batch: Batch,
    epoch_samples: int,
) -> Plan:
    """Find the fastest settings that fit.

    The search varies the micro-batch size, activation checkpointing, image_staging (if host_gib is given) and, if the
    global batch is kept, the ZeRO stage.

    Args:
        config: The recipe.
        ranks: Number of GPUs.
        gpu: The kind of GPU.
        host_gib: Memory of each host in GiB, which limits the images and everything else that the plan places on a
            host. None: the images stay on the GPU, and host memory is not limited.
        assumed: Assumptions of the plan.
        batch: "same": keep the recipe's global batch. "largest": find the largest one that fits, or a batch of at least
            ENOUGH times this size if it is faster. The batch is not larger than the whole run.
        epoch_samples: Number of samples of an epoch; 0 if it is unknown.

    Raises:
        ValueError: If nothing fits; the message states the least GPU memory that is needed.
    """
    b = config.global_batch // ranks
    low, high = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    if batch == "same":
        sizes = [m for m in range(min(low, b), min(high, b) + 1) if b % m == 0]
        sizes = sizes or [config.micro_batch]
    else:
        num_samples = config.samples or int((config.epochs or 0) * epoch_samples)
        most = min(num_samples or MAX_GLOBAL_BATCH, MAX_GLOBAL_BATCH)
        sizes = [m for m in MICRO_BATCHES if ranks * m <= most] or [max(most // ranks, 1)]
    given = config.zero_stage
    offloads = any("offload" in key for key in config.deepspeed.get("zero_optimization", {}))
    # lamb, muon and offload may need other settings at another stage. With them, only the recipe's stage is tried.
    is_free = given and config.optim.name not in ("lamb", "muon") and not offloads
    stages = (1, 2, 3) if is_free and batch == "same" else (given,)
    stagings = [config.image_staging] if host_gib is None else ["device", "host"]

    def plan_batch(base: Config, towers: Towers, m: int, pixels: str, level: int, K: int) -> Plan:
        """Plan K micro-batches of m samples, with image_staging `pixels` and ZeRO stage `level`."""
        zero = base.deepspeed.get("zero_optimization", {}) | {"stage": level}
        planned = base.replace(
            global_batch=ranks * K * m,
            micro_batch=m,
            image_staging=pixels,
            ranks=ranks,
            deepspeed=base.deepspeed | {"zero_optimization": zero},
        )
        return Plan(planned, ranks, gpu, assumed, towers)

    def fits(made: Plan) -> bool:
        return made.fits and (host_gib is None or made.host_bytes <= host_gib * GIB)

    candidates: list[Plan] = []
    for checkpointing in (False, True):
        model = config.model.replace(activation_checkpointing=checkpointing)
        base = config.replace(model=model)
        few, many = (trace(base, m, text_tokens=assumed.text_tokens) for m in (sizes[0], sizes[-1]))
        fitting = set[tuple[int, str]]()
        for m, pixels, level in product(sizes, stagings, stages):
            # A higher stage only saves memory: its additional collectives have latencies, which are not planned.
            if level != given and (m, pixels) in fitting:
                continue
            towers = few.interpolate(many, (m - sizes[0]) / max(sizes[-1] - sizes[0], 1))
            plan = partial(plan_batch, base, towers, m, pixels, level)
            counts = [b // m] if batch == "same" else range(1, most // (ranks * m) + 1)
            # The index of the first K that does not fit is also the number of K that fit.
            num = bisect_left(counts, True, key=lambda K: not fits(plan(K)))
            if num:
                fitting.add((m, pixels))
                candidates.append(plan(counts[num - 1]))
    if not candidates:
        # Report what the settings with the lowest memory use would need. The loop has traced them last, as `few`.
        K = b // sizes[0] if batch == "same" else 1
        least = plan_batch(base, few, sizes[0], stagings[-1], stages[-1], K)
        needed = least.memory.total / GIB
        raise ValueError(
            f"nothing fits in {gpu.gib:g} GiB: micro-batches of {sizes[0]}, with activation checkpointing, need "
            f"{needed:.2f} GiB; use a smaller zero_optimization.reduce_bucket_size or more GPUs"
        )
    # A slightly smaller batch is accepted if it saves much recomputation.
    enough = ENOUGH * max(made.config.global_batch for made in candidates)
    large = [made for made in candidates if made.config.global_batch >= enough]
    limit = TIE * min(made.work for made in large)
    fast = [made for made in large if made.work <= limit]
    return min(fast, key=lambda made: (len(list_changes(config, made.config)), made.work))


def list_changes(before: Config, after: Config) -> list[str]:
    """Return the settings that `fit` has changed, as overrides such as "micro_batch=256"."""
    old, new = (
        {
            "micro_batch": config.micro_batch,
            "model.activation_checkpointing": config.model.activation_checkpointing,
            "image_staging": config.image_staging,
            "deepspeed.zero_optimization.stage": config.zero_stage,
        }
        for config in (before, after)
    )
    return [f"{name}={str(new[name]).lower()}" for name in new if new[name] != old[name]]


def write_recipe(config: Config, folder: Path, comment: str) -> Path:
    """Write a recipe with its ds_config to recipe.yaml.

    Args:
        config: The recipe.
        folder: The folder to write to. It is created if it does not exist.
        comment: Text to put at the top of the file, as comment lines.

    Returns:
        The path of recipe.yaml.

    Raises:
        ValueError: If the folder already has a recipe, or if settings contradict each other.
    """
    path = folder / "recipe.yaml"
    if path.exists():
        raise ValueError(f"--fit {folder}: {path} already exists; name another folder")
    check_config(
        config.model_dump(mode="json"), f"the fitted recipe (global_batch {config.global_batch:,})"
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"# {line}\n" for line in comment.splitlines())
    text += dump(config.model_dump(mode="json", exclude_defaults=True))
    path.write_text(text, encoding="utf-8")
    return path
