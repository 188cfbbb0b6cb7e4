"""What one host can tell: packages that fit together, the ds_config, the batch algebra, the data."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from disco_ds.config import Config, render_ds_config
from disco_ds.doctor import Line
from disco_ds.doctor.probe import installed
from disco_ds.ds_config import find_problems, precision, stage

PACKAGES = ("disco_ds", "torch", "torchvision", "triton", "deepspeed", "open_clip_torch", "timm", "webdataset")
_DEAD = {
    "activation_checkpointing": "has no effect on open_clip's towers; the recipe's model.activation_checkpointing has",
    "zero_optimization.allgather_partitions": "is read nowhere in DeepSpeed 0.19",
    "zero_optimization.cpu_offload_use_pin_memory": "is read nowhere in DeepSpeed 0.19; offload_optimizer.pin_memory is",
}
_STAGES_1_2 = ("allgather_bucket_size", "use_multi_rank_bucket_allreduce", "round_robin_gradients", "parameter_align")
_STAGE_3 = ("offload_param", "sub_group_size", "zero_hpz_partition_size", "memory_efficient_linear", "stage3_")
_SLOW = ("flops_profiler", "comms_logger", "wall_clock_breakdown", "memory_breakdown")
_SMALL, _MANY = 16, 64
"""A micro-batch below this leaves a GPU idle; more micro-batches than this are mostly overhead."""
_SAMPLES = 32
"""Read of each of the first, the middle and the last shard."""


def check_versions() -> Iterator[Line]:
    """PACKAGES against what each of them requires, and whether they import."""
    here = {name: version for name in PACKAGES if (version := installed(name))}
    yield Line("ok", "versions", ", ".join(f"{name} {version}" for name, version in here.items()))
    if "disco_ds" not in here:
        yield Line("warn", "versions", "disco_ds is not installed, so its bounds are not known", "pip install -e .")
    for package in here:
        for asked in map(Requirement, metadata.requires(package) or ()):
            version = installed(asked.name)
            if asked.marker and not asked.marker.evaluate({"extra": ""}):
                continue
            if version is None or not asked.specifier.contains(version, prereleases=True):
                found = f"{package} {here[package]} needs {asked.name}{asked.specifier}, got {version}"
                yield Line("fail", "versions", found, f"pip install '{asked.name}{asked.specifier}'")
    for name in ("torch", "torchvision", "deepspeed", "open_clip", "webdataset"):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            builds = "torch and torchvision are not of one build (CPU, CUDA): install both again, from one index"
            remedy = builds if "torchvision::" in str(error) else f"install {name} again"
            yield Line("fail", "versions", f"import {name}: {type(error).__name__}: {error}", remedy)
            return


def check_ds_config(config: Config) -> Iterator[Line]:
    given = config.deepspeed
    problems = list(find_problems(given)) or list(_ask_deepspeed(config))
    for problem in problems:
        yield Line("fail", "ds_config", problem, "ds_configs/ has files that work")
    for key, reason in _find_dead(given):
        yield Line("warn", "ds_config", f"{key} {reason}", f"take {key} out of the ds_config")
    if not problems:
        yield Line("ok", "ds_config", f"ZeRO {stage(given)}, {precision(given)}: every key is known and has an effect")


def _ask_deepspeed(config: Config) -> Iterator[str]:
    """What we, or DeepSpeed itself, have against the values, as they would be at one rank."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        alone = config.model_copy(update={"ranks": None, "global_batch": config.micro_batch})
        DeepSpeedConfig(render_ds_config(alone, 1))
    except (ValueError, AssertionError) as error:  # pydantic's is a ValueError
        yield str(error)


def _find_dead(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that are accepted and have no effect, are of yesterday, or cost time; and why."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = given.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    level = zero.get("stage", 0)
    for name, value in zero.items():
        field = DeepSpeedZeroConfig.model_fields.get(name)
        extra: Any = (field and field.json_schema_extra) or {}
        stages = {1, 2} if name.startswith(_STAGES_1_2) else {3} if name.startswith(_STAGE_3) else {1, 2, 3}
        if extra.get("deprecated"):
            yield f"zero_optimization.{name}", f"is deprecated in DeepSpeed 0.19: the name is {extra['new_param']}"
        elif name != "stage" and level not in stages:
            yield f"zero_optimization.{name}", f"has no effect at ZeRO {level}"
    for key, value in (given | {f"zero_optimization.{name}": value for name, value in zero.items()}).items():
        if value == "auto":
            yield key, "is auto, which only Hugging Face's Trainer fills in: DeepSpeed takes its default"
        elif key in _DEAD:
            yield key, _DEAD[key]
        elif key in _SLOW and (value.get("enabled") if isinstance(value, dict) else value):
            yield key, "waits for the device in every step"


def check_batch(config: Config, ranks: int) -> Iterator[Line]:
    """Raises: ValueError, see Config.num_micro_batches."""
    count = config.num_micro_batches(ranks)
    yield Line("ok", "batch", config.describe(ranks).splitlines()[0])
    if config.micro_batch < _SMALL:
        remedy = "raise micro_batch" if count > 1 else "raise global_batch, or take fewer ranks"
        yield Line("warn", "batch", f"micro_batch {config.micro_batch} leaves a GPU idle", remedy)
    if count > _MANY:
        found = f"{count} micro-batches per rank and step, all but the last forwarded twice"
        yield Line("warn", "batch", found, "raise micro_batch; model.activation_checkpointing makes room")


def check_data(config: Config, ranks: int) -> Iterator[Line]:
    """Counts, a few samples of each source, slots. Raises: ValueError, see load_sources and choose_slots."""
    from disco_ds.data import Manifest, choose_slots, load_sources

    data, sources = config.data, load_sources(config.data)
    for part, source in zip(data.parts, sources, strict=True):
        if isinstance(source, Manifest):
            yield _count(source, config)
        yield _read(data.settings_of(part), source)
    sizes = [size for source in sources for size in source.sizes] or [data.num_samples]
    slots = choose_slots(len(sizes), sum(sizes), data.slots, ranks) if sources else ranks * data.workers
    few = slots < ranks * data.workers
    found = f"{slots} for {ranks} ranks x {data.workers} workers"
    yield Line("warn" if few else "ok", "slots", found, f"data.workers={slots // ranks}; more have nothing to do")
    if sum(sizes) < config.global_batch:
        found = f"{sum(sizes):,} are fewer than global_batch {config.global_batch:,}: pairs meet themselves"
        yield Line("warn", "samples", found, "more data, or a smaller global_batch")


def _count(source: Any, config: Config) -> Line:
    """The first, the middle and the last shard, and some of those that have changed, against the manifest."""
    from disco_ds.data import Listing, index_shards
    from disco_ds.data.counting import compare
    from disco_ds.data.manifest import has_changed

    last = len(source.shards) - 1
    changed = [] if source.urls else [i for i, shard in enumerate(source.shards) if has_changed(source.folder, shard)]
    chosen = sorted({0, last // 2, last, *changed[:3]})
    shards = [source.shards[i] for i in chosen]
    listing = Listing(
        source.folder, tuple(s.name for s in shards), tuple(source.urls[i] for i in chosen if source.urls)
    )
    wrong = compare(shards, index_shards(listing, remote=config.data.remote).shards)
    found = f"{last + 1:,} shards, {source.num_samples:,} samples; counted again in {len(chosen)} shards"
    found += f"; {len(changed)} changed since they were indexed" if changed else ""
    found += "".join(f"; {text}" for text in wrong)
    remedy = "disco-ds index SHARDS --check tells all; restore the shards, or index again"
    return Line("fail" if wrong else "warn" if changed else "ok", "manifest", found, remedy)


def _read(data: Any, source: Any) -> Line:
    """A few samples, all but their tokens: a tokenizer takes any text."""
    import torch

    from disco_ds.data import BrokenSample, ImageSpec
    from disco_ds.data.source import ShardSource

    reader = ShardSource(data, source, ImageSpec((32, 32)), lambda texts: torch.zeros(1, 1), 1, 0, 1)
    last, broken = len(source.sizes) - 1, []
    chosen = {(shard, i * source.sizes[shard] // _SAMPLES) for shard in (0, last // 2, last) for i in range(_SAMPLES)}
    for shard, entry in sorted(chosen):
        try:
            reader.read(shard, entry, 0, entry)
        except BrokenSample as error:
            broken.append(f"{reader.name(shard, entry)}: {error}")
    reader.close()
    captions = sum(": caption " in text for text in broken)
    found = f"{len(chosen)} read, {len(broken) - captions} broken, {captions} without caption" + "; ".join(
        ["", *broken[-1:]]
    )
    remedy = f"see data.image_key and data.captions; more than data.max_broken={data.max_broken:g} stop a run"
    many = len(broken) > 2 + data.max_broken * len(chosen)
    return Line("fail" if many else "warn" if broken else "ok", "samples", found, remedy)
