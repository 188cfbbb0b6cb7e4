"""The cache of remote shards on a host's disk, and the threads that prefetch shards into it.

Samples are read out of order, so a shard is fetched whole into a local folder. It is renamed when it is complete. All
workers and ranks of the host read it there. A process locks the files that it reads (flock); the kernel releases the
locks when the process ends. Only unlocked files are evicted, starting with the one that was opened or prefetched least
recently. The folder is a sub-folder of data.remote.cache that only this user can write to. Files that the cache did not
name are left alone.

Alternatives considered: webdataset's cache (it names files by only the last part of their path, and evicts files that
other processes are reading) and fsspec's cache (it has neither a size limit nor locks between processes).
"""

import fcntl
import hashlib
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from disco_ds.config.data import DEFAULT_CACHE_GB, RemoteSettings
from disco_ds.data.errors import CacheFullError, DataError
from disco_ds.data.order import Cursor, Mixture
from disco_ds.data.sources.base import Shard, Source
from disco_ds.data.sources.fetching import StoreError, describe, fetch, progress, read_version

_CACHE_NAME = re.compile(r"[0-9a-f]{64}\.(shard|partial)")
"""Names of cached shards, and of shards being fetched."""
DISK_SHARE = 0.9
"""The cache uses at most this fraction of the disk space that is free or already used by the cache."""
_POLL_S = 0.05

_THREADS = 2
"""Number of prefetching threads per worker. While one thread waits for an answer, the other one can receive data."""
_IDLE_S = 0.5
"""Pause of a prefetching thread if no shard needs to be fetched."""
_PAUSE_S = 1.0
"""Pause after a failure, before the next shard is prefetched."""
_RETRY_S = 30.0
"""Pause before a shard that could not be prefetched is tried again."""

SourceShard = tuple[int, int]
"""A shard, as the number of its source and its number in that source."""


@dataclass
class ShardCache:
    """Remote shards of a manifest as local files. It can be pickled."""

    urls: Sequence[str]
    """Addresses of the shards."""
    shards: list[Shard]
    """If the size of a shard is 0, which means unknown, the cache requests its size and tag when it first needs the
    shard."""
    settings: RemoteSettings
    """Folder, size limit and number of attempts."""

    @property
    def folder(self) -> Path:
        """The folder of this user's cached shards, which may not exist yet."""
        return find_folder(self.settings)

    def open(self, shard: int) -> BinaryIO:
        """Open a shard, and fetch it first if it is missing. It is not evicted until the file is closed.

        Raises:
            DataError: If the shard cannot be fetched.
            CacheFullError: If there is no room for it.
            OSError: If the folder cannot be used.
        """
        path = self._locate(shard)
        while True:
            try:
                file = open(path, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            except FileNotFoundError:
                self._fetch(shard, path)
                continue
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(file, path):
                os.utime(file.fileno())
                return file
            # The shard was evicted after it was opened and before it was locked. Try again.
            file.close()

    def fetch_ahead(self, shard: int) -> None:
        """Prefetch a shard in one attempt, unless it is already cached or another process is fetching it.

        Raises:
            DataError: If the shard cannot be fetched.
            CacheFullError: If there is no room for it.
            OSError: If the folder cannot be used.
        """
        path = self._locate(shard)
        try:
            # The new file time shows that the shard will be needed soon.
            os.utime(path)
        except FileNotFoundError:
            self._fetch(shard, path, ahead=True)

    def _locate(self, shard: int) -> Path:
        """Return the path of a shard's file, and create its folder.

        Raises:
            DataError: If other users could write to the folder, or if the shard's size cannot be read.
        """
        _make_private(self.folder)
        url, known = self.urls[shard], self.shards[shard]
        if not known.bytes:
            try:
                version = read_version(url, self.settings)
            except StoreError as error:
                raise DataError(
                    f"the size of shard {known.name} cannot be read from {describe(url)}: {error}"
                ) from None
            known = self.shards[shard] = known._replace(**version._asdict())
        # The version is part of the key, so that a shard that was replaced and indexed again gets a new file. The name
        # is a hash because the URL may contain secrets.
        key = hashlib.sha256(f"{known.bytes} {known.tag} {url}".encode()).hexdigest()
        return self.folder / f"{key}.shard"

    def _fetch(self, shard: int, path: Path, ahead: bool = False) -> None:
        """Fetch a shard to `path`, unless another process has just done so.

        Args:
            shard: Number of the shard.
            path: Path of the complete file.
            ahead: Prefetch the shard: try once, and return if another process is already fetching it.
        """
        partial = path.with_suffix(".partial")
        # One attempt is enough for prefetching, because the reader tries again.
        settings = self.settings.replace(tries=1) if ahead else self.settings
        # The process that locks the .partial file fetches the shard. The others wait until the file is renamed or
        # removed.
        with _open_or_create(partial) as file:
            # Poll instead of waiting for the lock. After the file is renamed, readers lock it, possibly for hours.
            changed_ns = 0
            while not _try_lock(file, fcntl.LOCK_EX):
                if ahead or not _is_at(file, partial):
                    return
                if changed_ns != (changed_ns := os.fstat(file.fileno()).st_mtime_ns):
                    progress.add()
                time.sleep(_POLL_S)
            if not _is_at(file, partial):
                # Another process completed the shard after this one opened the .partial file.
                return
            if path.exists():
                # Another process completed the shard before this one created the .partial file.
                partial.unlink()
                return
            try:
                file.truncate(0)
                name, _, size, _ = self.shards[shard]
                while not self._make_room(file, size, ahead):
                    progress.add()
                    os.utime(file.fileno())
                    time.sleep(_POLL_S)
                fetch(self.urls[shard], name, file, settings, size)
                os.fsync(file.fileno())
                partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _make_room(self, file: BinaryIO, need: int, ahead: bool) -> bool:
        """Evict shards until `need` more bytes fit, and reserve them by extending `file` to `need` bytes.

        Args:
            file: The file of the shard to fetch.
            need: Size of that shard in bytes.
            ahead: Whether the shard is prefetched, so that it need not wait for room.

        Returns:
            Whether there is room now. If not, there may be room once shards that are being fetched can be evicted.

        Raises:
            CacheFullError: If there is not enough room, even without the shards that may be evicted.
        """
        # Only one process may do this at a time. Otherwise, two processes could reserve the same free space.
        with _open_or_create(self.folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            limit = find_limit(self.settings)
            shards = _list_shards(self.folder)
            # Shards being fetched count with their full size, because it is already reserved.
            used = sum(status.st_size for status in shards.values())
            coming = 0
            for path in sorted(shards, key=lambda path: shards[path].st_mtime_ns):
                if used + need <= limit:
                    break
                freed, fetching = _evict(path, shards[path].st_size)
                used -= freed
                coming += fetching
            if used + need <= limit:
                file.truncate(need)
                return True
            if not ahead and used - coming + need <= limit:
                return False
            raise CacheFullError(
                f"{self.folder} has no room for a shard of {need:,} bytes, because {used:,} bytes are in use and "
                f"the limit is {limit / 1e9:g} GB; raise data.remote.cache_gb, free disk space, or lower data.slots"
            )


def find_folder(settings: RemoteSettings) -> Path:
    """Return the folder of this user's cached shards, which may not exist yet."""
    return settings.cache.expanduser() / f"disco_ds-{os.geteuid()}"


def find_limit(settings: RemoteSettings) -> int:
    """Find the size limit of the cache in bytes: data.remote.cache_gb, or less if its disk is nearly full."""
    folder = find_folder(settings)
    existing = next(path for path in (folder, *folder.parents) if os.path.isdir(path))
    room = shutil.disk_usage(existing).free
    # An unreadable folder is an error only when the first shard is opened.
    with suppress(OSError):
        # Count allocated blocks, because a file being fetched is extended before its content arrives.
        room += sum(512 * status.st_blocks for status in _list_shards(folder).values())
    return int(min(1e9 * (settings.cache_gb or DEFAULT_CACHE_GB), DISK_SHARE * room))


def _list_shards(folder: Path) -> dict[Path, os.stat_result]:
    """Return the path and status of each complete or partial shard in a folder. Other files are skipped."""
    shards = {}
    for path in folder.iterdir():
        # A .partial file may have been renamed in the meantime.
        with suppress(FileNotFoundError):
            if _CACHE_NAME.fullmatch(path.name):
                shards[path] = path.lstat()
    return shards


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can access.

    Raises:
        DataError: If the folder exists and other users could write to it.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    status = os.lstat(folder)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DataError(
            f"{folder} must be a folder (not a link) that only user {os.geteuid()} can write to; remove it, or set "
            "data.remote.cache to another folder on a local disk"
        )


def _open_or_create(path: Path) -> BinaryIO:
    """Open a file for writing without truncating it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file still has this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    return False


def _evict(path: Path, size: int) -> tuple[int, int]:
    """Remove a file of `size` bytes unless a process has locked it.

    Returns:
        How many bytes this freed, and how many can be freed once another process has fetched the shard.
    """
    with suppress(OSError), path.open("rb") as file:
        # The process that fetches a shard does not share its lock, as readers do.
        if not _try_lock(file, fcntl.LOCK_SH):
            return 0, size
        # The file may have been renamed or removed before it was locked, and another file created at its path.
        if _try_lock(file, fcntl.LOCK_EX) and _is_at(file, path):
            path.unlink()
            return size, 0
    return 0, 0


def _try_lock(file: BinaryIO, mode: int) -> bool:
    """Lock a file without waiting. Return whether that succeeded."""
    with suppress(BlockingIOError):
        fcntl.flock(file, mode | fcntl.LOCK_NB)
        return True
    return False


@dataclass
class FetchAhead:
    """Prefetches shards for some streams of a data order, in threads of the worker that will read them.

    The data order determines what each slot reads next, so nothing is guessed: among all shards that the worker's
    streams will need, the one that is needed first is fetched first. Prefetching is best effort. The order does not
    depend on it, and if it fails, the reader fetches the shard itself or reports the error.
    """

    sources: Sequence[Source]
    """The sources of the order."""
    order: Mixture
    """The data order."""
    least: int
    """Minimum number of shards to prefetch for every stream, in addition to those that it is reading. If it is 0,
    nothing is prefetched."""
    cursor: Cursor
    """The position of each stream. The thread that reads the samples keeps it up to date."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _not_before: dict[SourceShard, float] = field(default_factory=dict)
    """The time before which each shard is skipped; infinity if it was fetched or is being fetched."""

    def start(self) -> None:
        """Start the threads if a source has anything to prefetch. They end with the process."""
        if self.least and any(source.open_fetcher() for source in self.sources):
            for _ in range(_THREADS):
                threading.Thread(target=self._run, daemon=True).start()

    def find_wanted(self) -> list[SourceShard]:
        """List the shards that the streams are reading or need next, the most urgent first."""
        needed: dict[SourceShard, float] = {}
        for stream, position in self.cursor.items():
            beyond, reached = 0, 0.0
            for away, shard in self.order.upcoming(stream, *position):
                # The shards of a window are needed together, so stop only between windows.
                if away > reached and beyond >= self.least:
                    break
                needed[shard] = min(away, needed.get(shard, away))
                beyond += away > 0
                reached = away
        return sorted(needed, key=lambda shard: (needed[shard], shard))

    def _claim(self) -> SourceShard | None:
        """Choose the most urgent shard, and mark it as being fetched. Return None if no shard needs to be fetched."""
        wanted = self.find_wanted()
        self._not_before = {shard: self._not_before.get(shard, 0) for shard in wanted}
        for shard in wanted:
            if time.monotonic() >= self._not_before[shard]:
                self._not_before[shard] = math.inf
                return shard
        return None

    def _run(self) -> None:
        fetchers = [source.open_fetcher() for source in self.sources]
        while True:
            with self._lock:
                claimed = self._claim()
            if claimed is None:
                time.sleep(_IDLE_S)
                continue
            source, shard = claimed
            try:
                if (fetch := fetchers[source]) is not None:
                    fetch(shard)
            except Exception:
                # Custom sources may raise anything. If the failure persists, the reader reports it.
                with self._lock:
                    self._not_before[claimed] = time.monotonic() + _RETRY_S
                time.sleep(_PAUSE_S)
