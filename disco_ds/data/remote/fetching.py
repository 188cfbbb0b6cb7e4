"""Downloads of remote shards from URLs (stores.py), or from the output of shell commands (`pipe:COMMAND`).

Alternatives considered: obstore's own retries, which report no sign of life between attempts. webdataset's gopen
ignores some failed commands and does not look at the HTTP status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress

# Uses poll(), because select() does not accept file descriptors above 1,023.
from multiprocessing.connection import wait
from typing import Any, BinaryIO

from disco_ds.config.data import LEAST_CACHE_GB, PIPE, RemoteSettings
from disco_ds.data.images.broken import DataError
from disco_ds.data.remote import stores
from disco_ds.data.remote.stores import ChangedError, StoreError, pause

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


class _Download:
    """The part of a shard that has arrived. The next attempt resumes there if the server supports it."""

    def __init__(self, file: BinaryIO, size: int | None, limit: int) -> None:
        self._file = file
        self._size = size
        self._limit = limit
        self.done = 0
        """Bytes that have arrived."""
        self.version: str | None = None
        """The strong ETag of the content, from which the server sees whether the content changed."""

    def write(self, block: Any) -> None:
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

    def _refuse(self) -> StoreError:
        """Return the error for content of the wrong size."""
        self.version = None
        if self._size is None:
            most = f"data.remote.cache_gb, the limit for a shard ({self._limit / 1e9:g} GB)"
            return StoreError(f"it has more bytes than {most}", transient=False)
        return StoreError(
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
        pause(number, settings)
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


def describe(url: str) -> str:
    """Return a URL without secrets, for messages. Commands are hidden: any part may be secret."""
    return "its pipe:" if url.startswith(PIPE) else stores.describe(url)


def _read(url: str, timeout_s: float, download: _Download) -> Generator[Any, None, None]:
    """Read a URL or the output of a command block by block, from `download.done` on.

    A source that cannot resume sets `download.done` to 0 and starts from the beginning.

    Raises:
        StoreError: If the attempt fails.
    """
    if url.startswith(PIPE):
        download.done = 0
        yield from _read_command(url.removeprefix(PIPE), timeout_s)
        return
    if download.version is None:
        download.done = 0
    try:
        download.version, blocks = stores.read_blocks(
            url, timeout_s, download.done, download.version
        )
    except ChangedError:
        # The next attempt requests the whole shard.
        download.version = None
        raise
    yield from blocks


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
