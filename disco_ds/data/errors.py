"""Exceptions for data errors, and the context manager that turns any error in a sample's content into BrokenSample.

Broken samples are skipped. Samples that are too large are rejected by their size, before they are read or decoded.
Whether a sample is skipped must not depend on how much time or memory it takes, because the data order must be the same
on every machine.
"""

import errno
import logging
import re
import stat
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from disco_ds.names import shorten

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_BYTES = 2**31 - 4096
"""Maximum size in bytes of a tar member or file, because one read returns no more than this on Linux."""
SPARE_BROKEN = 16
"""Number of broken samples that are tolerated in addition to the fraction data.max_broken, so that a few broken samples
at the start cannot stop a run."""
_MAX_TEXT = 500
"""Maximum length of an error message in a report. The message may quote arbitrary content of the sample."""
_MAX_NAME = 200
"""Maximum length of a sample's name in a report."""
NUM_NAMED = 5
"""Maximum number of broken samples or damaged shards that an error message lists."""
_MAX_PAUSE_S = 8.0
_DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN}
"""Errors of a failing disk or network file system. The same read may succeed later."""


class BrokenSample(Exception):  # noqa: N818 - one sample is skipped, the run does not fail
    """A sample cannot be used and is skipped. The message is the reason."""


class DroppedSample(BrokenSample):
    """A sample that is not damaged is left out. It does not count as broken.

    Either the recipe excludes the sample, or the shard has fewer samples than its manifest says.
    """


class LostSample(BrokenSample):
    """A damaged shard ends before the sample. The shard counts as damaged, and its lost samples as dropped."""


class DataError(Exception):
    """No more data can be read.

    Possible reasons: too many samples are broken, a shard cannot be fetched, or a worker failed, died or stopped
    responding.
    """


class CacheFullError(DataError):
    """The cache has no space for another shard, because all cached shards are in use."""


@contextmanager
def breaks_sample(*others: type[Exception]) -> Iterator[None]:
    """Turn any exception that a sample's content causes into BrokenSample.

    Args:
        *others: Exception types to let through because the sample's content does not cause them, such as OSError while
            a shard is being read. BrokenSample, DataError and MemoryError are always let through. MemoryError is let
            through because it depends on the machine, not on the sample.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (BrokenSample, DataError, MemoryError, *others)):
            raise
        # Remove the memory addresses of objects, because they differ from run to run.
        reason = re.sub(r" at 0x[0-9a-f]+", "", str(error))
        raise BrokenSample(f"{type(error).__name__}: {printable(reason)}") from error


def name_broken(
    name: Callable[[int, int], str], shard: int, entry: int, error: BrokenSample
) -> str:
    """Return one line of the form `shard/key: reason`. All lost samples of a damaged shard have the same line.

    Args:
        name: Function that returns the sample's name, given shard and entry. It may fail, because it reads the shard.
        shard: Number of the shard.
        entry: Position of the sample in the shard.
        error: Why the sample is broken.

    Raises:
        OSError: If the shard itself cannot be read.
    """
    entry = 0 if isinstance(error, LostSample) else entry
    try:
        with breaks_sample(OSError):
            known = name(shard, entry)
    except BrokenSample:
        known = f"shard {shard}/entry {entry}"
    return f"{printable(known, _MAX_NAME)}: {printable(str(error))}"


def refuse_broken(
    what: str,
    broken: Collection[str],
    num_read: int,
    max_broken: float,
    spare: int = SPARE_BROKEN,
    cause: BaseException | None = None,
) -> None:
    """Raise DataError if too many samples are broken, or too many shards are damaged.

    Args:
        what: "samples are broken" or "shards are damaged".
        broken: Describes each of them, `shard/key: reason`.
        num_read: Number of samples or shards that were read.
        max_broken: Largest fraction of them that may be broken (data.max_broken), in addition to `spare`.
        spare: Number of them that may be broken in any case.
        cause: The exception from disco_ds or from the user's code that made the last sample broken, if any.
    """
    if len(broken) > spare + max_broken * num_read:
        trace = "".join(["\n", *traceback.format_exception(cause)]) if cause else ""
        raise DataError(
            f"{len(broken)} of {num_read} {what}; the limit is {spare} plus the fraction data.max_broken="
            f"{max_broken:g} of those read. The last ones: {'; '.join(list(broken)[-NUM_NAMED:])}. Compare "
            "data.image_key and data.captions with the fields of the samples, find damaged shards with "
            f"`disco-ds index SHARDS --check --full`, or raise data.max_broken{trace}"
        )


def printable(text: str, most: int = _MAX_TEXT) -> str:
    """Shorten text to about `most` characters, and escape characters that cannot be printed or encoded in UTF-8."""
    short = shorten(text, most)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def read_patiently(read: Callable[..., T], patience_s: float, *args: Any) -> T:
    """Return read(*args). If it raises OSError, retry with growing pauses for at most `patience_s` seconds.

    Raises:
        OSError: The error of the last attempt.
    """
    end, pause_s = time.monotonic() + patience_s, 0.5
    while True:
        try:
            return read(*args)
        except OSError as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s == 0.5:
                logger.warning(
                    "%s; retrying for up to %g s (a tenth of timeout_s)", error, patience_s
                )
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def read_regular(path: Path) -> bytes:
    """Read a file whose path is part of a sample.

    Raises:
        BrokenSample: If the file does not exist, is too large, or is not a regular file. Reading a device or a named
            pipe might never end.
        OSError: If the disk fails, which may be temporary.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
            with open(path, "rb") as file:
                return file.read(status.st_size)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in _DISK_ERRORS:
            raise
        raise BrokenSample(f"{path} cannot be read: {error}") from None
    raise BrokenSample(f"{path} is not a regular file of at most {MAX_BYTES:,} bytes")
