"""Sample counting for `disco-ds index`. Published counts are used if there are any; otherwise, tar headers are read.

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.config.data import RemoteSettings
from disco_ds.data.errors import CacheFullError, DataError
from disco_ds.data.remote.fetching import fetch_temporary
from disco_ds.data.remote.shard_cache import ShardCache
from disco_ds.data.remote.stores import Version
from disco_ds.data.sources.listing import Listing, list_folder
from disco_ds.data.sources.manifest import Manifest, Shard, some
from disco_ds.data.sources.published_counts import find_counts
from disco_ds.data.sources.tar import TarIndex, has_data_after_end
from disco_ds.names import plural

_SAVE_S = 10.0
_BLOCK = 2**20

logger = logging.getLogger(__name__)


def index_shards(
    where: Path | Listing,
    workers: int = 0,
    progress: Callable[[int], object] | None = None,
    known: Iterable[Shard] = (),
    remote: RemoteSettings | None = None,
    published: bool = True,
    skip_missing: bool = False,
    save: Callable[[Manifest], object] | None = None,
    whole: bool = False,
) -> Manifest:
    """Count the samples of every .tar in a folder, or of the listed shards.

    A truncated shard is counted up to its last complete sample. Data after a tar's end mark is not counted. A warning
    is logged in both cases. Remote shards without a published count are fetched, and kept in the cache if it has room.

    Args:
        where: The folder or the listing.
        workers: Number of processes that read shards; 0 reads in this process.
        progress: Called with the number of shards done.
        known: Shards of an earlier manifest. They are counted again only if they had 0 samples or have changed since.
        remote: How to fetch remote shards.
        published: Whether counts that the data set publishes are used (published_counts.py).
        skip_missing: Leave missing shards out, and log their names.
        save: Called every few seconds, and at the end, with the manifest of the shards counted so far.
        whole: Read all bytes of a shard, not only its headers, to find out whether the disk can read them.

    Returns:
        The manifest, sorted by name.

    Raises:
        ValueError: If there is no shard, or if shards are missing or unreadable. All others are counted first.
        StoreError: If a bucket cannot be listed.
    """
    listing = where if isinstance(where, Listing) else list_folder(where)
    remote = remote or RemoteSettings()
    before = {shard.name: shard for shard in known}
    shards: dict[str, Shard] = {}
    failed: dict[str, Exception] = {}
    missing: list[str] = []
    saved_at = time.monotonic()

    def record(name: str, result: Shard | Exception) -> None:
        nonlocal saved_at
        if isinstance(result, Shard):
            shards[name] = result
        elif isinstance(result, FileNotFoundError) and skip_missing:
            missing.append(name)
        else:
            failed[name] = result
        if progress is not None:
            progress(len(shards) + len(failed) + len(missing))
        if save is not None and time.monotonic() > saved_at + _SAVE_S:
            save(_collect(listing, before | shards))
            saved_at = time.monotonic()

    try:
        uncounted: dict[str, Version] = {}
        for name, found in find_counts(listing, remote, published, before):
            if isinstance(found, Version):
                uncounted[name] = found
            else:
                record(name, found)
        tasks = [
            (name, uncounted[name], listing.urls.get(name))
            for name in listing.names
            if name in uncounted
        ]
        count = partial(_count, listing.folder, remote, whole)
        context = multiprocessing.get_context("spawn")  # not fork: the caller may have threads
        with ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext() as pool:
            results = pool.map(count, tasks, chunksize=4) if pool else map(count, tasks)
            try:
                for (name, *_), (result, problem) in zip(tasks, results, strict=True):
                    if problem:
                        logger.warning("%s %s", name, problem)
                    record(name, result)
            finally:
                if pool:
                    # After an error in this process, such as a full disk, do not count the other shards.
                    pool.shutdown(cancel_futures=True)
    finally:
        if save is not None and shards:
            save(_collect(listing, before | shards))
    if failed:
        raise ValueError(f"{_describe_failures(failed)} (counted: {plural(len(shards), 'shard')})")
    if missing:
        logger.warning("left out missing shards (%d): %s", len(missing), some(missing, 10))
    return replace(_collect(listing, shards), missing=tuple(sorted(missing)))


def _describe_failures(failed: dict[str, Exception]) -> str:
    missing = [name for name, error in failed.items() if isinstance(error, FileNotFoundError)]
    unreadable = [f"{name}: {failed[name]}" for name in failed.keys() - set(missing)]
    problems = []
    if missing:
        problems.append(
            f"missing shards ({len(missing)}): {some(missing)}; pass --missing skip to leave them out"
        )
    if unreadable:
        problems.append(f"unreadable shards ({len(unreadable)}): {some(unreadable)}")
    return "; ".join(problems)


def _collect(listing: Listing, shards: dict[str, Shard]) -> Manifest:
    """Return the manifest of the shards that have been counted."""
    counted = tuple(shards[name] for name in listing.names if name in shards)
    urls = tuple(url for name, url in listing.urls.items() if name in shards)
    return Manifest(listing.folder, counted, urls)


def compare(old: Iterable[Shard], new: Iterable[Shard], tags: bool) -> list[str]:
    """Describe the differences between two counts, one line for each shard that differs.

    Args:
        old: Shards of the manifest.
        new: The same shards, counted again.
        tags: Whether shards also count as different if only their tags differ.
    """
    before, after = (
        {
            shard.name: (
                f"{plural(shard.samples, 'sample')} ({shard.bytes:,} bytes{f', {shard.tag}' if tags else ''})"
            )
            for shard in shards
        }
        for shards in (old, new)
    )
    return [
        f"{name}: {after.get(name, 'missing')}, but {before.get(name, 'missing')} in the manifest"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _count(
    folder: Path, remote: RemoteSettings, whole: bool, task: tuple[str, Version, str | None]
) -> tuple[Shard | Exception, str | None]:
    """Read one shard and count its samples.

    Args:
        folder: Folder of local shards.
        remote: How to fetch a remote shard.
        whole: Read all bytes of the shard, not only its headers.
        task: The shard's name and version, and its URL if it is remote.

    Returns:
        The counted shard, or the error if it cannot be read; and a problem to warn about, such as a truncated tar, or
        None.
    """
    name, version, url = task
    try:
        with _open(folder, name, version, url, remote) as file:
            while whole and file.read(_BLOCK):
                pass
            index, size = TarIndex(file), os.fstat(file.fileno()).st_size
            problem = None
            if index.truncated is not None:
                state = "is truncated" if len(index) else "cannot be read as a tar"
                problem = f"{state}: {index.truncated}"
            elif has_data_after_end(file, index):
                problem = (
                    f"has data after its end mark at byte {index.end:,}, because a header was lost or tars were "
                    "concatenated; the data is ignored, so write the shard again"
                )
            if problem:
                problem += f"; counted {plural(len(index), 'sample')}"
    except (DataError, OSError) as error:
        return error, None
    return Shard(name, len(index), size, version.tag), problem


def _open(
    folder: Path, name: str, version: Version, url: str | None, remote: RemoteSettings
) -> Any:
    """Open a shard for counting. A remote shard is fetched into the cache if it fits, or else into a temporary file.

    Raises:
        DataError: If a remote shard cannot be fetched.
        OSError: If a local shard cannot be read.
    """
    if url is None:
        # Unbuffered: the scan skips from header to header, much further than a buffer would reach.
        return open(folder / name, "rb", buffering=0)
    if version.bytes:
        with suppress(CacheFullError, OSError):
            return ShardCache([url], [name], [version], remote).open(0)
    return fetch_temporary(url, name, remote)
