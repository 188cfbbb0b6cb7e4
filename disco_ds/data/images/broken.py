"""Broken samples are skipped: the exceptions, and the one place that turns any error in a sample's content into one.

Samples that are too large are refused by their size, before anything is spent on them. Time and memory that a sample
takes must not decide, because the data order must be the same on every machine.
"""

from __future__ import annotations

import logging
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_BYTES = 2**31 - 4096
"""Size of the largest member or file: the most that one read returns on Linux."""
_MAX_TEXT = 500
"""Maximum length of an error message in a report; it may contain anything from the sample."""
_MAX_NAME = 200
"""Maximum length of a sample's name in a report."""
_MAX_PAUSE_S = 8.0


class BrokenSample(Exception):  # noqa: N818 - an event that costs one sample, not an error of the run
    """A sample cannot be used, for the reason given; it is skipped."""


class DataError(Exception):
    """No more data can be read.

    Too many samples are broken, a shard cannot be fetched, or a worker failed, died or stopped responding.
    """


class CacheFullError(DataError):
    """There is no space for another shard: all cached ones are in use."""


@contextmanager
def breaks_sample(*others: type[Exception]) -> Iterator[None]:
    """Turn any exception that a sample's content causes into BrokenSample.

    Args:
        *others: Exceptions that pass because the content does not cause them: OSError while a shard is being read.
            DataError always passes, and so does MemoryError, which depends on the machine.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (BrokenSample, DataError, MemoryError, *others)):
            raise
        # Addresses of objects differ from run to run.
        reason = re.sub(r" at 0x[0-9a-f]+", "", str(error))
        raise BrokenSample(f"{type(error).__name__}: {printable(reason)}") from error


def name_broken(
    name: Callable[[int, int], str], shard: int, entry: int, error: BrokenSample
) -> str:
    """Return `shard/key: reason`, on one line.

    Args:
        name: Returns the name of the sample (shard, entry). It may fail, since it reads what is broken.
        shard: Number of the shard.
        entry: Position of the sample in it.
        error: The reason.

    Raises:
        OSError: If the shard itself cannot be read.
    """
    try:
        with breaks_sample(OSError):
            known = name(shard, entry)
    except BrokenSample:
        known = f"shard {shard}/entry {entry}"
    return f"{printable(known, _MAX_NAME)}: {printable(str(error))}"


def printable(text: str, most: int = _MAX_TEXT) -> str:
    """Shorten a text to about `most` characters, and escape control characters and what UTF-8 cannot encode."""
    short = text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def read_patiently(read: Callable[[], T], patience_s: float) -> T:
    """Call `read`, and repeat it with growing pauses while it raises OSError, for at most `patience_s` seconds.

    Raises:
        OSError: The last one.
    """
    end, pause_s = time.monotonic() + patience_s, 0.5
    while True:
        try:
            return read()
        except OSError as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s == 0.5:
                logger.warning("%s; retrying for data.retry_s=%g s", error, patience_s)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def read_regular(path: Path) -> bytes:
    """Read a file that a sample names.

    Raises:
        BrokenSample: If the file cannot be read, is too large, or is not a regular file: a device or a named pipe could
            be endless.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
            with open(path, "rb") as file:
                return file.read(status.st_size)
    except (OSError, ValueError) as error:
        raise BrokenSample(f"{path} cannot be read: {error}") from None
    raise BrokenSample(f"{path} is not a regular file of at most {MAX_BYTES:,} bytes")
