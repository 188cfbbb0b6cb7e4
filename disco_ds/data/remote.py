"""Fetches remote shards: from http(s) URLs, or the output of shell commands (`pipe:COMMAND`).

The samples of a shard are read out of order, so a shard is fetched whole into a folder of this host, completed by a
rename, and read there by all workers and ranks. A process locks the files it reads (flock), and the kernel releases its
locks when it ends. Only files that nobody has locked are evicted, the least recently used first. The folder is a
sub-folder of the one in the settings, writable by this user alone; files that the cache has not named are left alone.

Why not webdataset's gopen and cache: they ignore some failures of their commands, do not look at the HTTP status, name
files by the last part of the path alone and evict files that others are reading. Why not fsspec: with what torch
installs of it, it reads neither http (aiohttp is missing) nor s3 (s3fs), and its file cache has no size limit and no
locks between processes. Its clients for object stores would be an addition to this file, which `pipe:` covers.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import http.client
import os
import random
import re
import select
import signal
import stat
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from disco_ds.config.data import MAX_JITTER, RemoteSettings
from disco_ds.config.secrets import expand, redact
from disco_ds.data.broken import CacheFullError, DataError
from disco_ds.data.listing import PIPE

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which another attempt may succeed."""
_OWN_NAME = re.compile(r"[0-9a-f]{64}\.(shard|partial)")
"""Names of cached shards, and of those being fetched."""
_BLOCK = 2**20
_POLL_S = 0.05

progress: Any = [0]
"""Its last integer counts attempts and blocks that have arrived. A data worker shares it with its trainer."""


class _FetchError(Exception):
    def __init__(self, reason: str, transient: bool = True) -> None:
        super().__init__(reason)
        self.transient = transient


class ShardCache:
    """Remote shards of a manifest as local files; it can be pickled.

    Args:    urls, names, sizes (in bytes, as counted) of the shards; settings: where, how much, how many attempts.
    """

    def __init__(
        self, urls: Sequence[str], names: Sequence[str], sizes: Sequence[int], settings: RemoteSettings
    ) -> None:
        self._urls = urls
        self._names = names
        self._sizes = sizes
        self._settings = settings
        self.folder = settings.cache.expanduser() / f"disco_ds-{os.geteuid()}"

    def open(self, shard: int) -> BinaryIO:
        """The file of a shard, fetched if it is missing; it is not evicted until it is closed.

        Raises:  DataError naming the URL and the status, or the file in the way; CacheFullError; OSError of the folder.
        """
        # The size is part of the name: a shard that was indexed again is another file. The URL may hold secrets.
        key = hashlib.sha256(f"{self._sizes[shard]} {self._urls[shard]}".encode()).hexdigest()
        path = self.folder / f"{key}.shard"
        _make_private(self.folder)
        while True:
            try:
                file = _open(path, os.O_RDONLY)
            except FileNotFoundError:
                self._fetch(shard, path)
                continue
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file.fileno()).st_size != self._sizes[shard]:  # truncated by somebody: replace it
                file.close()
                self._fetch(shard, path)
            elif _is_at(file, path):
                os.utime(file.fileno())
                return file
            else:  # evicted between open and lock
                file.close()

    def _fetch(self, shard: int, path: Path) -> None:
        """Fetch a shard to `path`, unless another process has just done so."""
        name = path.with_suffix(".partial")
        # The process that locks the .partial fetches; the others wait until it is renamed or removed.
        with _open(name, os.O_RDWR | os.O_CREAT) as file:
            # Waiting for the lock itself could take hours: once renamed, the file is locked by all its readers.
            changed_ns = 0
            while not _try_lock(file):
                if not _is_at(file, name):
                    return
                if changed_ns != (changed_ns := os.fstat(file.fileno()).st_mtime_ns):
                    progress[-1] += 1
                time.sleep(_POLL_S)
            # Between opening and locking, its former owner may have finished.
            if not _is_at(file, name):
                return
            try:
                file.truncate(0)
                self._make_room(file, self._sizes[shard])
                fetch(self._urls[shard], self._names[shard], file, self._settings, self._sizes[shard])
                os.fsync(file.fileno())
                name.rename(path)
            except BaseException:
                name.unlink(missing_ok=True)
                raise

    def _make_room(self, file: BinaryIO, need: int) -> None:
        """Evict shards until `need` more bytes fit, and reserve them by giving the file this size."""
        limit = int(self._settings.cache_gb * 1e9)
        # One process at a time, or two would count the same free space as theirs.
        with _open(self.folder / ".lock", os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = []
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):  # a .partial that has just been renamed
                    if _OWN_NAME.fullmatch(entry.name):
                        found = entry.stat(follow_symlinks=False)
                        known.append((found.st_mtime_ns, found.st_size, Path(entry.path)))
            # Shards being fetched count with their full size, which they reserve below.
            used = sum(size for _, size, _ in known)
            for _, size, path in sorted(known):
                if used + need <= limit:
                    break
                if _evict(path):
                    used -= size
            if used + need > limit:
                raise CacheFullError(
                    f"there is no room for a shard of {need:,} bytes in {self.folder}: {used:,} bytes are being read, "
                    f"data.remote.cache_gb is {self._settings.cache_gb:g}; raise it, or set fewer data.slots"
                )
            file.truncate(need)


def fetch(url: str, name: str, file: BinaryIO, settings: RemoteSettings, size: int | None = None) -> None:
    """Write a remote shard into an open file, in several attempts if necessary.

    Args:    name: for messages; size: expected size in bytes; None: any.
    Raises:  DataError naming the URL, without what may be secret in it, and the last failure.
    """
    for number in range(settings.tries):
        if number:
            # Random pauses, since many processes fail at once. They must not use the trainer's random generator.
            time.sleep(settings.pause_s(number) * random.SystemRandom().uniform(2 - MAX_JITTER, MAX_JITTER))
        os.utime(file.fileno())  # by which those who wait for this file see that it is being fetched
        progress[-1] += 1
        try:
            with closing(_read_url(url, settings.timeout_s)) as blocks:
                _write(blocks, file, size, int(settings.cache_gb * 1e9))
            return
        except _FetchError as error:
            progress[-1] += 1
            last = error
            if not error.transient:
                break
    raise DataError(f"shard {name} cannot be fetched from {describe(url)}: {redact(str(last))}; tries: {number + 1}")


@contextmanager
def fetch_temporary(url: str, name: str, settings: RemoteSettings) -> Iterator[BinaryIO]:
    """A remote shard in an unnamed temporary file. Raises: as fetch."""
    with tempfile.TemporaryFile(buffering=0) as file:
        fetch(url, name, file, settings)
        yield file


def describe(url: str) -> str:
    """A URL without user, password and query, for messages. A command is not shown: it may hold secrets anywhere."""
    if url.startswith(PIPE):
        return "its pipe:"
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _write(blocks: Iterable[bytes], file: BinaryIO, size: int | None, limit: int) -> None:
    """Write blocks of `size` bytes together, of `limit` at most where the size is not known. Raises: _FetchError."""
    file.seek(0)
    done = 0
    for block in blocks:
        progress[-1] += 1
        done += len(block)
        if size is not None and done > size:
            break
        if done > limit:
            raise _FetchError(f"more than data.remote.cache_gb ({limit / 1e9:g} GB), which no shard may have", False)
        view = memoryview(block)
        while view:
            view = view[file.write(view) :]
    if size is not None and done != size:
        what = f"more than {size:,}" if done > size else f"{done:,} of {size:,}"
        raise _FetchError(f"{what} bytes as its manifest counts them; if it was written anew, index it again")
    file.truncate(done)


def _read_url(url: str, timeout_s: float) -> Generator[bytes, None, None]:
    """The content of a URL or the output of a command, block by block. Raises: _FetchError."""
    try:
        if url.startswith(PIPE):
            yield from _read_command(url.removeprefix(PIPE), timeout_s)
        else:
            yield from _read_http(url, timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        reason = http.client.responses.get(error.code, "")
        raise _FetchError(f"HTTP status {error.code} {reason}".strip(), error.code in _TRANSIENT) from None
    except OSError as error:
        raise _FetchError(str(getattr(error, "reason", error))) from None
    except (http.client.HTTPException, ValueError) as error:
        # The text of the error may contain the URL.
        raise _FetchError(type(error).__name__) from None


def _read_command(command: str, timeout_s: float) -> Generator[bytes, None, None]:
    # In a session of its own, to be ended with all that it has started.
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, start_new_session=True, bufsize=0) as process:
        assert process.stdout is not None
        try:
            block = b" "
            while block:
                if not select.select([process.stdout], [], [], timeout_s)[0]:
                    raise _FetchError(f"the command wrote nothing for data.remote.timeout_s={timeout_s:g} s")
                if block := process.stdout.read(_BLOCK):
                    yield block
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise _FetchError(f"the command did not end within data.remote.timeout_s={timeout_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise _FetchError(f"the command ended with status {process.returncode}")


def _read_http(url: str, timeout_s: float) -> Generator[bytes, None, None]:
    parts = urllib.parse.urlsplit(url)
    netloc = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(expand(urllib.parse.urlunsplit(parts._replace(netloc=netloc))))
    # urllib does not use credentials in a URL. They must not follow a redirect to another host.
    if parts.username:
        user, password = (expand(urllib.parse.unquote(part or "")) for part in (parts.username, parts.password))
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {pair}")
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        done, length = 0, answer.headers["Content-Length"]
        while block := answer.read1(_BLOCK):  # what has arrived; read() would wait for a whole block
            done += len(block)
            yield block
    # An early end of the connection reads as the end of the content.
    if length is not None and done < int(length):
        raise _FetchError(f"the connection ended after {done:,} of {int(length):,} bytes")


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
        wrong = f"belongs to user {found.st_uid}" if stat.S_ISREG(found.st_mode) else "is not a regular file"
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
