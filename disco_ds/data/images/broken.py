"""What a broken sample costs: itself. Its exceptions, and the one place where whatever its content raises becomes one.

What is too large, too long or too deep is refused by its size, before anything is spent on it: never by the time or the
memory that it took, since the data order must be the same on every machine.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_BYTES = 2**31 - 4096
"""Largest member or file that is read: what Linux returns of one read."""
_MAX_TEXT = 500
"""Characters of a message that come from a sample, which may have anything in its names."""
_MAX_NAME = 200


class BrokenSample(Exception):  # noqa: N818 - an event that costs one sample, not an error of the run
    """A sample that cannot be used, with the reason; it is skipped."""


class DataError(Exception):
    """No further data can be read: too many samples are broken, a shard cannot be fetched, or a worker has failed, died
    or stopped responding."""


class CacheFullError(DataError):
    """There is no space for another shard: all cached ones are in use."""


@contextmanager
def breaks_sample(*others: type[Exception]) -> Iterator[None]:
    """Turn whatever a sample's content raises into BrokenSample, with the place in the code.

    Args:    others: exceptions that are not the content's and pass: OSError where the shard itself is being read.
             DataError always does, and MemoryError, which depends on the machine.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (BrokenSample, DataError, MemoryError, *others)):
            raise
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = (
            f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
            if trace is not None
            else ""
        )
        raise BrokenSample(f"{type(error).__name__}: {printable(str(error))}{where}") from error


def name_broken(
    name: Callable[[int, int], str], shard: int, entry: int, error: BrokenSample
) -> str:
    """`shard/key: reason`, on one line.

    Args:    name: of a sample by (shard, entry); it may fail, since it reads what is broken.
    Raises:  OSError if the shard itself cannot be read.
    """
    try:
        with breaks_sample(OSError):
            known = name(shard, entry)
    except BrokenSample:
        known = f"shard {shard}/entry {entry}"
    return f"{printable(known, _MAX_NAME)}: {printable(str(error))}"


def printable(text: str, most: int = _MAX_TEXT) -> str:
    """The text with control characters and what UTF-8 cannot encode as escapes, shortened to `most` characters."""
    short = text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def read_patiently(read: Callable[[], T], patience_s: float) -> T:
    """Call `read`; while it raises OSError, again for so many seconds, with growing pauses. Raises: the last one."""
    end, pause_s = time.monotonic() + patience_s, 0.5
    while True:
        try:
            return read()
        except OSError as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s == 0.5:
                logger.warning("%s; it is tried again for data.patience_s=%g s", error, patience_s)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 8.0)


def read_regular(path: Path) -> bytes:
    """The content of a file that a sample names.

    Raises:  BrokenSample for a device, a named pipe and the like, which could be endless, and for a file that is too
             large; OSError, ValueError for a path that cannot be opened.
    """
    # A device may act when it is opened, so its type is looked at before.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise BrokenSample(f"{path} is not a regular file")
    # Should a named pipe take its place now, O_NONBLOCK keeps the opening from waiting for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise BrokenSample(f"{path} is not a regular file of at most {MAX_BYTES:,} bytes")
        return file.read(found.st_size)
