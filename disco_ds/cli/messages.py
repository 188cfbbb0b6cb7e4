"""What commands say on stderr, and the exit codes they then return."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from contextlib import suppress

from disco_ds.config.secrets import redact


def set_up_logging() -> bool:
    """Show warnings of the first rank, and errors of all. Returns: whether this process is the first rank."""
    first = os.environ.get("RANK", "0") == "0"
    # DeepSpeed 0.19 calls torch's collectives by names that torch 2.14 has renamed: nothing that a user can change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    return first


def fail(error: Exception, code: int) -> int:
    """Print why a command that runs in one process ends. Returns: code."""
    print(f"error: {redact(str(error))}", file=sys.stderr, flush=True)
    return code


def fail_rank(error: object, code: int, speaks: bool = True) -> int:
    """Print why a rank ends, and on which host, if it is the one that speaks for others. Returns: code."""
    with suppress(OSError):  # of a terminal, or a `tee`, that is gone
        if speaks:
            print(f"error on {socket.gethostname()}: {redact(str(error))}", file=sys.stderr, flush=True)
    return code
