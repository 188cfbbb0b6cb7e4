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
from typing import Any, BinaryIO

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


def fetch(
    url: str, name: str, file: BinaryIO, settings: RemoteSettings, size: int | None = None
) -> None:
    """Download a remote shard into an open file, in several attempts if necessary.

    Each attempt resumes where the last one stopped, if the server supports it.

    Args:
        url: Address of the shard, or `pipe:COMMAND`.
        name: Name of the shard in messages.
        file: Unbuffered file to write to.
        settings: Number of attempts, timeout and size limit.
        size: Expected size in bytes; None allows any size up to the limit.

    Raises:
        DataError: If all attempts fail. The message contains the URL, without secrets, and the last failure.
    """
    limit_gb = settings.cache_gb or LEAST_CACHE_GB
    done = 0  # bytes that have arrived
    # The content's strong ETag, with which the next attempt can resume. Without an ETag, it must start over.
    version: str | None = None
    for number in range(settings.tries):
        pause(number, settings)
        # Other processes may be waiting for this file. The new file time shows them that the download is still running.
        os.utime(file.fileno())
        progress.add()
        if version is None:
            done = 0
        try:
            if url.startswith(PIPE):
                blocks = _read_command(url.removeprefix(PIPE), settings.timeout_s)
            else:
                version, blocks = read_blocks(url, settings.timeout_s, done, version)
            with closing(blocks):
                for block in blocks:
                    progress.add()
                    _write(file, block, done)
                    done += len(block)
                    # Content without a stated length could fill the disk.
                    if done > (size or limit_gb * 1e9):
                        break
            if size not in (None, done):
                raise ChangedError(
                    f"{done:,} bytes arrived, but the manifest says {size:,}; if the shard was replaced, "
                    "index it again"
                )
            if size is None and done > limit_gb * 1e9:
                most = f"the limit for a shard, data.remote.cache_gb ({limit_gb:g} GB)"
                raise ChangedError(f"it is larger than {most}", transient=False)
            file.truncate(done)
            return
        except StoreError as error:
            progress.add()
            last = error
            if isinstance(error, ChangedError):
                version = None
            if not error.transient:
                break
    raise DataError(
        f"shard {name} cannot be fetched from {describe(url)}: {last}; tries: {number + 1}"
    )


def _write(file: BinaryIO, block: Any, start: int) -> None:
    """Write a block at byte `start` of an unbuffered file."""
    view = memoryview(block)
    while view:
        written = os.pwrite(file.fileno(), view, start)
        view, start = view[written:], start + written


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
