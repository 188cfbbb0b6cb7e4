"""Checks on one host: the recipe (as a run checks it at its start), the loss's kernels, and the data's shards."""

from collections.abc import Iterator

import torch
from deepspeed.runtime.config import DeepSpeedConfig

from disco_ds.checks.report import Line
from disco_ds.config import Config, find_late, make_schedule, render_ds_config
from disco_ds.data import Manifest, count_epoch, load_sources
from disco_ds.data.sources.load import check_cache, count_slots
from disco_ds.data.sources.shards import find_changed
from disco_ds.distributed import comm
from disco_ds.eval import load_sets
from disco_ds.losses.kernels.similarity import find_problem
from disco_ds.names import plural
from disco_ds.training.build import check_image_sizes, check_without_data, make_loss


def check_recipe(config: Config, ranks: int) -> Iterator[Line]:
    """Run the checks of a run's start that read no data. `disco-ds train --dry-run` runs only these.

    Raises:
        ValueError: If a run would refuse to start.
        AssertionError: If DeepSpeed refuses a combination of settings.
    """
    description = config.describe(ranks)
    check_ds_config(config)
    check_without_data(config)
    yield Line("ok", "recipe", description.replace("\n", "; "))


def check_start(config: Config, ranks: int) -> Iterator[Line]:
    """Run the checks that a run makes at its start, before it opens the training data.

    Raises:
        ValueError: If a run would refuse to start.
        AssertionError: If DeepSpeed refuses a combination of settings.
    """
    yield from check_recipe(config, ranks)
    load_sets(config.eval, config.data)
    check_image_sizes(config)
    yield check_kernels(config)


def check_ds_config(config: Config) -> None:
    """Check the ds_config's keys and values, and then run DeepSpeed's own checks on it.

    Raises:
        ValueError: If a key or value is invalid.
        AssertionError: If DeepSpeed refuses a combination of settings.
    """
    # Render it for one rank, because DeepSpeed checks the batch against the current number of ranks.
    alone = config.replace(ranks=None, global_batch=config.micro_batch)
    DeepSpeedConfig(render_ds_config(alone, 1))


def check_kernels(config: Config) -> Line:
    """Check that the loss's Triton kernels run on this host's GPU."""
    tiling = getattr(make_loss(config), "tiling", None)
    device = comm.local_device()
    if tiling is None or device.type != "cuda" or tiling.impl == "torch":
        return Line("ok", "kernels", "torch computes the loss")
    if problem := find_problem(device, tiling.on(device).precision):
        remedy = "install a C compiler (gcc or clang); without the kernels, torch is used, which is slower"
        return Line("warn", "kernels", f"Triton does not run here: {problem}", remedy)
    return Line("ok", "kernels", f"Triton runs on {torch.cuda.get_device_name(device)}")


def check_data(config: Config, ranks: int, ranks_here: int = 0) -> Iterator[Line]:
    """Check the sources, the length of the run, data.slots and the cache for remote shards.

    Args:
        config: The recipe.
        ranks: World size.
        ranks_here: Number of ranks on this host. 0 means one per device, or all ranks if this host has no device.

    Raises:
        ValueError: If the data cannot be opened, if data.slots does not fit the data or the ranks, if the cache cannot
            contain the shards that are read at a time, or if the run's length is invalid.
    """
    sources = load_sources(config.data)
    for source in sources:
        if isinstance(source, Manifest) and source.num_samples:
            found = f"{plural(len(source.shards), 'shard')}, {plural(source.num_samples, 'sample')}"
            # A run makes this check at its start: local shards must have the file sizes in the manifest.
            if changed := find_changed(source):
                found += f"; {len(changed):,} changed since they were indexed, such as {changed[0]}"
            remedy = "`disco-ds index SHARDS --check` lists them; restore the shards, or index them again"
            yield Line("warn" if changed else "ok", "manifest", found, remedy)
    slots = count_slots(config.data, sources, ranks)
    ranks_here = ranks_here or min(ranks, torch.accelerator.device_count() or ranks)
    check_cache(config.data, sources, slots, ranks, ranks_here)
    yield Line("ok", "data.slots", f"{slots}, {slots // ranks} per rank")
    num_samples = sum(source.num_samples for source in sources)
    epoch_samples = count_epoch(config.data, sources)
    yield from check_length(config, epoch_samples)
    if 0 < num_samples < config.global_batch:
        found = (
            f"the data has {num_samples:,} samples, fewer than global_batch={config.global_batch}, "
            "so a batch contains some samples twice"
        )
        yield Line("warn", "data", found, "use more data, or lower global_batch")


def check_length(config: Config, epoch_samples: int) -> Iterator[Line]:
    """Check the number of steps, the warmup and the intervals.

    Args:
        config: The recipe.
        epoch_samples: Number of samples in an epoch. 0: unknown; then a length in epochs is not checked.

    Raises:
        ValueError: If the run is shorter than a step or than its warmup and cooldown.
    """
    num_steps, num_epochs = None, config.epochs
    if epoch_samples or config.epochs is None:
        schedule = make_schedule(config.with_samples(epoch_samples))
        num_steps = schedule.num_steps
        num_epochs = schedule.num_samples / epoch_samples if epoch_samples else None
        yield Line("ok", "length", f"{num_steps:,} steps")
    for problem in find_late(config, num_steps, num_epochs):
        yield Line("warn", "length", problem, "set a smaller interval")
