"""The cache of remote shards on a host's disk.

Samples are read out of order, so a shard is fetched whole into a local folder. It is renamed when it is complete. All
workers and ranks of the host read it there. A process locks the files that it reads (flock); the kernel releases the
locks when the process ends. Only unlocked files are evicted: first those that have been read, starting with the least
recently used one, then those that were only prefetched. The folder is a sub-folder of data.remote.cache that only this
user can write to. Files that the cache did not name are left alone.

Alternatives considered: webdataset's cache (it names files by only the last part of their path, and evicts files that
other processes are reading) and fsspec's cache (it has neither a size limit nor locks between processes).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from disco_ds.config.data import LEAST_CACHE_GB, RemoteSettings
from disco_ds.data.errors import CacheFullError, DataError
from disco_ds.data.remote.fetching import fetch, progress
from disco_ds.data.remote.stores import StoreError, Version, describe, read_version

_CACHE_NAME = re.compile(r"[0-9a-f]{64}\.(shard|partial)")
"""Names of cached shards, and of shards being fetched."""
DISK_SHARE = 0.9
"""The cache uses at most this fraction of the disk space that is free or already used by the cache."""
_POLL_S = 0.05

# The mode of a file shows all processes whether the shard was prefetched but has not been opened yet.
_PREFETCHED, _OPENED = 0o700, 0o600
_FORGOTTEN_S = 86400.0
"""A prefetched shard that was not opened for this long is assumed to belong to a run that has ended."""


class ShardCache:
    """Remote shards of a manifest as local files. It can be pickled.

    Args:
        urls: Addresses of the shards.
        names: Names of the shards in messages.
        versions: Versions of the shards. If the size in a version is 0, which means unknown, the cache requests the
            version when it first needs the shard.
        settings: Folder, size limit and number of attempts.
    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        versions: Sequence[Version],
        settings: RemoteSettings,
    ) -> None:
        self._urls = urls
        self._names = names
        self._versions = list(versions)
        self._settings = settings
        self.folder = find_folder(settings)
        self._limit = find_limit(settings)

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
                os.fchmod(file.fileno(), _OPENED)
                os.utime(file.fileno())
                return file
            # The shard was evicted after it was opened and before it was locked. Try again.
            file.close()

    def fetch_ahead(self, shard: int) -> None:
        """Prefetch a shard in one attempt, unless it is already cached or another process is fetching it.

        Raises:
            DataError: If the shard cannot be fetched.
            CacheFullError: If making room would evict a shard that is being read or was prefetched.
            OSError: If the folder cannot be used.
        """
        path = self._locate(shard)
        try:
            if stat.S_IMODE(path.stat().st_mode) != _PREFETCHED:
                # Update the file time. Otherwise, a shard that has already been read would be evicted soon.
                os.utime(path)
        except FileNotFoundError:
            self._fetch(shard, path, ahead=True)

    def _locate(self, shard: int) -> Path:
        """Return the path of a shard's file, and create its folder.

        Raises:
            DataError: If other users could write to the folder, or if the shard's size cannot be read.
        """
        _make_private(self.folder)
        if not self._versions[shard].bytes:
            url = self._urls[shard]
            try:
                self._versions[shard] = read_version(url, self._settings)
            except StoreError as error:
                raise DataError(
                    f"the size of shard {self._names[shard]} cannot be read from {describe(url)}: {error}"
                ) from None
        # The version is part of the key, so that a shard that was replaced and indexed again gets a new file. The name
        # is a hash because the URL may contain secrets.
        size, tag = self._versions[shard]
        key = hashlib.sha256(f"{size} {tag} {self._urls[shard]}".encode()).hexdigest()
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
        settings = self._settings.model_copy(update={"tries": 1}) if ahead else self._settings
        # The process that locks the .partial file fetches the shard. The others wait until the file is renamed or
        # removed.
        with _open_or_create(partial) as file:
            # Poll instead of waiting for the lock. After the file is renamed, readers lock it, possibly for hours.
            changed_ns = 0
            while not _try_lock(file):
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
                os.fchmod(file.fileno(), _PREFETCHED if ahead else _OPENED)
                size = self._versions[shard].bytes
                while not self._make_room(file, size, ahead):
                    progress.add()
                    os.utime(file.fileno())
                    time.sleep(_POLL_S)
                fetch(self._urls[shard], self._names[shard], file, settings, size)
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
            ahead: Do not evict prefetched shards that have not been read.

        Returns:
            Whether there is room now. If not, there will be room once shards that are being prefetched can be evicted.

        Raises:
            CacheFullError: If there is not enough room, even without the shards that may be evicted.
        """
        limit = self._limit
        # Only one process may do this at a time. Otherwise, two processes could reserve the same free space.
        with _open_or_create(self.folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = sorted(self._rank())
            # Shards being fetched count with their full size, because it is already reserved.
            used = sum(size for _, _, size, _ in known)
            coming = 0
            for unread, _, size, path in known:
                if used + need <= limit:
                    break
                # A .partial file that can be locked was left by a killed process, so it may always be evicted.
                if not (ahead and unread and path.suffix == ".shard") and _evict(path):
                    used -= size
                elif unread:
                    # It is locked by the process that prefetches it.
                    coming += size
            if used + need <= limit:
                file.truncate(need)
                return True
            if not ahead and used - coming + need <= limit:
                return False
            raise CacheFullError(
                f"{self.folder} has no room for a shard of {need:,} bytes, because {used:,} bytes are in use and "
                f"the limit is {limit / 1e9:g} GB; raise data.remote.cache_gb, free disk space, or lower data.slots"
            )

    def _rank(self) -> Iterator[tuple[bool, int, int, Path]]:
        """Yield (whether prefetched and unread, eviction order, bytes, path) for each shard in the cache.

        Within either kind, the shard with the smallest eviction order is evicted first.
        """
        for path, found in _list_shards(self.folder):
            recent = time.time() - found.st_mtime < _FORGOTTEN_S
            unread = stat.S_IMODE(found.st_mode) == _PREFETCHED and recent
            # Of the shards that have been read, the oldest is evicted first. Of the others, the newest is evicted
            # first, because it is needed last.
            order = -found.st_mtime_ns if unread else found.st_mtime_ns
            yield unread, order, found.st_size, path


def find_folder(settings: RemoteSettings) -> Path:
    """Return the folder of this user's cached shards, which may not exist yet."""
    return settings.cache.expanduser() / f"disco_ds-{os.geteuid()}"


def find_limit(settings: RemoteSettings, wanted_bytes: float = 0) -> int:
    """Find the size limit of the cache in bytes: data.remote.cache_gb, or less if its disk is nearly full.

    Args:
        settings: Settings of remote shards.
        wanted_bytes: The limit if data.remote.cache_gb is not set. A value below LEAST_CACHE_GB is raised to it.
    """
    folder = find_folder(settings)
    default_gb = max(wanted_bytes / 1e9, LEAST_CACHE_GB)
    existing = next(path for path in (folder, *folder.parents) if os.path.isdir(path))
    room = shutil.disk_usage(existing).free
    # An unreadable folder is an error only when the first shard is opened.
    with suppress(OSError):
        # Count allocated blocks, because a file being fetched is extended before its content arrives.
        room += sum(512 * found.st_blocks for _, found in _list_shards(folder))
    return int(min(1e9 * (settings.cache_gb or default_gb), DISK_SHARE * room))


def _list_shards(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the path and status of each complete or partial shard in a folder. Other files are skipped."""
    for path in folder.iterdir():
        # A .partial file may have been renamed in the meantime.
        with suppress(FileNotFoundError):
            if _CACHE_NAME.fullmatch(path.name):
                yield path, path.lstat()


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can access.

    Raises:
        DataError: If the folder exists and other users could write to it.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
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


def _evict(path: Path) -> bool:
    """Remove a file unless a process has locked it. Return whether it was removed."""
    with suppress(OSError), path.open("rb") as file:
        # The file may have been renamed or removed before it was locked, and another file created at its path.
        if _try_lock(file) and _is_at(file, path):
            path.unlink()
            return True
    return False


def _try_lock(file: BinaryIO) -> bool:
    """Lock a file exclusively without waiting. Return whether that succeeded."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
