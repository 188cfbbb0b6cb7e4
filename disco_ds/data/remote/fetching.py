"""Downloads of remote shards from http(s) URLs, or from the output of shell commands (`pipe:COMMAND`).

Alternatives considered: fsspec, as torch installs it, reads neither http (which needs aiohttp) nor s3 (which needs
s3fs). webdataset's gopen ignores some failed commands and does not look at the HTTP status.
"""

from __future__ import annotations

import base64
import http.client
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress

# Uses poll(), because select() does not accept file descriptors above 1,023.
from multiprocessing.connection import wait
from typing import Any, BinaryIO

from disco_ds.config.data import LEAST_CACHE_GB, MAX_JITTER, RemoteSettings
from disco_ds.config.secrets import expand
from disco_ds.data.images.broken import DataError
from disco_ds.data.sources.listing import PIPE

_RANGE = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<total>\d+|\*)")
"""The header Content-Range."""
_TRANSIENT = {408, 416, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which another attempt may succeed."""
_BLOCK = 2**20


class _Progress(threading.local):
    """A count of attempts and received blocks, by which a trainer sees that its data worker is alive.

    The count is the last integer of `count`, in memory that the worker shares with the trainer. Other threads of the
    worker have separate counts, so that prefetching does not hide that the reading thread hangs.
    """

    def __init__(self) -> None:
        self.count: Any = [0]

    def add(self) -> None:
        self.count[-1] += 1


progress = _Progress()


class _FetchError(Exception):
    def __init__(self, reason: str, transient: bool = True) -> None:
        super().__init__(reason)
        self.transient = transient


class _Download:
    """The part of a shard that has arrived. The next attempt resumes there if the server supports it."""

    def __init__(self, file: BinaryIO, size: int | None, limit: int) -> None:
        self._file = file
        self._size = size
        self._limit = limit
        self.done = 0
        """Bytes that have arrived."""
        self.version: str | None = None
        """The strong ETag of the content or else its date, from which the server sees whether the content changed."""

    def write(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            written = os.pwrite(self._file.fileno(), view, self.done)
            view, self.done = view[written:], self.done + written
            # Checked after every write, because content without a stated length could fill the disk.
            if self.done > (self._size or self._limit):
                raise self._refuse()

    def finish(self) -> None:
        if self._size not in (None, self.done):
            raise self._refuse()
        self._file.truncate(self.done)

    def _refuse(self) -> _FetchError:
        """Return the error for content of the wrong size."""
        self.version = None
        if self._size is None:
            most = f"data.remote.cache_gb, the limit for a shard ({self._limit / 1e9:g} GB)"
            return _FetchError(f"it has more bytes than {most}", transient=False)
        return _FetchError(
            f"{self.done:,} bytes arrived, but its manifest says {self._size:,}; if the shard was replaced, "
            "index it again"
        )


def fetch(
    url: str, name: str, file: BinaryIO, settings: RemoteSettings, size: int | None = None
) -> None:
    """Download a remote shard into an open file, in several attempts if necessary.

    Args:
        url: Address of the shard, or `pipe:COMMAND`.
        name: Name of the shard in messages.
        file: Unbuffered file to write to.
        settings: Number of attempts, timeout and size limit.
        size: Expected size in bytes; None: any up to the limit.

    Raises:
        DataError: If all attempts fail. The message has the URL, without secrets, and the last failure.
    """
    download = _Download(file, size, int((settings.cache_gb or LEAST_CACHE_GB) * 1e9))
    for number in range(settings.tries):
        if number:
            # The pauses are random because many processes fail at once. They must not use the trainer's generator.
            jitter = random.SystemRandom().uniform(2 - MAX_JITTER, MAX_JITTER)
            time.sleep(settings.pause_s(number) * jitter)
        # Processes that wait for this file see from its time that it is being fetched.
        os.utime(file.fileno())
        progress.add()
        try:
            with closing(_read(url, settings.timeout_s, download)) as blocks:
                for block in blocks:
                    progress.add()
                    download.write(block)
            download.finish()
            return
        except _FetchError as error:
            progress.add()
            last = error
            if not error.transient:
                break
    raise DataError(
        f"shard {name} cannot be fetched from {describe(url)}: {last}; tries: {number + 1}"
    )


@contextmanager
def fetch_temporary(url: str, name: str, settings: RemoteSettings) -> Iterator[BinaryIO]:
    """Download a remote shard into an unnamed temporary file.

    Raises:
        DataError: If all attempts fail.
    """
    with tempfile.TemporaryFile(buffering=0) as file:
        fetch(url, name, file, settings)
        yield file


def describe(url: str) -> str:
    """Return a URL without user, password and query, for messages. Commands are hidden: any part may be secret."""
    if url.startswith(PIPE):
        return "its pipe:"
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _read(url: str, timeout_s: float, download: _Download) -> Generator[bytes, None, None]:
    """Read a URL or the output of a command block by block, from `download.done` on.

    A source that cannot resume sets `download.done` to 0 and starts from the beginning.

    Raises:
        _FetchError: If the attempt fails.
    """
    try:
        if url.startswith(PIPE):
            download.done = 0
            yield from _read_command(url.removeprefix(PIPE), timeout_s)
        else:
            yield from _read_http(url, timeout_s, download)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            # The next attempt requests the whole shard.
            download.version = None
        reason = http.client.responses.get(error.code, "")
        raise _FetchError(
            f"HTTP status {error.code} {reason}".rstrip(), error.code in _TRANSIENT
        ) from None
    except OSError as error:
        raise _FetchError(str(getattr(error, "reason", error))) from None
    except (http.client.HTTPException, ValueError) as error:
        # The message of the error may contain the URL, and with it secrets.
        raise _FetchError(type(error).__name__) from None


def _read_command(command: str, timeout_s: float) -> Generator[bytes, None, None]:
    # The command gets its own session, so that it can be killed with all processes that it has started.
    with subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    ) as process:
        assert process.stdout is not None
        limit = f"data.remote.timeout_s={timeout_s:g} s"
        try:
            block = b" "
            while block:
                if not wait([process.stdout.fileno()], timeout_s):
                    raise _FetchError(f"the command wrote nothing for {limit}")
                if block := process.stdout.read(_BLOCK):
                    yield block
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise _FetchError(f"the command did not exit within {limit}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise _FetchError(f"the command exited with status {process.returncode}")


def _read_http(url: str, timeout_s: float, download: _Download) -> Generator[bytes, None, None]:
    parts = urllib.parse.urlsplit(url)
    netloc = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(expand(urllib.parse.urlunsplit(parts._replace(netloc=netloc))))
    # urllib ignores credentials in a URL. An unredirected header is not sent to another host after a redirect.
    if parts.username:
        user, password = (
            expand(urllib.parse.unquote(part or "")) for part in (parts.username, parts.password)
        )
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {pair}")
    if download.done and download.version:
        request.add_header("Range", f"bytes={download.done}-")
        # If the content has changed, the server sends all of it, with status 200.
        request.add_header("If-Range", download.version)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        # A weak ETag does not identify every byte (RFC 9110, 13.1.5).
        tag, length = answer.headers["ETag"], answer.headers["Content-Length"]
        version = tag if tag and not tag.startswith("W/") else answer.headers["Last-Modified"]
        if answer.status == http.client.PARTIAL_CONTENT:
            # Continue only if this is the rest of the same content.
            said = answer.headers["Content-Range"]
            found = _RANGE.fullmatch(said or "")
            is_rest = found is not None and int(found["first"]) == download.done
            if found is not None and found["total"] != "*":
                is_rest &= int(found["last"]) + 1 == int(found["total"])
            if not is_rest or version not in (None, download.version):
                download.version = None
                raise _FetchError(
                    f"the server sent {said} instead of the rest from byte {download.done}"
                )
        else:
            download.done, download.version = 0, version
        received = 0
        # read1 returns what has arrived; read would wait for a whole block.
        while block := answer.read1(_BLOCK):
            received += len(block)
            yield block
    # When the connection breaks, read1 reports the end of the content.
    if length is not None and received < int(length):
        raise _FetchError(f"the connection ended after {received:,} of {int(length):,} bytes")
