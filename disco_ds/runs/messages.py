"""Print the errors of commands on stderr, and configure which warnings are shown."""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import suppress

from disco_ds.config.secrets import redact


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
