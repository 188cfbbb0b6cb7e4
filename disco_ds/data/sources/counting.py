"""Counts the samples of shards from the tar headers, for `disco-ds index`; nothing is decoded."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from disco_ds.config.data import RemoteSettings
from disco_ds.data.remote.fetching import fetch_temporary
from disco_ds.data.sources.listing import Listing, list_folder
from disco_ds.data.sources.manifest import Manifest, Shard, has_changed, refuse_empty
from disco_ds.data.sources.tar import TarIndex, find_leftover

logger = logging.getLogger(__name__)


def index_shards(
    where: Path | Listing,
    workers: int = 0,
    progress: Callable[[int], object] | None = None,
    known: Iterable[Shard] = (),
    remote: RemoteSettings | None = None,
    warn: Callable[[str], object] = logger.warning,
) -> Manifest:
    """Count the samples of every .tar of a folder, or of the shards listed.

    Args:    workers: processes that count; progress: called with the number of shards done; known: shards of an earlier
             manifest, of which local ones with the same size and time are not counted again; remote: how to fetch;
             warn: called with what is wrong with a shard that counts nevertheless.
    Returns: the manifest, sorted by name. A truncated shard counts up to its last complete sample, and one with data
             after its end mark up to there.
    Raises:  ValueError if there is no shard, or one without samples; OSError, DataError for one that cannot be read.
    """
    listing = where if isinstance(where, Listing) else list_folder(where)
    if not listing.urls and (
        gone := [name for name in listing.names if not (listing.folder / name).is_file()]
    ):
        raise ValueError(
            f"{listing.folder} lacks {len(gone):,} of {len(listing.names):,} shards: {', '.join(gone)}"
        )
    shards = {} if listing.urls else _unchanged(listing, known)
    urls = listing.urls or [None] * len(listing.names)
    tasks = [task for task in zip(listing.names, urls, strict=True) if task[0] not in shards]
    count = partial(_count, listing.folder, remote or RemoteSettings())
    context = multiprocessing.get_context("spawn")  # not fork: the caller may have threads
    with ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext() as pool:
        for shard, wrong in pool.map(count, tasks, chunksize=4) if pool else map(count, tasks):
            shards[shard.name] = shard
            if wrong:
                warn(f"{shard.name} {wrong}; counted {shard.samples} samples")
            if progress is not None:
                progress(len(shards))
    manifest = Manifest(listing.folder, tuple(shards[name] for name in listing.names), listing.urls)
    refuse_empty(manifest)
    return manifest


def compare(old: Iterable[Shard], new: Iterable[Shard]) -> list[str]:
    """The differences between two counts, a line for each shard that differs."""
    before, after = ({shard.name: shard for shard in shards} for shards in (old, new))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"{name} is gone")
        elif name not in before:
            lines.append(f"{name} is new: {after[name].samples:,} samples")
        elif before[name].samples != after[name].samples:
            lines.append(
                f"{name} has {after[name].samples:,} samples, was counted with {before[name].samples:,}"
            )
        elif before[name].bytes != after[name].bytes:
            lines.append(
                f"{name} has {after[name].bytes:,} bytes instead of {before[name].bytes:,}, and as many samples"
            )
    return lines


def _unchanged(listing: Listing, known: Iterable[Shard]) -> dict[str, Shard]:
    """The shards whose earlier count still holds, by name."""
    here = set(listing.names)
    # A modification time of 0 comes from a manifest that does not have it; such a shard is counted again.
    same = [
        shard
        for shard in known
        if shard.name in here and shard.mtime and not has_changed(listing.folder, shard)
    ]
    return {shard.name: shard for shard in same}


def _count(
    folder: Path, remote: RemoteSettings, task: tuple[str, str | None]
) -> tuple[Shard, str | None]:
    """Count one shard, given by its name and, if it is remote, its URL; and say what is wrong with it, if anything."""
    name, url = task
    # Unbuffered: from header to header the scan skips far more than a buffer would hold.
    with (
        fetch_temporary(url, name, remote)
        if url
        else open(folder / name, "rb", buffering=0) as file
    ):
        index, status = TarIndex(file), os.fstat(file.fileno())
        shard = Shard(name, len(index), status.st_size, 0 if url else int(status.st_mtime))
        if index.truncated is not None:
            return shard, f"is truncated: {index.truncated}"
        if (leftover := find_leftover(file, index)) is not None:
            return shard, (
                f"has an end mark at byte {index.end:,} and data after it, from byte {leftover:,} of "
                f"{status.st_size:,} on, which are not read: a header was lost, or tars were joined; write it anew"
            )
        return shard, None
