"""Downloads of remote shards from URLs (stores.py), or from the output of shell commands (`pipe:COMMAND`).

Alternatives considered: obstore's retries (the worker would appear to hang during them) and webdataset's gopen (it
ignores some failed commands and does not check the HTTP status).
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress

# `wait` uses poll(). select() would not accept file descriptors above 1,023.
from multiprocessing.connection import wait
from typing import Any, BinaryIO, NoReturn

from disco_ds.config.data import LEAST_CACHE_GB, PIPE, RemoteSettings
from disco_ds.data.errors import DataError
from disco_ds.data.remote.stores import ChangedError, StoreError, describe, pause, read_blocks

_BLOCK = 2**20


class _Progress(threading.local):
    """A count that grows with every sign of progress, such as a received block. It shows that a data worker is alive.

    The count is the last integer of `count`, in memory that the worker shares with the trainer. Other threads of the
    worker have separate counts, so that the trainer notices a hung reading thread even while other threads prefetch.
    """

    def __init__(self) -> None:
        self.count: Any = [0]

    def add(self) -> None:
        self.count[-1] += 1


progress = _Progress()


class _Download:
    """A download of a shard into a file. Each attempt resumes where the last one stopped, if the server supports it.

    Args:
        url: Address of the shard, or `pipe:COMMAND`.
        file: Unbuffered file to write to.
        settings: Timeout and size limit.
        size: Expected size in bytes; None allows any size up to the limit.
    """

    def __init__(
        self, url: str, file: BinaryIO, settings: RemoteSettings, size: int | None
    ) -> None:
        self._url = url
        self._file = file
        self._timeout_s = settings.timeout_s
        self._size = size
        self._limit = int((settings.cache_gb or LEAST_CACHE_GB) * 1e9)
        self._done = 0
        """Bytes that have arrived."""
        self._version: str | None = None
        """The content's strong ETag, with which the next attempt can resume. If None, that attempt must start over."""

    def attempt(self) -> None:
        """Fetch the shard, or the rest of it.

        Raises:
            StoreError: If the attempt fails.
        """
        if self._version is None:
            self._done = 0
        with closing(self._open()) as blocks:
            for block in blocks:
                progress.add()
                self._write(block)
        if self._size not in (None, self._done):
            self._refuse()
        self._file.truncate(self._done)

    def _open(self) -> Generator[Any, None, None]:
        """Request the content from byte `_done` on, and return its blocks."""
        if self._url.startswith(PIPE):
            return _read_command(self._url.removeprefix(PIPE), self._timeout_s)
        try:
            self._version, blocks = read_blocks(
                self._url, self._timeout_s, self._done, self._version
            )
        except ChangedError:
            self._version = None
            raise
        return blocks

    def _write(self, block: Any) -> None:
        view = memoryview(block)
        while view:
            written = os.pwrite(self._file.fileno(), view, self._done)
            view, self._done = view[written:], self._done + written
            # Check the size after every write, because content without a stated length could fill the disk.
            if self._done > (self._size or self._limit):
                self._refuse()

    def _refuse(self) -> NoReturn:
        """Raise the error for content of the wrong size."""
        self._version = None
        if self._size is None:
            most = f"the limit for a shard, data.remote.cache_gb ({self._limit / 1e9:g} GB)"
            raise StoreError(f"it is larger than {most}", transient=False)
        raise StoreError(
            f"{self._done:,} bytes arrived, but the manifest says {self._size:,}; if the shard was replaced, "
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
        size: Expected size in bytes; None allows any size up to the limit.

    Raises:
        DataError: If all attempts fail. The message contains the URL, without secrets, and the last failure.
    """
    download = _Download(url, file, settings, size)
    for number in range(settings.tries):
        pause(number, settings)
        # Other processes may be waiting for this file. The new file time shows them that the download is still running.
        os.utime(file.fileno())
        progress.add()
        try:
            download.attempt()
            return
        except StoreError as error:
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


def _read_command(command: str, timeout_s: float) -> Generator[bytes, None, None]:
    # The command gets its own session, so that it can be killed with all processes that it has started.
    with subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    ) as process:
        assert process.stdout is not None
        limit = f"{timeout_s:g} s (a tenth of timeout_s)"
        try:
            block = b" "
            while block:
                if not wait([process.stdout.fileno()], timeout_s):
                    raise StoreError(f"the command wrote nothing for {limit}")
                if block := process.stdout.read(_BLOCK):
                    yield block
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StoreError(f"the command did not exit within {limit}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise StoreError(f"the command exited with status {process.returncode}")
