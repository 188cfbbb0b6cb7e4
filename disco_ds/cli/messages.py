"""Errors and warnings of commands on stderr, and the exit codes that go with them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from contextlib import suppress

from disco_ds.config.secrets import redact


def set_up_logging() -> bool:
    """Show warnings of the first rank and errors of all ranks.

    Returns:
        Whether this process is the first rank.
    """
    first = os.environ.get("RANK", "0") == "0"
    # DeepSpeed 0.19 uses names of collectives that torch 2.14 has deprecated. Users cannot change
    # that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.basicConfig(
        level=logging.WARNING if first else logging.ERROR,
        format="%(levelname)s %(name)s: %(message)s",
    )
    return first


def fail(error: Exception, code: int) -> int:
    """Print the error of a command that runs in one process.

    Returns:
        `code`.
    """
    print(f"error: {redact(str(error))}", file=sys.stderr, flush=True)
    return code


def fail_rank(error: object, code: int, speaks: bool = True) -> int:
    """Print the error of a rank with its host.

    Args:
        error: The error.
        code: Exit code.
        speaks: Whether this rank prints; others report the same error.

    Returns:
        `code`.
    """
    with suppress(OSError):  # the terminal, or a `tee`, may be gone
        if speaks:
            print(
                f"error on {socket.gethostname()}: {redact(str(error))}",
                file=sys.stderr,
                flush=True,
            )
    return code
