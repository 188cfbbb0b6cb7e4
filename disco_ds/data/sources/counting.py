"""Count the samples of shards for `disco-ds index`: by what the data set publishes, or else from their tar headers.

Nothing is decoded. Counted shards are saved every few seconds, so that a second call continues where the first stopped.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.config.data import RemoteSettings
from disco_ds.data.images.broken import CacheFullError, DataError
from disco_ds.data.remote.fetching import fetch_temporary
from disco_ds.data.remote.shard_cache import ShardCache
from disco_ds.data.sources.listing import Listing, list_folder
from disco_ds.data.sources.manifest import Manifest, Shard, has_changed, some
from disco_ds.data.sources.published_counts import Found, find_counts
from disco_ds.data.sources.tar import TarIndex, has_data_after_end

_SAVE_S = 10.0

logger = logging.getLogger(__name__)


def index_shards(
    where: Path | Listing,
    workers: int = 0,
    progress: Callable[[int], object] | None = None,
    known: Iterable[Shard] = (),
    remote: RemoteSettings | None = None,
    warn: Callable[[str], object] = logger.warning,
    published: bool = True,
    skip_missing: bool = False,
    save: Callable[[Manifest], object] | None = None,
) -> Manifest:
    """Count the samples of every .tar in a folder, or of the listed shards.

    A truncated shard counts up to its last complete sample. Data after a tar's end mark is not counted. Remote shards
    without a published count are fetched, and kept in the cache if it has room.

    Args:
        where: The folder or the listing.
        workers: Number of processes that read shards; 0 reads in this process.
        progress: Called with the number of shards done.
        known: Shards of an earlier manifest. They are not counted again, unless they are local and have changed.
        remote: How to fetch remote shards.
        warn: Called with a message about each shard that is damaged but can still be counted.
        published: Whether counts that the data set publishes are used (published_counts.py).
        skip_missing: List missing shards with 0 samples, so that a run leaves them out.
        save: Called every few seconds, and at the end, with the manifest of the shards counted so far.

    Returns:
        The manifest, sorted by name.

    Raises:
        ValueError: If there is no shard, or if shards are missing or cannot be read, after all others were counted.
        StoreError: If a bucket cannot be listed.
    """
    listing = where if isinstance(where, Listing) else list_folder(where)
    remote = remote or RemoteSettings()
    wanted = set(listing.names)
    shards: dict[str, Shard] = {}
    failed: dict[str, str] = {}
    missing: set[str] = set()
    for shard in known:
        # A shard without samples may have been missing. Manifests may lack a modification time (0).
        if shard.name in wanted and shard.samples:
            with suppress(FileNotFoundError):
                if listing.urls or (shard.mtime and not has_changed(listing.folder, shard)):
                    shards[shard.name] = shard
    saved_at = time.monotonic()

    def record(result: Shard | str, name: str) -> None:
        nonlocal saved_at
        if isinstance(result, Shard):
            shards[name] = result
        else:
            failed[name] = result
        if progress is not None:
            progress(len(shards) + len(failed))
        if save is not None and time.monotonic() > saved_at + _SAVE_S:
            save(_collect(listing, shards))
            saved_at = time.monotonic()

    try:
        unread = []
        todo = [name for name in listing.names if name not in shards]
        for found in find_counts(listing, todo, remote, published):
            if found.missing:
                missing.add(found.name)
                record(Shard(found.name, 0, 0) if skip_missing else "is missing", found.name)
            elif found.error is not None:
                record(found.error, found.name)
            elif found.samples is None or found.bytes is None:
                unread.append(found)
            else:
                shard = Shard(found.name, found.samples, found.bytes, found.mtime)
                record(shard, found.name)
        order = {name: number for number, name in enumerate(listing.names)}
        unread.sort(key=lambda found: order[found.name])
        urls = dict(zip(listing.names, listing.urls, strict=True)) if listing.urls else {}
        tasks = [(found, urls.get(found.name)) for found in unread]
        count = partial(_count, listing.folder, remote)
        context = multiprocessing.get_context("spawn")  # not fork: the caller may have threads
        with ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext() as pool:
            results = pool.map(count, tasks, chunksize=4) if pool else map(count, tasks)
            for (found, _), (result, problem) in zip(tasks, results, strict=True):
                record(result, found.name)
                if problem and isinstance(result, Shard):
                    warn(f"{found.name} {problem}; counted {result.samples:,} samples")
    finally:
        if save is not None and shards:
            save(_collect(listing, shards))
    if failed:
        gone = missing & failed.keys()
        others = [f"{name}: {failed[name]}" for name in sorted(failed.keys() - gone)]
        texts = [
            f"missing shards: {len(gone)}: {some(gone)}; pass --missing skip to leave them out"
        ] * bool(gone)
        texts += [f"unreadable shards: {len(others)}: {some(others)}"] * bool(others)
        raise ValueError(f"{'; '.join(texts)} ({len(shards):,} shards are counted)")
    return _collect(listing, shards)


def _collect(listing: Listing, shards: dict[str, Shard]) -> Manifest:
    """Return the manifest of the shards that have been counted."""
    places = zip(listing.names, listing.urls or listing.names, strict=True)
    counted = [(name, url) for name, url in places if name in shards]
    urls = tuple(url for _, url in counted) if listing.urls else ()
    return Manifest(listing.folder, tuple(shards[name] for name, _ in counted), urls)


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
    folder: Path, remote: RemoteSettings, task: tuple[Found, str | None]
) -> tuple[Shard | str, str | None]:
    """Read and count one shard, given with its URL if it is remote.

    Returns:
        The count, or why the shard cannot be read; and any problem with a shard that can be counted.
    """
    found, url = task
    try:
        with _open(folder, found, url, remote) as file:
            index, status = TarIndex(file), os.fstat(file.fileno())
            problem = None
            if index.truncated is not None:
                problem = f"is truncated: {index.truncated}"
            elif has_data_after_end(file, index):
                problem = (
                    f"has data after its end mark at byte {index.end:,}, which is ignored: a header was lost, or tars "
                    "were concatenated; write the shard again"
                )
    except (DataError, OSError) as error:
        return str(error), None
    mtime = 0 if url else int(status.st_mtime)
    return Shard(found.name, len(index), status.st_size, mtime), problem


def _open(folder: Path, found: Found, url: str | None, remote: RemoteSettings) -> Any:
    """Open a shard for counting; a remote one in the cache if there is room, or else as a temporary file.

    Raises:
        DataError: If a remote shard cannot be fetched.
        OSError: If a local shard cannot be read.
    """
    if url is None:
        # Unbuffered: the scan skips from header to header, much further than a buffer would reach.
        return open(folder / found.name, "rb", buffering=0)
    if found.bytes:
        with suppress(CacheFullError, OSError):
            return ShardCache([url], [found.name], [found.bytes], remote).open(0)
    return fetch_temporary(url, found.name, remote)
