"""The sources that a recipe names: found and checked, put into one data order, and read as one."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from disco_ds.config.data import DataSettings, SourceSettings
from disco_ds.data.order.mixture import Mixture
from disco_ds.data.order.slots import SLOTS, choose_slots
from disco_ds.data.remote.cache_size import fits_default
from disco_ds.data.sources.base import Decode, SampleForm, Samples, Source
from disco_ds.data.sources.csv_source import Table
from disco_ds.data.sources.listing import refuse_remote
from disco_ds.data.sources.manifest import Manifest
from disco_ds.data.sources.synthetic import SyntheticSource
from disco_ds.names import load_custom

KINDS = (Table, Manifest)
"""The sources that data.shards may name. The first whose `takes` accepts the text loads it; Manifest accepts any."""


def load_sources(settings: DataSettings) -> list[Source]:
    """The sources that the settings name, one or more, before any sample is read.

    Raises:  ValueError naming the setting: for shards or manifests that are missing or do not fit together, for remote
             shards that the settings do not allow, and for a class that cannot be imported or constructed.
    """
    found = []
    for number, part in enumerate(settings.parts):
        try:
            found.append(_load(part, settings))
        except ValueError as error:
            key = "data.shards" if part.source == "shards" else "data.source"
            where = f"data.sources[{number}]" if settings.parts is settings.sources else key
            raise ValueError(f"{where}: {error}") from None
    return found


def _load(part: SourceSettings, settings: DataSettings) -> Source:
    if part.source == "synthetic":
        return SyntheticSource(settings.num_samples)
    if part.shards is None or part.source != "shards":
        return _construct(part.source, part.options)
    refuse_remote(part.shards, settings.remote)
    kind = next(kind for kind in KINDS if kind.takes(part.shards))
    return kind.load(part.shards, part.manifest, settings.settings_of(part))


def _construct(name: str, options: dict[str, Any]) -> Source:
    """Build a custom source, `package.module:Class`. Raises: ValueError for any mistake in it."""
    cls = load_custom(name, options, base=Source)
    try:
        source: Source = cls(**options)
        # Asked here, where a mistake is told by name, and not first in the middle of building a run.
        if source.num_samples < 1 or not isinstance(source.fingerprint, str):
            raise ValueError("`sizes` must sum to at least one sample, and `fingerprint` be a text")
    except Exception as error:  # whatever the user's code raises
        raise ValueError(
            f"{name} cannot be constructed: {type(error).__name__}: {error}"
        ) from error
    return source


def count_slots(
    settings: DataSettings, sources: Sequence[Source], ranks: int, saved: int | None = None
) -> int:
    """The number of slots of a run, see choose_slots. Args: saved: the number in the checkpoint that it resumes."""
    sizes = [size for source in sources for size in source.sizes]
    fitting = (
        slots for slots in SLOTS if slots <= len(sizes) and fits_default(settings, sources, slots)
    )
    default = saved or next(fitting, 1)
    return choose_slots(len(sizes), sum(sizes), settings.slots, ranks, default)


def choose_windows(
    settings: DataSettings, sources: Sequence[Source], state: dict[str, Any] | None = None
) -> list[int]:
    """Number of entries that are shuffled together in a slot, or that it draws from, by source.

    Args:    state: data state of a run that is resumed, which keeps its windows.
    """
    if state is not None:
        # Older checkpoints have the same window for all sources, and do not say so.
        return list(state.get("windows", [settings.window] * len(sources)))
    windows = []
    for part, source in zip(settings.parts, sources, strict=True):
        shard = math.ceil(source.num_samples / len(source.sizes))
        windows.append(max(settings.window, shard) if part.replacement else settings.window)
    return windows


def mix(
    settings: DataSettings,
    sources: Sequence[Source],
    num_slots: int,
    seed: int,
    windows: Sequence[int],
) -> Mixture:
    """The order of the sources' samples."""
    replacement = [part.replacement for part in settings.parts]
    sizes = [source.sizes for source in sources]
    return Mixture(sizes, _weigh(settings, sources), replacement, num_slots, seed, windows)


def _weigh(settings: DataSettings, sources: Sequence[Source]) -> list[float]:
    """The weight of every source: its own or, where none is set, its number of samples."""
    return [
        part.weight or sum(source.sizes)
        for part, source in zip(settings.parts, sources, strict=True)
    ]


def fingerprint(settings: DataSettings, sources: Sequence[Source]) -> str:
    """Identifies what the data order depends on; for a single source its own fingerprint."""
    if len(sources) == 1 and not settings.parts[0].replacement:
        return sources[0].fingerprint
    parts = zip(sources, _weigh(settings, sources), settings.parts, strict=True)
    text = json.dumps(
        [(source.fingerprint, weight, part.replacement) for source, weight, part in parts]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_sources(
    settings: DataSettings, sources: Sequence[Source], form: SampleForm, seed: int, num_slots: int
) -> Samples:
    """The samples of all sources, for a process that reads `num_slots` slots in turn."""
    opened = [
        source.open_samples(settings.settings_of(part), form, seed, num_slots)
        for part, source in zip(settings.parts, sources, strict=True)
    ]
    return opened[0] if len(opened) == 1 else MixedSamples(sources, opened)


def label(sources: Sequence[Source], shard: int, entry: int) -> str:
    """How messages refer to a sample, whose shard is numbered across all sources, without reading it."""
    for source in sources:
        if shard < len(source.sizes):
            return source.label(shard, entry)
        shard -= len(source.sizes)
    raise IndexError(f"there is no shard {shard} beyond the last source")


class MixedSamples:
    """The samples of several sources, whose shards are numbered consecutively."""

    def __init__(self, sources: Sequence[Source], opened: Sequence[Samples]) -> None:
        self._opened = opened
        self._first = [0, *accumulate(len(source.sizes) for source in sources)]

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        samples, shard = self._find(shard)
        return samples.read(shard, entry, epoch, index)

    def name(self, shard: int, entry: int) -> str:
        samples, shard = self._find(shard)
        return samples.name(shard, entry)

    def close(self) -> None:
        for samples in self._opened:
            samples.close()

    def _find(self, shard: int) -> tuple[Samples, int]:
        """The source that has the shard, and the shard's number in it."""
        # The last one that begins at this shard or before: a source without shards begins where the next one does.
        number = bisect_right(self._first, shard) - 1
        return self._opened[number], shard - self._first[number]
