"""Disk space that a host needs for remote shards.

If the cache is smaller than the shards that are being read, a whole shard is fetched for nearly every sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from disco_ds.config.data import DataSettings
from disco_ds.data.order import estimate_open_shards
from disco_ds.data.remote.shard_cache import DISK_SHARE, find_limit
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.manifest import Manifest


def fit_cache(
    settings: DataSettings, sources: Sequence[Source], num_slots: int, ranks: int, ranks_here: int
) -> list[Source]:
    """Set the size limit of this host's cache.

    Args:
        settings: Settings of the data.
        sources: Sources of the data.
        num_slots: Number of slots on all hosts.
        ranks: Number of ranks on all hosts.
        ranks_here: Number of ranks on this host.

    Returns:
        The sources, with the limit set.

    Raises:
        ValueError: If the cache cannot contain the shards that are read at a time. The message suggests settings.
    """
    slots_here = num_slots * ranks_here // ranks
    used, wanted = sum_bytes(settings, sources, slots_here)
    if not used:
        return list(sources)
    limit = find_limit(settings.remote, wanted)
    if used > limit:
        # Round up, so that the suggested numbers are large enough.
        gb, disk_gb = (math.ceil(need / 1e6) / 1e3 for need in (used, used / DISK_SHARE))
        remedy = f"set data.remote.cache_gb={gb:g} (the disk of data.remote.cache needs {disk_gb:g} GB of free space)"
        slots = (
            int(limit / sum_bytes(settings, sources, 1)[0]) * ranks // ranks_here // ranks * ranks
        )
        if slots:
            remedy += f"; or, for a new run, set data.slots={slots}"
        raise ValueError(
            f"the {slots_here} slots of this host read up to {used / 1e9:.4g} GB of remote shards at a time, but the "
            f"cache in {settings.remote.cache} has room for only {limit / 1e9:.4g} GB; {remedy}"
        )
    remote = settings.remote.model_copy(update={"cache_gb": limit / 1e9})
    return [replace(source, remote=remote) if _is_remote(source) else source for source in sources]


def sum_bytes(
    settings: DataSettings, sources: Sequence[Source], num_slots: int
) -> tuple[float, float]:
    """Sum the sizes of the remote shards that `num_slots` slots read at a time.

    Returns:
        The total in bytes without the prefetched shards, and the total with them.
    """
    used = wanted = 0.0
    for source in sources:
        if _is_remote(source):
            whole = sum(shard.bytes for shard in source.shards)
            per_shard = num_slots * whole / len(source.shards)
            num_open = estimate_open_shards(len(source.shards), source.num_samples, settings.window)
            # One shard of a slot's next window is also in its current window.
            ahead = max(settings.remote.prefetch_shards, num_open - 1)
            used += min(whole, num_open * per_shard)
            wanted += min(whole, (num_open + ahead) * per_shard)
    return used, wanted


def _is_remote(source: Source) -> TypeGuard[Manifest]:
    """Return whether a source has remote shards of known sizes. With data.index=none, the sizes are unknown."""
    return isinstance(source, Manifest) and bool(source.urls) and source.num_samples > 0
