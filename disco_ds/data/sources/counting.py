"""Sample counting for `disco-ds index`. Published counts are used if there are any; otherwise, tar headers are read.

Counts that data sets publish next to their shards, so that these need not be downloaded to be counted:

    sizes.json          open_clip and DataComp: {"00000.tar": 1000, ...}
    00000_stats.json    img2dataset: {"successes": 1000, ...}, one file for each shard

They may be wrong. When tar.py reads a shard, it warns if the number of samples differs. Nothing is decoded. Counted
shards are saved every few seconds, so that a second call continues where the first stopped.
"""

import errno
import json
import logging
import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.config.data import PIPE, RemoteSettings, is_remote
from disco_ds.data.errors import DataError
from disco_ds.data.sources.base import Shard
from disco_ds.data.sources.cache import ShardCache
from disco_ds.data.sources.fetching import (
    BUCKETS,
    StoreError,
    Version,
    describe,
    fetch_temporary,
    list_objects,
    read_object,
    read_version,
)
from disco_ds.data.sources.shards import Manifest, collect, list_folder, some
from disco_ds.data.sources.tar import TarIndex
from disco_ds.names import plural

_SAVE_S = 10.0
_BLOCK = 2**20
"""Size in bytes of a read. Data after a tar's end mark is searched for in so many bytes."""
_REQUESTS = 32
"""Maximum number of concurrent requests."""

logger = logging.getLogger(__name__)


def index_shards(
    where: Path | Manifest,
    workers: int = 0,
    progress: Callable[[], object] = lambda: None,
    known: Iterable[Shard] = (),
    skip_missing: bool = False,
    save: Callable[[Manifest], object] | None = None,
    whole: bool = False,
) -> Manifest:
    """Count the samples of every .tar in a folder, or of the listed shards.

    A truncated shard is counted up to its last complete sample. Data after a tar's end mark is not counted. A warning
    is logged in both cases. Remote shards without a published count are fetched into the cache.

    Args:
        where: The folder, or the shards that find_shards lists.
        workers: Number of processes that read shards; 0 reads in this process.
        progress: Called after each shard.
        known: Shards of an earlier manifest. They are counted again only if they had 0 samples or have changed since.
        skip_missing: Leave missing shards out, and log their names.
        save: Called every few seconds, and at the end, with the manifest of the shards counted so far.
        whole: Ignore published counts, and read all bytes of a shard, to find out whether the disk can read them.

    Returns:
        The manifest, sorted by name.

    Raises:
        ValueError: If there is no shard, if shards are missing or unreadable (all others are counted first), or if a
            bucket cannot be listed.
    """
    listing = where if isinstance(where, Manifest) else list_folder(where)
    before = {shard.name: shard for shard in known}
    counted: dict[str, Shard] = {}
    missing: list[str] = []
    unreadable: list[str] = []
    saved_at = time.monotonic()

    def record(name: str, result: Shard | Exception) -> None:
        nonlocal saved_at
        if isinstance(result, Shard):
            counted[name] = result
        elif isinstance(result, FileNotFoundError):
            missing.append(name)
        else:
            unreadable.append(f"{name}: {result}")
        progress()
        if save is not None and time.monotonic() > saved_at + _SAVE_S:
            save(collect(listing, before | counted))
            saved_at = time.monotonic()

    try:
        locations = listing.locate()
        tasks: list[tuple[Shard, str]] = []
        for name, result in _find_counts(listing, not whole, before):
            if isinstance(result, Shard) and not result.samples:
                tasks.append((result, locations[name]))
            else:
                record(name, result)
        tasks.sort()  # by name
        count = partial(_count, listing.remote, whole)
        context = multiprocessing.get_context("spawn")  # not fork: the caller may have threads
        with ProcessPoolExecutor(workers, mp_context=context) if workers else nullcontext() as pool:
            results = pool.map(count, tasks, chunksize=4) if pool else map(count, tasks)
            try:
                for (shard, _), (result, problem) in zip(tasks, results, strict=True):
                    if problem:
                        logger.warning("%s %s", shard.name, problem)
                    record(shard.name, result)
            finally:
                if pool:
                    # After an error in this process, such as a full disk, do not count the other shards.
                    pool.shutdown(cancel_futures=True)
    finally:
        if save is not None and counted:
            save(collect(listing, before | counted))
    problems = []
    if missing and not skip_missing:
        problems.append(
            f"missing shards ({len(missing)}): {some(missing)}; pass --missing skip to leave them out"
        )
    elif missing:
        logger.warning("left out missing shards (%d): %s", len(missing), some(missing, 10))
    if unreadable:
        problems.append(f"unreadable shards ({len(unreadable)}): {some(unreadable)}")
    if problems:
        raise ValueError(f"{'; '.join(problems)} (counted: {plural(len(counted), 'shard')})")
    return replace(collect(listing, counted), missing=tuple(sorted(missing)))


def _find_counts(
    listing: Manifest, published: bool, known: Mapping[str, Shard]
) -> Iterator[tuple[str, Shard | Exception]]:
    """Find the versions and the known or published sample counts of shards, without reading the shards.

    Args:
        listing: The shards.
        published: Whether to look for published counts. If False, only versions are found.
        known: Shards that were counted before. Their counts are used if their versions have not changed.

    Yields:
        The name of each shard, in any order, and what was found: the shard, with 0 samples if its count is neither
        known nor published, or the exception if its version cannot be read. The exception is FileNotFoundError if the
        shard does not exist.

    Raises:
        ValueError: If a bucket cannot be listed.
    """
    locations, remote = listing.locate(), listing.remote
    folders = {
        location.rpartition("/")[0] for location in locations.values() if _has_neighbors(location)
    }
    listed: dict[str, Version] = {}
    for folder in sorted(folders):
        if folder.startswith(BUCKETS):
            listed |= list_objects(folder + "/", remote)
    tables = {
        folder: _read_json(f"{folder}/sizes.json", listed, remote)
        for folder in folders
        if published
    }

    def find(name: str) -> tuple[str, Shard | Exception]:
        location = locations[name]
        try:
            shard = Shard(name, 0, *_find_version(location, listed, remote))
        except (StoreError, OSError) as error:
            return name, error
        # A shard with 0 samples may have been missing, so it is counted again.
        before = known.get(name, shard)
        if before.samples and shard.bytes in (0, before.bytes) and before.tag in ("", shard.tag):
            return name, before._replace(tag=shard.tag)
        samples = None
        if published and _has_neighbors(location):
            folder, _, base = location.rpartition("/")
            samples = tables[folder].get(base)
            if samples is None:
                stats = _read_json(f"{location.removesuffix('.tar')}_stats.json", listed, remote)
                samples = stats.get("successes")
        # A sample has at least one member, and its header and data take at least 1,024 bytes.
        if type(samples) is int and 0 <= samples <= shard.bytes // 1024:
            return name, shard._replace(samples=samples)
        return name, shard

    with ThreadPoolExecutor(_REQUESTS) as pool:
        try:
            for done in as_completed([pool.submit(find, name) for name in listing.names]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _has_neighbors(location: str) -> bool:
    """Return whether other files next to a shard can be read, unlike those of a command or a signed URL."""
    return not (location.startswith(PIPE) or (location.startswith("http") and "?" in location))


def _find_version(location: str, listed: Mapping[str, Version], remote: RemoteSettings) -> Version:
    """Return the version of a shard.

    Raises:
        FileNotFoundError: If the shard does not exist.
        StoreError: If the server does not return the version.
        OSError: If the shard is local and is not a regular file, or if its status cannot be read.
    """
    if location.startswith(PIPE):
        return Version(0, "")
    if location.startswith(BUCKETS):
        if location not in listed:
            raise FileNotFoundError(location)
        return listed[location]
    if "://" in location:
        return read_version(location, remote)
    status = os.stat(location)
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe might block
        raise OSError(errno.EINVAL, "not a regular file", location)
    return Version(status.st_size, str(status.st_mtime_ns))


def _read_json(
    location: str, listed: Mapping[str, Version], remote: RemoteSettings
) -> Mapping[str, Any]:
    """Return the content of a JSON file, or {} if the file does not exist or has no usable content."""
    if location.startswith(BUCKETS) and location not in listed:
        return {}
    try:
        content = (
            read_object(location, remote) if "://" in location else Path(location).read_bytes()
        )
        tree = json.loads(content)
    except FileNotFoundError:
        return {}
    except (StoreError, OSError, ValueError) as error:
        logger.warning("%s is ignored: %s", describe(location), error)
        return {}
    return tree if isinstance(tree, dict) else {}


def _count(
    remote: RemoteSettings, whole: bool, task: tuple[Shard, str]
) -> tuple[Shard | Exception, str | None]:
    """Read one shard and count its samples.

    Args:
        remote: How to fetch a remote shard.
        whole: Read all bytes of the shard, not only its headers.
        task: The shard, and its path, URL or command.

    Returns:
        The counted shard, or the error if it cannot be read; and a problem to warn about, such as a truncated tar, or
        None.
    """
    shard, location = task
    try:
        with _open(shard, location, remote) as file:
            while whole and file.read(_BLOCK):
                pass
            index, size = TarIndex(file), os.fstat(file.fileno()).st_size
            problem = None
            if index.truncated is not None:
                state = "is truncated" if len(index) else "cannot be read as a tar"
                problem = f"{state}: {index.truncated}"
            else:
                file.seek(index.end)
                if any(file.read(_BLOCK)):
                    problem = (
                        f"has data after its end mark at byte {index.end:,}, because a header was lost or tars were "
                        "concatenated; the data is ignored, so write the shard again"
                    )
            if problem:
                problem += f"; counted {plural(len(index), 'sample')}"
    except (DataError, OSError) as error:
        return error, None
    return shard._replace(samples=len(index), bytes=size), problem


def _open(shard: Shard, location: str, remote: RemoteSettings) -> Any:
    """Open a shard for counting. A remote shard is fetched into the cache, or a command's into a temporary file.

    Raises:
        DataError: If a remote shard cannot be fetched.
        OSError: If a local shard cannot be read.
    """
    if not is_remote(location):
        # Unbuffered: the scan skips from header to header, much further than a buffer would reach.
        return open(location, "rb", buffering=0)
    if shard.bytes:
        return ShardCache([location], [shard], remote).open(0)
    return fetch_temporary(location, shard.name, remote)


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
