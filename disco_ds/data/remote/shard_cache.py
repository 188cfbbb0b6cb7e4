"""The cache of remote shards on a host's disk.

The samples of a shard are read out of order, so a shard is fetched whole into a folder of this host, completed by a
rename, and read there by all workers and ranks. A process locks the files it reads (flock), and the kernel releases its
locks when it ends. Only files that nobody has locked are evicted: those that have been read before those fetched ahead,
the least recently used first. The folder is a sub-folder of the one in the settings, writable by this user alone; files
that the cache has not named are left alone.

Why not webdataset's cache or fsspec's: the one names files by the last part of the path alone and evicts files that
others are reading, the other has no size limit and no locks between processes.
"""

from __future__ import annotations

import errno
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
from disco_ds.data.images.broken import CacheFullError, DataError
from disco_ds.data.remote.fetching import fetch, progress

_OWN_NAME = re.compile(r"[0-9a-f]{64}\.(shard|partial)")
"""Names of cached shards, and of those being fetched."""
DISK_SHARE = 0.9
"""The cache takes at most this fraction of what is free on its disk, or its own already."""
_POLL_S = 0.05
_AHEAD, _PLAIN = 0o700, 0o600
"""Modes of a shard that is fetched ahead, until it is opened, and of all others: a mark that every process sees."""
_FORGOTTEN_S = 86400.0
"""Age at which a shard that was fetched ahead, and not read, has no claim to its room: its run has ended."""


class ShardCache:
    """Remote shards of a manifest as local files; it can be pickled.

    Args:    urls, names, sizes (in bytes, as counted) of the shards; settings: where, how much, how many attempts.
    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        sizes: Sequence[int],
        settings: RemoteSettings,
    ) -> None:
        self._urls = urls
        self._names = names
        self._sizes = sizes
        self._settings = settings
        self.folder = find_folder(settings)
        self._limit = find_limit(settings)

    def open(self, shard: int) -> BinaryIO:
        """The file of a shard, fetched if it is missing; it is not evicted until it is closed.

        Raises:  DataError naming the URL and the status, or the file in the way; CacheFullError; OSError of the folder.
        """
        path = self._locate(shard)
        while True:
            try:
                file = _open(path, os.O_RDONLY)
            except FileNotFoundError:
                self._fetch(shard, path)
                continue
            fcntl.flock(file, fcntl.LOCK_SH)
            if (
                os.fstat(file.fileno()).st_size != self._sizes[shard]
            ):  # truncated by somebody: replace it
                file.close()
                self._fetch(shard, path)
            elif _is_at(file, path):
                os.fchmod(file.fileno(), _PLAIN)
                os.utime(file.fileno())
                return file
            else:  # evicted between open and lock
                file.close()

    def fetch_ahead(self, shard: int) -> None:
        """Fetch a shard that will be opened later, in one attempt, if it is missing and nobody is fetching it.

        Raises:  as open; CacheFullError also if there is only room where shards lie that others have fetched ahead.
        """
        path = self._locate(shard)
        try:
            if stat.S_IMODE(path.stat().st_mode) != _AHEAD:
                os.utime(path)  # read before, it would be the first to be evicted
        except FileNotFoundError:
            self._fetch(shard, path, ahead=True)

    def _locate(self, shard: int) -> Path:
        """Return the path of a shard's file. Raises: DataError for a folder that is not this user's alone."""
        _make_private(self.folder)
        # The size is part of the name: a shard that was indexed again is another file. The URL may hold secrets.
        key = hashlib.sha256(f"{self._sizes[shard]} {self._urls[shard]}".encode()).hexdigest()
        return self.folder / f"{key}.shard"

    def _fetch(self, shard: int, path: Path, ahead: bool = False) -> None:
        """Fetch a shard to `path`, unless another process has just done so or, ahead of its use, is about to."""
        name = path.with_suffix(".partial")
        # The process that waits for what is fetched ahead makes its own attempts after that one.
        settings = self._settings.model_copy(update={"tries": 1}) if ahead else self._settings
        # The process that locks the .partial fetches; the others wait until it is renamed or removed.
        with _open(name, os.O_RDWR | os.O_CREAT) as file:
            # Waiting for the lock itself could take hours: once renamed, the file is locked by all its readers.
            changed_ns = 0
            while not _try_lock(file):
                if ahead or not _is_at(file, name):
                    return
                if changed_ns != (changed_ns := os.fstat(file.fileno()).st_mtime_ns):
                    progress.add()
                time.sleep(_POLL_S)
            # Between opening and locking, its former owner may have finished.
            if not _is_at(file, name):
                return
            try:
                file.truncate(0)
                os.fchmod(file.fileno(), _AHEAD if ahead else _PLAIN)
                while not self._make_room(file, self._sizes[shard], ahead):
                    progress.add()
                    os.utime(file.fileno())
                    time.sleep(_POLL_S)
                fetch(self._urls[shard], self._names[shard], file, settings, self._sizes[shard])
                os.fsync(file.fileno())
                name.rename(path)
            except BaseException:
                name.unlink(missing_ok=True)
                raise

    def _make_room(self, file: BinaryIO, need: int, ahead: bool) -> bool:
        """Evict shards until `need` more bytes fit, and reserve them by giving the file this size.

        Args:    ahead: evict none that others have fetched ahead.
        Returns: False if it takes what is being fetched ahead, which can be evicted as soon as it is there.
        Raises:  CacheFullError if all else is being read.
        """
        limit = self._limit
        # One process at a time, or two would count the same free space as theirs.
        with _open(self.folder / ".lock", os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = sorted(self._scan())
            # Shards being fetched count with their full size, which they reserve below.
            used = sum(size for _, _, size, _ in known)
            coming = 0
            for unread, _, size, path in known:
                if used + need <= limit:
                    break
                # What a killed process has left half fetched is nobody's.
                if not (ahead and unread and path.suffix == ".shard") and _evict(path):
                    used -= size
                elif unread:  # locked, but not by a reader
                    coming += size
            if used + need <= limit:
                file.truncate(need)
                return True
            if not ahead and used - coming + need <= limit:
                return False
            raise CacheFullError(
                f"there is no room for a shard of {need:,} bytes in {self.folder}: {used:,} bytes are being read, "
                f"data.remote.cache_gb is {limit / 1e9:g}; raise it, or set fewer data.slots"
            )

    def _scan(self) -> Iterator[tuple[bool, int, int, Path]]:
        """(whether fetched ahead and unread, order of eviction, size, path) of all shards of the cache."""
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # a .partial that has just been renamed
                if _OWN_NAME.fullmatch(entry.name):
                    found = entry.stat(follow_symlinks=False)
                    recent = time.time() - found.st_mtime < _FORGOTTEN_S
                    unread = stat.S_IMODE(found.st_mode) == _AHEAD and recent
                    # Of those that have been read the oldest goes first, of the others the one that is needed last.
                    yield (
                        unread,
                        -found.st_mtime_ns if unread else found.st_mtime_ns,
                        found.st_size,
                        Path(entry.path),
                    )


def find_folder(settings: RemoteSettings) -> Path:
    """The folder of this user's cached shards, which may not exist yet."""
    return settings.cache.expanduser() / f"disco_ds-{os.geteuid()}"


def find_limit(settings: RemoteSettings, wanted_bytes: float = 0) -> int:
    """Size limit of the cache in bytes: data.remote.cache_gb, as far as its disk has room.

    Args:    wanted_bytes: where data.remote.cache_gb is not set, the limit is this, or LEAST_CACHE_GB if that is more.
    """
    folder = find_folder(settings)
    asked = (
        1e9 * settings.cache_gb if settings.cache_gb else max(wanted_bytes, 1e9 * LEAST_CACHE_GB)
    )
    room = shutil.disk_usage(
        next(path for path in (folder, *folder.parents) if os.path.isdir(path))
    ).free
    # A missing folder holds no shards; one that cannot be read is refused when the first shard is opened.
    with suppress(OSError):
        for path in folder.iterdir():
            if _OWN_NAME.fullmatch(path.name):
                # Not its length, which a shard that is being fetched has before its content.
                room += 512 * path.lstat().st_blocks
    return int(min(asked, DISK_SHARE * room))


def _make_private(folder: Path) -> None:
    """Make a folder, and those above it, that only this user can write to. Raises: DataError if another is there."""
    for path in (*reversed(folder.parents), folder):
        path.mkdir(0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        wrong = "a link"
    elif found.st_uid != os.geteuid():
        wrong = f"of user {found.st_uid}, not {os.geteuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = "writable by others"
    else:
        return
    raise DataError(
        f"{folder} must be a folder of this user alone, and is {wrong}; remove it, or set data.remote.cache to another "
        "folder, on a disk of this host"
    )


def _open(path: Path, flags: int) -> BinaryIO:
    """Open a file of the cache without following links. Raises: DataError for one that this user has not written."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        wrong = "is a link"
    else:
        found = os.fstat(number)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            return open(number, "r+b" if flags & os.O_RDWR else "rb", buffering=0)
        os.close(number)
        wrong = (
            f"belongs to user {found.st_uid}"
            if stat.S_ISREG(found.st_mode)
            else "is not a regular file"
        )
    raise DataError(f"{path} is in the way of a cached shard: it {wrong}; remove it")


def _is_at(file: BinaryIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    return False


def _evict(path: Path) -> bool:
    """Remove a file unless a process has locked it; return whether it was removed."""
    with suppress(OSError, DataError), _open(path, os.O_RDONLY) as file:
        if _try_lock(file):
            path.unlink()
            return True
    return False


def _try_lock(file: BinaryIO) -> bool:
    """Lock a file unless another process has locked it; return whether it is locked now."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
