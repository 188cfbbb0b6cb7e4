"""The sources that a recipe names: loaded, checked, and put into one data order."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disco_ds.config.data import DataSettings, is_remote
from disco_ds.data.order import SLOTS, Mixture
from disco_ds.data.samples import SyntheticSource
from disco_ds.data.sources.base import Source, digest
from disco_ds.data.sources.cache import DISK_SHARE, find_limit
from disco_ds.data.sources.files import Table
from disco_ds.data.sources.selection import Selection
from disco_ds.data.sources.shards import (
    Manifest,
    find_shards,
    is_table,
    load_manifest,
    read_manifest,
    some,
)
from disco_ds.names import explain_errors, load_custom, plural

_DEFAULT_BYTES = 128e9
"""The default number of slots is so small that all slots together read at most this many bytes of remote shards at a
time."""


def load_sources(settings: DataSettings) -> list[Source]:
    """Load the sources that the settings name, and return them. There is at least one.

    No samples are read.

    Raises:
        ValueError: If shards or manifests are missing or do not match, if the settings do not allow remote shards, or
            if a class cannot be imported or constructed. The message begins with the setting of the source, such as
            data.shards.
    """
    sources: list[Source] = []
    for number, part in enumerate(settings.per_source):
        try:
            sources.append(_load(part))
            # Load the selection only to report errors in it before anything else is built. The workers load it again.
            Selection(part)
        except (ValueError, OSError) as error:
            key = "data.shards" if part.source == "shards" else "data.source"
            where = key if part is settings else f"data.sources[{number}]"
            raise ValueError(f"{where}: {error}") from None
    return sources


def _load(settings: DataSettings) -> Source:
    shards, manifest = settings.shards, settings.manifest
    if settings.source == "synthetic":
        return SyntheticSource(settings.num_samples)
    if shards is None or settings.source != "shards":
        return _construct(settings.source, settings.options)
    if is_table(shards):
        return Table(shards, settings)
    known = None
    if "*" in shards and is_remote(shards) and manifest and manifest.is_file():
        # The manifest lists the shards, so the bucket need not be listed when a run starts.
        known = read_manifest(manifest).names
    listing = find_shards(shards, settings.remote, known)
    if settings.index == "none":
        # At the start of a run only local shards can be checked quickly.
        missing = [
            name
            for name in listing.names
            if not (listing.urls or (listing.folder / name).is_file())
        ]
        if missing:
            raise ValueError(
                f"missing shards: {some(missing)}; name the existing shards by a pattern with *, or in a .txt file"
            )
        return listing
    return load_manifest(listing, manifest)


def _construct(name: str, options: dict[str, Any]) -> Source:
    cls = load_custom(name, options, base=Source)
    with explain_errors(f"{name} cannot be constructed"):
        source: Source = cls(**options)
        # Access both attributes here, so that an error is reported with the source's name before anything is built.
        if source.num_samples < 1 or not isinstance(source.fingerprint, str):
            raise ValueError("expected at least one sample in `sizes` and a str as `fingerprint`")
    return source


def count_epoch(settings: DataSettings, sources: Sequence[Source]) -> int:
    """Return the number of samples in an epoch. With data.uids, it is the number of uids, if that is smaller."""
    counts = Counter[Path | None]()
    for part, source in zip(settings.per_source, sources, strict=True):
        counts[part.uids] += source.num_samples
    return sum(
        num if uids is None else min(num, len(np.load(uids, mmap_mode="r")))
        for uids, num in counts.items()
    )


def count_slots(
    settings: DataSettings, sources: Sequence[Source], ranks: int, saved: int | None = None
) -> int:
    """Choose the number of slots of a run: data.slots, or else a default that suits the data.

    Args:
        settings: Settings of the data.
        sources: All sources.
        ranks: Number of ranks. The number of slots must be a multiple of it.
        saved: Number of slots in the checkpoint that the run resumes. It is the default.

    Raises:
        ValueError: If the number of slots does not work. The message suggests numbers that work, if there are any.
    """
    sizes = [size for source in sources for size in source.sizes]
    # Every slot needs a sample or, if the samples are not counted, a shard.
    num_units, unit = sum(sizes), "samples"
    if settings.index == "none":
        num_units, unit = len(sizes), "shards"
    slots, origin = settings.slots, "set by data.slots"
    if slots is None:
        fitting = (
            num
            for num in SLOTS
            if num <= len(sizes) and sum_bytes(settings, sources, num) <= _DEFAULT_BYTES
        )
        slots, origin = saved or next(fitting, 1), f"the default for {plural(len(sizes), 'shard')}"
    if slots > num_units:
        raise ValueError(
            f"data.slots is {slots}, but the data set has only {num_units} {unit} and every slot needs one; "
            f"set data.slots to at most {num_units}"
        )
    if slots % ranks == 0:
        return slots
    if ranks > num_units:
        raise ValueError(f"{ranks} ranks cannot share {num_units} {unit}; use fewer ranks")
    if settings.slots is None and saved:
        raise ValueError(
            f"the checkpoint's data order has {saved} slots, not a multiple of the number of ranks ({ranks}). A "
            f"resumed run keeps the number of slots, so use a number of ranks that divides {saved}"
        )
    below = slots // ranks * ranks
    nearest = [str(num) for num in (below, below + ranks) if 0 < num <= num_units]
    raise ValueError(
        f"the data order has {slots} slots ({origin}), not a multiple of the number of ranks ({ranks}); "
        f"set data.slots={' or data.slots='.join(nearest)}"
    )


def check_cache(
    settings: DataSettings, sources: Sequence[Source], num_slots: int, ranks: int, ranks_here: int
) -> None:
    """Check that this host's cache can contain the remote shards that its slots read and prefetch at a time.

    If it could not, a whole shard would be fetched for nearly every sample.

    Args:
        settings: Settings of the data.
        sources: Sources of the data.
        num_slots: Number of slots on all hosts.
        ranks: Number of ranks on all hosts.
        ranks_here: Number of ranks on this host.

    Raises:
        ValueError: If the shards do not fit. The message suggests settings.
    """
    slots_here = num_slots * ranks_here // ranks
    needed = sum_bytes(settings, sources, slots_here, prefetch=True)
    limit = find_limit(settings.remote)
    if needed > limit:
        # Rounded up, so that the suggestion is large enough.
        needed_gb = math.ceil(needed / 1e6) / 1e3
        raise ValueError(
            f"the {slots_here} slots of this host read and prefetch up to {needed_gb:g} GB of remote shards at a time, "
            f"but the cache in {settings.remote.cache} has room for only {limit / 1e9:.4g} GB; set "
            f"data.remote.cache_gb={needed_gb:g} (at most {DISK_SHARE:.0%} of the disk space), or "
            f"data.remote.prefetch_shards=0 or, for a new run, fewer data.slots than {num_slots}"
        )


def sum_bytes(
    settings: DataSettings, sources: Sequence[Source], num_slots: int, prefetch: bool = False
) -> float:
    """Sum the sizes of the remote shards that `num_slots` slots read, or also prefetch, at a time."""
    total = 0.0
    for source in sources:
        if isinstance(source, Manifest) and source.urls:
            # With data.index=none, this is 0, because the sizes are unknown.
            whole = sum(shard.bytes for shard in source.shards)
            num = source.estimate_open_shards(settings.window)
            if prefetch and settings.remote.prefetch_shards:
                # One shard of a slot's next window is also in its current window.
                num += max(settings.remote.prefetch_shards, num - 1)
            total += min(whole, num * num_slots * whole / len(source.shards))
    return total


def mix(settings: DataSettings, sources: Sequence[Source], num_slots: int, seed: int) -> Mixture:
    """Return the order of the samples of all sources."""
    sizes = [source.sizes for source in sources]
    window = None if settings.index == "none" else settings.window
    return Mixture(sizes, _weigh(settings, sources), num_slots, seed, window)


def _weigh(settings: DataSettings, sources: Sequence[Source]) -> list[float]:
    """Return the weight of every source: its setting or else its number of samples. The weight of one source is 1."""
    if len(sources) == 1:
        return [1.0]
    parts = zip(settings.sources or (), sources, strict=True)
    return [part.weight or source.num_samples for part, source in parts]


def fingerprint(settings: DataSettings, sources: Sequence[Source]) -> str:
    """Return a digest of the sources and their weights. The fingerprint of a single source is returned unchanged."""
    if len(sources) == 1:
        return sources[0].fingerprint
    weighted = zip(sources, _weigh(settings, sources), strict=True)
    return digest([(source.fingerprint, weight) for source, weight in weighted])
