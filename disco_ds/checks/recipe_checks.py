"""Checks of a recipe that one host can make: the ds_config, the batch, the kernels, the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from disco_ds.checks import Line
from disco_ds.config import Config, DataSettings, render_ds_config
from disco_ds.config.ds_config import find_problems, precision, stage
from disco_ds.data import (
    BrokenSample,
    ImageSpec,
    Listing,
    Manifest,
    SampleForm,
    Source,
    index_shards,
    load_sources,
)
from disco_ds.data.images.broken import breaks_sample, name_broken
from disco_ds.data.remote.cache_size import fit_cache
from disco_ds.data.sources.counting import compare
from disco_ds.data.sources.load import count_slots
from disco_ds.data.sources.manifest import find_changed
from disco_ds.distributed import comm
from disco_ds.eval import load_sets
from disco_ds.losses import build_loss
from disco_ds.losses.kernels import find_problem
from disco_ds.metrics.tracking import check_packages
from disco_ds.training.build import check_model, make_loss

_DEAD = {
    "activation_checkpointing": "has no effect on open_clip's towers; model.activation_checkpointing of the recipe has",
    "zero_optimization.allgather_partitions": "is not read by DeepSpeed 0.19",
}
_STAGES_1_2 = (
    "allgather_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "round_robin_gradients",
    "parameter_align",
)
_STAGE_3 = (
    "offload_param",
    "sub_group_size",
    "zero_hpz_partition_size",
    "memory_efficient_linear",
    "stage3_",
)
_SLOW = (
    "flops_profiler",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "timers.throughput",
)
_SMALL, _MANY = 16, 64
"""A micro-batch below this leaves a GPU idle; more micro-batches than this are mostly overhead."""
_SAMPLES = 32
"""Samples that are read of the first, the middle and the last shard each."""


def check_ds_config(config: Config) -> Iterator[Line]:
    """Check every key, let DeepSpeed check the values, and name the keys that have no effect."""
    given = config.deepspeed
    problems = list(find_problems(given))
    try:
        if not problems:  # DeepSpeed gets the ds_config of a run on one rank
            alone = config.model_copy(update={"ranks": None, "global_batch": config.micro_batch})
            DeepSpeedConfig(render_ds_config(alone, 1))
            yield Line(
                "ok",
                "ds_config",
                f"ZeRO {stage(given)}, {precision(given)}: every key is known and has an effect",
            )
    except (ValueError, AssertionError) as error:  # pydantic's is a ValueError
        problems.append(str(error))
    for problem in problems:
        yield Line("fail", "ds_config", problem, "the files of ds_configs/ work")
    for key, reason in _find_dead(given):
        yield Line("warn", "ds_config", f"{key} {reason}", f"take {key} out of the ds_config")


def _find_dead(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that are accepted but have no effect, are deprecated or cost time; and why."""
    zero = given.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    # Keys inside a section are named section.key.
    sections = {section: part for section, part in given.items() if isinstance(part, dict)}
    inside = {
        f"{section}.{name}": value
        for section, part in sections.items()
        for name, value in part.items()
    }
    for key, value in (given | inside).items():
        level, name = zero.get("stage", 0), key.removeprefix("zero_optimization.")
        field = DeepSpeedZeroConfig.model_fields.get(name)
        extra: Any = (field and field.json_schema_extra) or {}
        # The stages at which DeepSpeed reads a key of zero_optimization.
        stages = (
            {1, 2}
            if name.startswith(_STAGES_1_2)
            else {3}
            if name.startswith(_STAGE_3)
            else {1, 2, 3}
        )
        if value == "auto":
            yield (
                key,
                "is auto, which only Hugging Face's Trainer fills in: DeepSpeed takes its default",
            )
        elif key in _DEAD:
            yield key, _DEAD[key]
        elif key in _SLOW and (
            value.get("enabled") and value.get("synchronized", True)
            if isinstance(value, dict)
            else value
        ):
            yield key, "waits for the device in every step"
        elif name != key and extra.get("deprecated"):
            yield key, f"is deprecated in DeepSpeed 0.19: the name is {extra['new_param']}"
        elif name not in (key, "stage") and level not in stages:
            yield key, f"has no effect at ZeRO {level}"


def check_trackers(config: Config) -> Iterator[Line]:
    """Check that W&B or Comet is installed where the run logs to it. Raises: ValueError if it is not."""
    check_packages(config)
    yield Line("ok", "log", "packages that the run logs with are installed")


def check_loss(config: Config) -> Iterator[Line]:
    """Check the loss's name and options, and that the optimizer fits it. Raises: ValueError if one does not."""
    make_loss(config)
    yield Line("ok", "loss", config.loss.name)


def check_towers(config: Config) -> Iterator[Line]:
    """Check the model's name and settings, and that its weights are there. Raises: ValueError if not."""
    check_model(config)
    yield Line("ok", "model", config.model.factory or config.model.name)


def check_eval(config: Config) -> Iterator[Line]:
    """Check the sets to evaluate on, by opening them as a start does. Raises: ValueError."""
    yield Line("ok", "eval", f"{len(load_sets(config.eval, config.data))} sets")


def check_kernels(config: Config) -> Iterator[Line]:
    """Check that the loss's Triton kernels run on this host's GPU. Raises: ValueError if the loss cannot be built."""
    tiling = getattr(build_loss(config.loss.name, **config.loss.options), "tiling", None)
    device = comm.local_device()
    if tiling is None:
        yield Line("ok", "kernels", f"{config.loss.name} has none of its own")
    elif device.type != "cuda":
        yield Line("ok", "kernels", "no GPU here: tiles are computed by torch")
    elif tiling.impl == "torch":
        yield Line("ok", "kernels", "loss.options.impl=torch: tiles are computed by torch")
    elif problem := find_problem(device, tiling.on(device).precision):
        remedy = "Triton needs a C compiler (gcc or clang) and a GPU that it knows; torch's tiles are slower"
        yield Line("warn", "kernels", f"Triton's do not run here: {problem}", remedy)
    else:
        yield Line("ok", "kernels", f"Triton's run on {torch.cuda.get_device_name(device)}")


def check_batch(config: Config, ranks: int) -> Iterator[Line]:
    """Check that the ranks divide the batch, into sensible parts. Raises: ValueError, see Config.num_micro_batches."""
    count = config.num_micro_batches(ranks)
    yield Line("ok", "batch", config.describe(ranks).splitlines()[0])
    if config.micro_batch < _SMALL:
        remedy = "raise micro_batch" if count > 1 else "raise global_batch, or take fewer ranks"
        yield Line("warn", "batch", f"micro_batch {config.micro_batch} leaves a GPU idle", remedy)
    if count > _MANY:
        found = f"{count} micro-batches per rank and step, all but the last forwarded twice"
        yield Line(
            "warn", "batch", found, "raise micro_batch; model.activation_checkpointing makes room"
        )


def check_sources(config: Config, sources: Sequence[Source]) -> Iterator[Line]:
    """Check the counts and a few samples of each source, as this host has them."""
    for part, source in zip(config.data.parts, sources, strict=True):
        if isinstance(source, Manifest):
            yield _count(source, config)
        yield _read(source, config.data.settings_of(part))


def check_data(config: Config, ranks: int, ranks_here: int | None = None) -> Iterator[Line]:
    """Check the sources, their number of samples, the slots and the cache of remote shards.

    Args:    ranks_here: ranks on this host; None: as many as it has devices.
    Raises:  ValueError, see load_sources, count_slots and fit_cache.
    """
    data, sources = config.data, load_sources(config.data)
    yield from check_sources(config, sources)
    sizes = [size for source in sources for size in source.sizes]
    workers = data.workers or 1
    slots = count_slots(data, sources, ranks)
    fit_cache(
        data,
        sources,
        slots,
        ranks,
        ranks_here or min(ranks, torch.accelerator.device_count() or ranks),
    )
    few = slots < ranks * workers
    found = (
        f"{slots} for {ranks} ranks x {workers} workers"
        if data.workers
        else f"{slots} for {ranks} ranks"
    )
    yield Line(
        "warn" if few else "ok",
        "data.slots",
        found,
        f"data.workers={slots // ranks}; more have nothing to do",
    )
    try:
        yield Line("ok", "length", f"{config.with_steps(sum(sizes)).num_steps:,} steps")
    except ValueError as error:
        yield Line(
            "fail",
            "length",
            str(error),
            "raise epochs, or lower global_batch or optim.warmup_steps",
        )
    if sum(sizes) < config.global_batch:
        found = f"{sum(sizes):,} samples are fewer than global_batch {config.global_batch:,}: a pair meets itself"
        yield Line("warn", "data", found, "more data, or a smaller global_batch")


def _count(source: Manifest, config: Config) -> Line:
    """Count the first, the middle and the last shard again, and some that have changed, against the manifest."""
    last = len(source.shards) - 1
    changed = find_changed(source)
    chosen = sorted({0, last // 2, last, *changed[:3]})
    shards, urls = (
        [source.shards[i] for i in chosen],
        tuple(source.urls[i] for i in chosen if source.urls),
    )
    listing = Listing(source.folder, tuple(shard.name for shard in shards), urls)
    odd: list[str] = []
    wrong = compare(
        shards, index_shards(listing, remote=config.data.remote, warn=odd.append).shards
    )
    found = (
        f"{last + 1:,} shards, {source.num_samples:,} samples; {len(chosen)} shards counted again, "
    )
    found += "; ".join([f"{len(changed)} changed since they were indexed", *wrong, *odd])
    remedy = "disco-ds index SHARDS --check lists all; restore the shards, or index again"
    return Line("fail" if wrong else "warn" if changed or odd else "ok", "manifest", found, remedy)


def _read(source: Source, data: DataSettings) -> Line:
    """Read a few samples, but for the tokens: a tokenizer takes any text."""
    form = SampleForm(ImageSpec((32, 32)), lambda texts: torch.zeros(1, 1), 1, vocab_size=3)
    reader = source.open_samples(data, form, 0, 1)
    sizes, last, broken = source.sizes, len(source.sizes) - 1, []
    # Spread evenly over three shards.
    chosen = {
        (shard, i * sizes[shard] // _SAMPLES)
        for shard in (0, last // 2, last)
        if sizes[shard]
        for i in range(_SAMPLES)
    }
    for shard, entry in sorted(chosen):
        try:
            with breaks_sample(OSError):
                decode, _ = reader.read(shard, entry, 0, entry)
                decode()
        except BrokenSample as error:
            broken.append(name_broken(reader.name, shard, entry, error))
    reader.close()
    captions = sum(": caption " in text for text in broken)
    found = f"{len(chosen)} read, {len(broken) - captions} broken, {captions} without caption"
    found += f"; the last: {broken[-1]}" if broken else ""
    remedy = f"see data.image_key and data.captions; more than data.max_broken={data.max_broken:g} stop a run"
    # A sample or two may be broken by chance, however few are read.
    many = len(broken) > 2 + data.max_broken * len(chosen) or 2 * len(broken) > len(chosen)
    return Line("fail" if many else "warn" if broken else "ok", "samples", found, remedy)
