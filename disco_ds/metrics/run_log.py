"""What the first rank says: on the terminal, and with the time in log.txt of the run folder, with warnings and errors.

A resumed run goes on in the same file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG = "log.txt"
_said = logging.getLogger("disco_ds.said")
_said.setLevel(logging.INFO)
_said.propagate = False  # the terminal has it already
_said.addHandler(logging.NullHandler())  # where there is no run folder yet


def say(text: str) -> None:
    """Print a text and log it; neither a full disk nor a terminal that is gone is an error."""
    with suppress(OSError):
        print(text, flush=True)
    _said.info(text)


def note(text: str) -> None:
    """Log a text that has been said otherwise, such as an error."""
    _said.error(text)


class _Handler(logging.FileHandler):
    """A full disk costs lines, not the run."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # of opening the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Nothing is said of a write that fails."""


@contextmanager
def write_log(folder: Path) -> Iterator[None]:
    """Write log.txt of a run folder in the block; the first rank alone does. The file begins with the first line."""
    handler = _Handler(folder / LOG, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = (_said, logging.getLogger())
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()
