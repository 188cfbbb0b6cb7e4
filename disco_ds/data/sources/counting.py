"""Count the samples of shards from their tar headers, for `disco-ds index`. Nothing is decoded."""

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
from disco_ds.data.sources.manifest import Manifest, Shard, has_changed
from disco_ds.data.sources.tar import TarIndex, has_data_after_end

logger = logging.getLogger(__name__)


def index_shards(
    where: Path | Listing,
    workers: int = 0,
    progress: Callable[[int], object] | None = None,
    known: Iterable[Shard] = (),
    remote: RemoteSettings | None = None,
    warn: Callable[[str], object] = logger.warning,
) -> Manifest:
    """Count the samples of every .tar in a folder, or of the listed shards.

    A truncated shard counts up to its last complete sample. Data after a tar's end mark is not counted.

    Args:
        where: The folder or the listing.
        workers: Number of counting processes; 0 counts in this process.
        progress: Called with the number of shards done.
        known: Shards of an earlier manifest. Local shards with the same size and time are not counted again.
        remote: How to fetch remote shards.
        warn: Called with a message about each shard that is damaged but can still be counted.

    Returns:
        The manifest, sorted by name.

    Raises:
        ValueError: If there is no shard.
        OSError: If a local shard cannot be read.
        DataError: If a remote shard cannot be fetched.
    """
    listing = where if isinstance(where, Listing) else list_folder(where)
    names, urls = listing.names, listing.urls or [None] * len(listing.names)
    # Manifests may lack a modification time (0). Those shards are counted again.
    wanted = set(names)
    shards = {
        shard.name: shard
        for shard in known
        if shard.name in wanted
        and not listing.urls
        and shard.mtime
        and not has_changed(listing.folder, shard)
    }
    tasks = [(name, url) for name, url in zip(names, urls, strict=True) if name not in shards]
    count = partial(_count, listing.folder, remote or RemoteSettings())
    context = multiprocessing.get_context("spawn")  # not fork: the caller may have threads
    with ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext() as pool:
        for shard, problem in pool.map(count, tasks, chunksize=4) if pool else map(count, tasks):
            shards[shard.name] = shard
            if problem:
                warn(f"{shard.name} {problem}; counted {shard.samples:,} samples")
            if progress is not None:
                progress(len(shards))
    return Manifest(listing.folder, tuple(shards[name] for name in names), listing.urls)


def compare(old: Iterable[Shard], new: Iterable[Shard]) -> list[str]:
    """Describe the differences between two counts, one line for each shard that differs."""
    before, after = (
        {shard.name: f"{shard.samples:,} samples in {shard.bytes:,} bytes" for shard in shards}
        for shards in (old, new)
    )
    return [
        f"{name}: {after.get(name, 'missing')}, but {before.get(name, 'missing')} in the manifest"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _count(
    folder: Path, remote: RemoteSettings, task: tuple[str, str | None]
) -> tuple[Shard, str | None]:
    """Count one shard, given by its name and, if it is remote, its URL; return the count and any problem."""
    name, url = task
    # Unbuffered: the scan skips from header to header, much further than a buffer would reach.
    with (
        fetch_temporary(url, name, remote)
        if url
        else open(folder / name, "rb", buffering=0) as file
    ):
        index, status = TarIndex(file), os.fstat(file.fileno())
        problem = None
        if index.truncated is not None:
            problem = f"is truncated: {index.truncated}"
        elif has_data_after_end(file, index):
            problem = (
                f"has data after its end mark at byte {index.end:,}, which is ignored: a header was lost, or tars "
                "were concatenated; write the shard again"
            )
        mtime = 0 if url else int(status.st_mtime)
        return Shard(name, len(index), status.st_size, mtime), problem
