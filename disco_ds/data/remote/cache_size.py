"""The room that remote shards need on a host: the bytes that its slots read at a time, and whether the cache has it.

A cache that is smaller than the shards in use would fetch a whole shard for nearly every sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from disco_ds.config.data import DataSettings
from disco_ds.data.order.slots import count_at_hand
from disco_ds.data.remote.shard_cache import DISK_SHARE, find_limit
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.manifest import Manifest

_DEFAULT_BYTES = 128e9
"""The default number of slots is such that all of them together read no more than this at a time."""


def fits_default(settings: DataSettings, sources: Sequence[Source], num_slots: int) -> bool:
    """Whether so many slots are a sound default for the sources, wherever they will run."""
    return sum_bytes(settings, sources, num_slots)[0] <= _DEFAULT_BYTES


def fit_cache(
    settings: DataSettings, sources: Sequence[Source], num_slots: int, ranks: int, ranks_here: int
) -> list[Source]:
    """Return the sources with the size limit of this host's cache set.

    Raises:  ValueError naming the numbers that work, if the cache cannot hold the shards that are read at a time.
    """
    slots_here = num_slots * ranks_here // ranks
    used, wanted = sum_bytes(settings, sources, slots_here)
    if not used:
        return list(sources)
    limit = find_limit(settings.remote, wanted)
    if used > limit:
        # Rounded up, so that the numbers named are enough.
        gb, disk_gb = (math.ceil(need / 1e6) / 1e3 for need in (used, used / DISK_SHARE))
        remedy = f"set data.remote.cache_gb={gb:g}, with {disk_gb:g} GB free on the disk of data.remote.cache"
        slots = (
            int(limit / sum_bytes(settings, sources, 1)[0]) * ranks // ranks_here // ranks * ranks
        )
        if slots:
            remedy += f"; or, for a new run, data.slots={slots}"
        raise ValueError(
            f"the {slots_here} slots of this host read up to {used / 1e9:.4g} GB of remote shards at a time, and the "
            f"cache in {settings.remote.cache} has room for {limit / 1e9:.4g} GB: {remedy}"
        )
    remote = settings.remote.model_copy(update={"cache_gb": limit / 1e9})
    return [replace(source, remote=remote) if _is_remote(source) else source for source in sources]


def sum_bytes(
    settings: DataSettings, sources: Sequence[Source], num_slots: int
) -> tuple[float, float]:
    """Bytes of the remote shards that so many slots read at a time, and of these and those that are fetched ahead."""
    used = wanted = 0.0
    for part, source in zip(settings.parts, sources, strict=True):
        if _is_remote(source):
            whole = sum(shard.bytes for shard in source.shards)
            per_shard = num_slots * whole / len(source.shards)
            at_hand = count_at_hand(len(source.shards), source.num_samples, settings.window)
            # Where samples are drawn with replacement, the next shards have none in common with those at hand.
            ahead = max(settings.remote.ahead, at_hand if part.replacement else at_hand - 1)
            used += min(whole, at_hand * per_shard)
            wanted += min(whole, (at_hand + ahead) * per_shard)
    return used, wanted


def _is_remote(source: Source) -> TypeGuard[Manifest]:
    return isinstance(source, Manifest) and bool(source.urls)
