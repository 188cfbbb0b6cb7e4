"""Fetches remote shards: from http(s) URLs, or the output of shell commands (`pipe:COMMAND`).

Why not fsspec: with what torch installs of it, it reads neither http (aiohttp is missing) nor s3 (s3fs). Its clients
for object stores would be an addition to this file, which `pipe:` covers. Why not webdataset's gopen: it ignores some
failures of its commands and does not look at the HTTP status.
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
from dataclasses import dataclass
from multiprocessing.connection import (
    wait,  # uses poll(): select() takes no descriptor from 1,024 on
)
from typing import Any, BinaryIO

from disco_ds.config.data import LEAST_CACHE_GB, MAX_JITTER, RemoteSettings
from disco_ds.config.secrets import expand, redact
from disco_ds.data.images.broken import DataError
from disco_ds.data.sources.listing import PIPE

_TRANSIENT = {408, 416, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which another attempt may succeed."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_BLOCK = 2**20


class _Progress(threading.local):
    """The last integer of `count`: attempts and blocks that have arrived. A data worker shares it with its trainer.

    Each thread has its own: what is fetched ahead must not hide that the reader of the samples hangs.
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


@dataclass
class _Arrived:
    """The part of a shard that has arrived; the next attempt goes on from there if the server can."""

    file: BinaryIO
    size: int | None
    """Expected size in bytes; None: any up to the limit."""
    limit: int
    done: int = 0
    version: str | None = None
    """The strong ETag of the content, or else its date, by which the server tells whether it has changed."""

    def write(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            written = os.pwrite(self.file.fileno(), view, self.done)
            view, self.done = view[written:], self.done + written
            # Before more is written than may be: a body without a length could fill the disk.
            if self.size is not None and self.done > self.size:
                raise self.refuse(f"more than {self.size:,}")
            if self.done > self.limit:
                wrong = f"more than data.remote.cache_gb ({self.limit / 1e9:g} GB), which no shard may have"
                raise _FetchError(wrong, transient=False)

    def finish(self) -> None:
        if self.size is not None and self.done != self.size:
            raise self.refuse(f"{self.done:,} of {self.size:,}")
        self.file.truncate(self.done)

    def refuse(self, what: str) -> _FetchError:
        self.version = None
        return _FetchError(
            f"{what} bytes as its manifest counts them; if it was written anew, index it again"
        )


def fetch(
    url: str, name: str, file: BinaryIO, settings: RemoteSettings, size: int | None = None
) -> None:
    """Write a remote shard into an open file, in several attempts if necessary.

    Args:    name: for messages; size: expected size in bytes; None: any.
    Raises:  DataError naming the URL, without what may be secret in it, and the last failure.
    """
    arrived = _Arrived(file, size, int((settings.cache_gb or LEAST_CACHE_GB) * 1e9))
    for number in range(settings.tries):
        if number:
            # Random pauses, since many processes fail at once. They must not use the trainer's random generator.
            time.sleep(
                settings.pause_s(number) * random.SystemRandom().uniform(2 - MAX_JITTER, MAX_JITTER)
            )
        os.utime(
            file.fileno()
        )  # by which those who wait for this file see that it is being fetched
        progress.add()
        try:
            with closing(_read_url(url, settings.timeout_s, arrived)) as blocks:
                for block in blocks:
                    progress.add()
                    arrived.write(block)
            arrived.finish()
            return
        except _FetchError as error:
            progress.add()
            last = error
            if not error.transient:
                break
    raise DataError(
        f"shard {name} cannot be fetched from {describe(url)}: {redact(str(last))}; tries: {number + 1}"
    )


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
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
    )


def _read_url(url: str, timeout_s: float, arrived: _Arrived) -> Generator[bytes, None, None]:
    """The content of a URL or the output of a command, block by block, from `arrived.done` on, which is set to 0 where
    the source begins anew. Raises: _FetchError."""
    try:
        if url.startswith(PIPE):
            arrived.done = 0
            yield from _read_command(url.removeprefix(PIPE), timeout_s)
        else:
            yield from _read_http(url, timeout_s, arrived)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            arrived.version = None  # the next attempt asks for all
        reason = http.client.responses.get(error.code, "")
        raise _FetchError(
            f"HTTP status {error.code} {reason}".strip(), error.code in _TRANSIENT
        ) from None
    except OSError as error:
        raise _FetchError(str(getattr(error, "reason", error))) from None
    except (http.client.HTTPException, ValueError) as error:
        # The text of the error may contain the URL.
        raise _FetchError(type(error).__name__) from None


def _read_command(command: str, timeout_s: float) -> Generator[bytes, None, None]:
    # In a session of its own, to be ended with all that it has started.
    with subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    ) as process:
        assert process.stdout is not None
        try:
            block = b" "
            while block:
                if not wait([process.stdout.fileno()], timeout_s):
                    raise _FetchError(
                        f"the command wrote nothing for data.remote.timeout_s={timeout_s:g} s"
                    )
                if block := process.stdout.read(_BLOCK):
                    yield block
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise _FetchError(
                f"the command did not end within data.remote.timeout_s={timeout_s:g} s"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise _FetchError(f"the command ended with status {process.returncode}")


def _read_http(url: str, timeout_s: float, arrived: _Arrived) -> Generator[bytes, None, None]:
    parts = urllib.parse.urlsplit(url)
    netloc = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(expand(urllib.parse.urlunsplit(parts._replace(netloc=netloc))))
    # urllib does not use credentials in a URL. They must not follow a redirect to another host.
    if parts.username:
        user, password = (
            expand(urllib.parse.unquote(part or "")) for part in (parts.username, parts.password)
        )
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {pair}")
    if arrived.done and arrived.version:
        request.add_header("Range", f"bytes={arrived.done}-")
        request.add_header(
            "If-Range", arrived.version
        )  # another content is sent from its beginning, with status 200
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        if answer.status == http.client.PARTIAL_CONTENT:
            _check_range(answer.headers["Content-Range"], _find_version(answer.headers), arrived)
        else:
            arrived.done, arrived.version = 0, _find_version(answer.headers)
        done, length = 0, answer.headers["Content-Length"]
        while block := answer.read1(
            _BLOCK
        ):  # what has arrived; read() would wait for a whole block
            done += len(block)
            yield block
    # An early end of the connection reads as the end of the content.
    if length is not None and done < int(length):
        raise _FetchError(f"the connection ended after {done:,} of {int(length):,} bytes")


def _find_version(headers: http.client.HTTPMessage) -> str | None:
    tag = headers["ETag"]
    # RFC 9110, 13.1.5: a weak tag does not vouch for every byte.
    return tag if tag and not tag.startswith("W/") else headers["Last-Modified"]


def _check_range(text: str | None, version: str | None, arrived: _Arrived) -> None:
    """Raises: _FetchError unless an answer goes on, to the end, where the last one has ended, in the same content."""
    found = _RANGE.fullmatch(text or "")
    if found and int(found[1]) == arrived.done and version in (None, arrived.version):
        total = str(int(found[2]) + 1)
        if found[3] == "*" or found[3] == total == str(arrived.size or total):
            return
    arrived.version = None
    raise _FetchError(
        f"the server was asked for the bytes from {arrived.done:,} on, and sends other ones"
    )
