"""Find the largest global batch that fits, and write a recipe that trains with it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from pathlib import Path

import yaml

from disco_ds.config import Config, check_config
from disco_ds.config.recipe_yaml import Dumper
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.towers import Towers, trace

MICRO_BATCHES = (64, 256, 1024, 4096)
"""Micro-batch sizes that are tried. Below 64, temporary copies of the weights dominate the peak memory.

Only the first and the last are traced. The towers' memory at the other sizes is interpolated. The result is never too
low: at each moment, memory is linear in the size. So the peak, which is the maximum over moments, is convex, and a
line between two of its points never lies below it.
"""
MAX_GLOBAL_BATCH = 2**26
"""Largest global batch that the search considers."""
ENOUGH = 0.9
"""`fit` accepts global batches down to this fraction of the largest one. Of all accepted settings, it takes those with
the fewest FLOPs per sample."""


def fit(
    config: Config, ranks: int, gib: float, host_gib: float | None, assumed: Assumptions
) -> tuple[Config, Towers]:
    """Find the recipe with the largest global batch, or a slightly smaller one with less work per sample (see ENOUGH).

    The search varies the micro-batch size, activation checkpointing, and where pixels are held.

    Args:
        config: The recipe.
        ranks: Number of GPUs.
        gib: Memory per GPU in GiB.
        host_gib: Memory of each host in GiB, which limits the images and everything else that the plan places on a
            host. None: the images stay on the GPU, and host memory is not limited.
        assumed: Assumptions of the plan; see Assumptions.

    Returns:
        The recipe, and what its towers need.

    Raises:
        ValueError: If nothing fits; the message states the least GPU memory that is needed.
    """
    per_host = min(ranks, assumed.per_host)
    smallest, largest = MICRO_BATCHES[0], MICRO_BATCHES[-1]

    def change(K: int, m: int, checkpointing: bool, pixels: str) -> Config:
        """Return the recipe with K micro-batches of m samples per rank."""
        update = {
            "global_batch": ranks * K * m,
            "micro_batch": m,
            "image_staging": pixels,
            "model": config.model.model_copy(update={"activation_checkpointing": checkpointing}),
            "ranks": ranks,
        }
        return config.model_copy(update=update)

    def fits(tried: Config, towers: Towers) -> bool:
        memory = plan_memory(tried, ranks, towers, assumed)
        if host_gib is not None and per_host * sum(memory.host.values()) > host_gib * GIB:
            return False
        return memory.total <= gib * GIB

    places = ["device"] if host_gib is None else ["device", "host", "compressed"]
    found = []
    for checkpointing in (False, True):
        few, many = (
            trace(change(1, m, checkpointing, "device"), m, assumed=assumed)
            for m in (smallest, largest)
        )
        for m, pixels in product(MICRO_BATCHES, places):
            towers = few.interpolate(many, (m - smallest) / (largest - smallest))
            counts = range(1, MAX_GLOBAL_BATCH // (ranks * m) + 1)
            # counts starts at 1, so the index of the first K that does not fit is the largest K that fits.
            K = bisect_left(
                counts, True, key=lambda K: not fits(change(K, m, checkpointing, pixels), towers)
            )
            if K:
                # All micro-batches except the last run the forward pass twice.
                flops = K * towers.flops + (K - 1) * towers.replay_flops
                found.append((flops / (K * m), change(K, m, checkpointing, pixels), towers))
    if not found:
        # Report what the settings with the lowest memory use would need. The loop has traced them last, as `few`.
        least = change(1, smallest, True, "device")
        needed = plan_memory(least, ranks, few, assumed).total / GIB
        raise ValueError(
            f"nothing fits in {gib:g} GiB: a single micro-batch of {smallest}, with activation checkpointing, "
            f"needs {needed:.2f} GiB; use a higher ZeRO stage, smaller buckets, or more GPUs"
        )
    # A slightly smaller batch is accepted if it saves much recomputation.
    enough = ENOUGH * max(config.global_batch for _, config, _ in found)
    large = [entry for entry in found if entry[1].global_batch >= enough]
    _, best, towers = min(large, key=lambda entry: (entry[0], -entry[1].micro_batch))
    return _shorten_warmup(best), towers


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
    """Write recipe.yaml, which contains the ds_config.

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
    text += yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    return path
