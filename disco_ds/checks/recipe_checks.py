"""Checks on one host: the recipe (as a run checks it at its start), the loss's kernels, and the data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from deepspeed.runtime.config import DeepSpeedConfig

from disco_ds.checks import Line, Status
from disco_ds.config import Config, DataSettings, make_schedule, render_ds_config
from disco_ds.data import (
    BrokenSample,
    ImageSpec,
    Manifest,
    SampleForm,
    Source,
    load_sources,
)
from disco_ds.data.images.broken import DroppedSample, breaks_sample, name_broken
from disco_ds.data.remote.cache_size import fit_cache
from disco_ds.data.sources.load import count_slots
from disco_ds.data.sources.manifest import find_changed
from disco_ds.distributed import comm
from disco_ds.eval import load_sets
from disco_ds.losses.kernels import find_problem
from disco_ds.names import plural
from disco_ds.training.build import check_image_sizes, check_without_data, make_loss

_SAMPLES = 32
"""Number of samples read from each of three shards: the first, the middle and the last."""


def check_start(config: Config, ranks: int) -> Iterator[Line]:
    """Run the checks that a run makes at its start, before it opens the training data.

    Raises:
        ValueError: If a run would refuse to start.
        AssertionError: If DeepSpeed refuses a combination of settings.
    """
    found = config.describe(ranks)
    check_ds_config(config)
    check_without_data(config)
    load_sets(config.eval, config.data)
    check_image_sizes(config)
    yield Line("ok", "recipe", found.replace("\n", "; "))
    yield check_kernels(config)


def check_ds_config(config: Config) -> None:
    """Check the ds_config's keys and values, and then run DeepSpeed's own checks on it.

    Raises:
        ValueError: If a key or value is invalid.
        AssertionError: If DeepSpeed refuses a combination of settings.
    """
    # Render it for one rank, because DeepSpeed checks the batch against the current number of ranks.
    alone = config.model_copy(update={"ranks": None, "global_batch": config.micro_batch})
    DeepSpeedConfig(render_ds_config(alone, 1))


def check_kernels(config: Config) -> Line:
    """Check that the loss's Triton kernels run on this host's GPU."""
    tiling = getattr(make_loss(config.loss, config.optim), "tiling", None)
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
        ranks_here: Number of ranks on this host; 0 means one per device, or all ranks if there is no device.

    Raises:
        ValueError: See load_sources, count_slots, fit_cache, Config.with_samples and make_schedule.
    """
    sources = load_sources(config.data)
    for part, source in zip(config.data.parts, sources, strict=True):
        if isinstance(source, Manifest) and source.num_samples:
            yield _compare(source)
        yield _read(source, config.data.settings_of(part))
    slots = count_slots(config.data, sources, ranks)
    ranks_here = ranks_here or min(ranks, torch.accelerator.device_count() or ranks)
    fit_cache(config.data, sources, slots, ranks, ranks_here)
    yield Line("ok", "data.slots", f"{slots}, {slots // ranks} per rank")
    num_samples = sum(source.num_samples for source in sources)
    schedule = make_schedule(config.with_samples(num_samples))
    yield Line("ok", "length", f"{schedule.num_steps:,} steps")
    if 0 < num_samples < config.global_batch:
        found = (
            f"the data has {num_samples:,} samples, fewer than global_batch={config.global_batch}, "
            "so a batch contains some samples twice"
        )
        yield Line("warn", "data", found, "use more data, or lower global_batch")


def _compare(source: Manifest) -> Line:
    """Compare the shards' sizes with the manifest, as a run does at its start."""
    found = f"{plural(len(source.shards), 'shard')}, {plural(source.num_samples, 'sample')}"
    changed = find_changed(source)
    if changed:
        found += f"; {len(changed):,} changed since they were indexed, such as {changed[0]}"
    remedy = "`disco-ds index SHARDS --check` lists them; restore the shards, or index them again"
    return Line("warn" if changed else "ok", "manifest", found, remedy)


def _read(source: Source, data: DataSettings) -> Line:
    """Read a few samples. Captions are not tokenized, because a tokenizer accepts any text."""
    form = SampleForm(ImageSpec((32, 32)), lambda texts: torch.zeros(1, 1), 1, vocab_size=3)
    reader = source.open_samples(data, form, 0, 1)
    last = len(source.sizes) - 1
    broken, dropped = [], 0
    chosen: set[tuple[int, int]] = set()
    for shard in (0, last // 2, last):
        size = source.sizes[shard] or reader.count(shard)  # the size is 0 if data.index=none
        # The samples are spread evenly over the shard.
        chosen.update((shard, i * size // _SAMPLES) for i in range(_SAMPLES) if size)
    for shard, entry in sorted(chosen):
        try:
            with breaks_sample(OSError):
                decode, *_ = reader.read(shard, entry, 0, entry)
                decode()
        except DroppedSample:
            dropped += 1
        except BrokenSample as error:
            broken.append(name_broken(reader.name, shard, entry, error))
    reader.close()
    found = f"{len(chosen)} read, {len(broken)} broken"
    if dropped:
        found += f", {dropped} dropped by data.filter, data.uids or data.stages"
    status: Status = "ok"
    if not chosen:
        return Line(
            "fail", "samples", "the shards contain no complete sample", "are they tar files?"
        )
    if dropped == len(chosen):
        return Line("warn", "samples", found, "check data.filter, data.uids and data.stages")
    if broken:
        found += f"; the last: {broken[-1]}"
        # Only a few samples are read, so one or two more than data.max_broken allows may be broken by chance. If more
        # than half are broken, the check always fails.
        many = len(broken) > 2 + data.max_broken * len(chosen) or 2 * len(broken) > len(chosen)
        status = "fail" if many else "warn"
    remedy = (
        "see data.image_key and data.captions; a run stops once the fraction of broken samples exceeds "
        f"data.max_broken={data.max_broken:g}"
    )
    return Line(status, "samples", found, remedy)
