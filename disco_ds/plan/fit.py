"""The largest global batch that fits, and the settings that reach it, as a recipe."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import yaml

from disco_ds.config import Config, check_config
from disco_ds.config.recipe_yaml import Dumper
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import GIB, interpolate, plan_memory, search_largest
from disco_ds.plan.towers import Towers, trace

TRACED = (64, 1024)
"""Micro-batches that are traced; others are interpolated. Below the first the peak is of temporaries of the weights."""
TRIED = tuple(2**i for i in range(6, 13))
LARGEST = 2**26
"""Global batch at which the search ends."""
NEARLY = 0.9
"""Fraction of the largest global batch: of the settings that reach it, the fastest per sample is taken."""


def fit(config: Config, ranks: int, gib: float, host_gib: float | None, assumed: Assumptions) -> Config:
    """The recipe with the largest global batch, over micro-batches, activation checkpointing and where pixels wait.

    Args:   gib: memory of a GPU; host_gib: memory of a host, where pixels may wait; None: they stay on the device.
    Raises: ValueError when nothing fits, with the least that is needed.
    """
    per_host = min(ranks, assumed.per_host)

    def change(B: int, m: int, saves: bool, pixels: str) -> Config:
        model = config.model.model_copy(update={"activation_checkpointing": saves})
        update = {"global_batch": B, "micro_batch": m, "pixels": pixels, "model": model, "ranks": ranks}
        return config.model_copy(update=update)

    def fits(tried: Config, towers: Towers) -> bool:
        memory = plan_memory(tried, ranks, towers, assumed)
        on_host = host_gib is None or per_host * sum(memory.host.values()) <= host_gib * GIB
        return memory.total <= gib * GIB and on_host

    def reach(saves: bool, m: int, pixels: str) -> tuple[int, float, int, Config]:
        """The largest global batch, then what it is ranked by (FLOPs per sample, larger micro-batches), the recipe."""
        towers = interpolate([(n, trace(change(ranks, 1, saves, pixels), n)) for n in TRACED], m)
        part = ranks * m
        K = search_largest(lambda K: fits(change(part * K, m, saves, pixels), towers), LARGEST // part)
        replays = (K - 1) / K if K else 0  # the last micro-batch is forwarded once, all others twice
        return part * K, (towers.flops + replays * towers.replay_flops) / m, -m, change(part * K, m, saves, pixels)

    places = ("device",) if host_gib is None else ("device", "host", "compressed")
    found = [reach(*choice) for choice in product((False, True), TRIED, places)]
    # A little batch is given up where that saves much recomputation.
    enough = max(1, NEARLY * max(B for B, *_ in found))
    for *_, best in sorted((item for item in found if item[0] >= enough), key=lambda item: item[1:3]):
        # Interpolated so far; what is written must fit by its own trace.
        if fits(best, trace(best, best.micro_batch)):
            return _shorten_warmup(best)
    # Nothing fits: report what the most modest settings would need.
    least = change(ranks * TRIED[0], TRIED[0], True, "device")
    memory = plan_memory(least, ranks, trace(least, TRIED[0]), assumed)
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in memory.parts.items() if size)
    raise ValueError(
        f"nothing fits {gib:g} GiB: a micro-batch of {TRIED[0]} alone, with activation checkpointing, needs "
        f"{memory.total / GIB:.2f} ({parts}); use a higher ZeRO stage, smaller buckets, or more GPUs"
    )


def _shorten_warmup(config: Config) -> Config:
    """Warm up for a tenth of the run, where the larger batch has left fewer steps than the warm-up takes."""
    if config.epochs is not None or config.optim.warmup_steps + config.optim.cooldown_steps <= config.num_steps:
        return config
    optim = config.optim.model_copy(update={"warmup_steps": (config.num_steps - config.optim.cooldown_steps) // 10})
    return config.model_copy(update={"optim": optim})


def write_recipe(config: Config, folder: Path, comment: str) -> Path:
    """Write recipe.yaml and ds_config.json. Raises: ValueError where there is a recipe already, or settings clash."""
    path = folder / "recipe.yaml"
    if path.exists():
        raise ValueError(f"--fit {folder}: {path} is there already; name another folder")
    tree = config.model_dump(mode="json", exclude_defaults=True)
    check_config(config.model_dump(mode="json"), f"the recipe of global batch {config.global_batch:,} that fits")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(config.deepspeed, indent=2) + "\n", encoding="utf-8")
    text = yaml.dump(tree | {"deepspeed": "ds_config.json"}, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    path.write_text("".join(f"# {line}\n" for line in comment.splitlines()) + text, encoding="utf-8")
    return path
