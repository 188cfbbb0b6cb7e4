"""Print and log messages, print the errors of commands, and configure which warnings are shown.

Messages of rank 0 are printed, and written with timestamps to log.txt in the run folder, together with warnings and
errors. A resumed run appends to the same file.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from disco_ds.config.secrets import redact

LOG = "log.txt"
_messages = logging.getLogger("disco_ds.said")
_messages.setLevel(logging.INFO)
_messages.propagate = False  # because the messages are printed already
_messages.addHandler(logging.NullHandler())  # used until there is a run folder


def say(text: str) -> None:
    """Print and log a message. A full disk, or a terminal that is closed or supports only ASCII, raises no error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError):
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    _messages.info(text)


def log_only(text: str, level: int = logging.ERROR) -> None:
    """Log a message that is printed elsewhere, such as an error, without secrets."""
    _messages.log(level, redact(text))


class _Handler(logging.FileHandler):
    """A file handler that drops a line if it cannot be written, for example because the disk is full."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the file may fail to open
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Ignore write errors."""


@contextmanager
def write_log(folder: Path) -> Iterator[None]:
    """Write messages to log.txt in the run folder while the block runs. Rank 0 only."""
    handler = _Handler(folder / LOG, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = (_messages, logging.getLogger())
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def set_up_logging() -> bool:
    """Show warnings of the first rank and errors of all ranks.

    Returns:
        Whether this process is the first rank.
    """
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.WARNING if first else logging.ERROR,
        format="%(levelname)s %(name)s: %(message)s",
    )
    return first


def show(text: object, label: str = "error") -> None:
    """Print `LABEL: TEXT` on stderr, without secrets."""
    with suppress(OSError):  # the terminal, or a `tee`, may be gone
        print(f"{label}: {redact(str(text))}", file=sys.stderr, flush=True)


def fail_rank(error: object, code: int, speaks: bool = True) -> int:
    """Print the error of this rank together with its host name.

    Args:
        error: The error.
        code: Exit code.
        speaks: Whether this rank prints; False if another rank reports the same error.

    Returns:
        `code`.
    """
    if speaks:
        show(error, f"error on {socket.gethostname()}")
    return code
