"""Find the fastest settings that fit, for the recipe's global batch or for the largest one, and write a recipe."""

from __future__ import annotations

from bisect import bisect_left
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Literal

from disco_ds.config import Config, check_config
from disco_ds.config.ds_config import merge
from disco_ds.config.recipe_yaml import dump
from disco_ds.models.gpus import Gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.speed import plan_speed
from disco_ds.plan.towers import Towers, trace

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
TIE = 1.02
"""`fit` accepts settings that are slower than the fastest by at most this factor.

Of all accepted settings, it takes those with the fewest changes to the recipe.
"""


def fit(
    config: Config,
    ranks: int,
    gpu: Gpu,
    host_gib: float | None,
    assumed: Assumptions,
    batch: Batch = "same",
) -> tuple[Config, Towers]:
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
            ENOUGH times this size if it is faster.

    Returns:
        The recipe with the settings that were found, and what its towers need for a micro-batch.

    Raises:
        ValueError: If nothing fits; the message states the least GPU memory that is needed.
    """
    b = config.global_batch // ranks
    sizes = list(MICRO_BATCHES)
    if batch == "same":
        sizes = [m for m in range(min(sizes[0], b), min(sizes[-1], b) + 1) if b % m == 0]
        sizes = sizes or [config.micro_batch]
    given = config.zero_stage
    offloads = any("offload" in key for key in config.deepspeed.get("zero_optimization", {}))
    # lamb, muon and offload may need other settings at another stage. With them, only the recipe's stage is tried.
    is_free = given and config.optim.name not in ("lamb", "muon") and not offloads
    stages = (1, 2, 3) if is_free and batch == "same" else (given,)
    places = [config.image_staging] if host_gib is None else ["device", "host", "compressed"]

    def change(K: int, m: int, checkpointing: bool, pixels: str, level: int) -> Config:
        """Return the recipe with K micro-batches of m samples, image_staging `pixels` and ZeRO stage `level`."""
        update = {
            "global_batch": ranks * K * m,
            "micro_batch": m,
            "image_staging": pixels,
            "model": config.model.model_copy(update={"activation_checkpointing": checkpointing}),
            "ranks": ranks,
        }
        return with_stage(config.model_copy(update=update), level)

    def fits(tried: Config, towers: Towers) -> bool:
        memory = plan_memory(tried, ranks, towers, assumed)
        host_bytes = min(ranks, assumed.per_host) * sum(memory.host.values())
        return memory.total <= gpu.gib * GIB and (host_gib is None or host_bytes <= host_gib * GIB)

    found = []
    for checkpointing in (False, True):
        few, many = (
            trace(change(1, m, checkpointing, "device", given), m, assumed=assumed)
            for m in (sizes[0], sizes[-1])
        )
        for m, pixels, level in product(sizes, places, stages):
            towers = few.interpolate(many, (m - sizes[0]) / max(sizes[-1] - sizes[0], 1))
            variant = m, checkpointing, pixels, level
            most = MAX_GLOBAL_BATCH // (ranks * m)
            counts = [b // m] if batch == "same" else range(1, most + 1)
            # The index of the first K that does not fit is also the number of K that fit.
            num = bisect_left(counts, True, key=lambda K: not fits(change(K, *variant), towers))
            if num:
                K = counts[num - 1]
                chosen = change(K, *variant)
                speed = plan_speed(chosen, ranks, towers, gpu, assumed)
                # All micro-batches except the last run the forward pass twice.
                flops = K * towers.flops + (K - 1) * towers.replay_flops
                found.append(((speed.step_s if speed else flops) / (K * m), chosen, towers))
    if not found:
        # Report what the settings with the lowest memory use would need. The loop has traced them last, as `few`.
        K = b // sizes[0] if batch == "same" else 1
        least = change(K, sizes[0], True, places[-1], stages[-1])
        needed = plan_memory(least, ranks, few, assumed).total / GIB
        raise ValueError(
            f"nothing fits in {gpu.gib:g} GiB: micro-batches of {sizes[0]}, with activation checkpointing, need "
            f"{needed:.2f} GiB; use a smaller zero_optimization.reduce_bucket_size or more GPUs"
        )
    # A slightly smaller batch is accepted if it saves much recomputation.
    enough = ENOUGH * max(chosen.global_batch for _, chosen, _ in found)
    large = [entry for entry in found if entry[1].global_batch >= enough]
    limit = TIE * min(work for work, _, _ in large)
    fast = [entry for entry in large if entry[0] <= limit]
    _, best, towers = min(fast, key=lambda entry: (len(list_changes(config, entry[1])), entry[0]))
    return _shorten_warmup(best), towers


def with_stage(config: Config, level: int) -> Config:
    """Return the recipe with ZeRO stage `level`."""
    if level == config.zero_stage:
        return config
    changes = {"zero_optimization": {"stage": level}}
    return config.model_copy(update={"deepspeed": merge(deepcopy(config.deepspeed), changes)})


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


def _shorten_warmup(config: Config) -> Config:
    """Shorten the warmup if the run has too few steps for warmup and cooldown.

    The new warmup takes a tenth of the steps before the cooldown.
    """
    optim = config.optim
    if config.epochs is not None or optim.warmup_steps + optim.cooldown_steps <= config.num_steps:
        return config
    warmup_steps = (config.num_steps - optim.cooldown_steps) // 10
    optim = optim.model_copy(update={"warmup_steps": warmup_steps})
    return config.model_copy(update={"optim": optim})


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
    where = f"the fitted recipe (global_batch {config.global_batch:,})"
    check_config(config.model_dump(mode="json"), where)
    folder.mkdir(parents=True, exist_ok=True)
    tree = config.model_dump(mode="json", exclude_defaults=True)
    text = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(text + dump(tree), encoding="utf-8")
    return path
