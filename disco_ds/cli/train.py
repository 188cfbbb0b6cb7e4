"""`disco-ds train`: train a recipe. Under a launcher, every rank runs this command."""

from __future__ import annotations

import argparse
import os
import socket

from disco_ds.config import load_config
from disco_ds.distributed.comm import RendezvousError
from disco_ds.distributed.watchdog import die_with_launcher
from disco_ds.run import AGREED_ERRORS, exit_code, train_session
from disco_ds.runs.messages import fail_rank, set_up_logging, show
from disco_ds.training.loop import AskedToStopError
from disco_ds.training.out_of_memory import OutOfMemory


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: finished, or --resume auto found a finished run. 1: failed. 2: invalid
        settings or data, found before any work. 3: stopped by a signal, after saving.
    """
    set_up_logging()
    try:
        config = load_config(args.config, args.overrides)
    except ValueError as error:
        # The ranks are not connected yet, so one rank per host prints the error.
        return fail_rank(error, 2, speaks=os.environ.get("LOCAL_RANK", "0") == "0")
    # Otherwise this rank would keep training after its launcher has died.
    die_with_launcher()
    try:
        train_session(config, args.resume, args.allow_change, args.launch_id, report)
    except RendezvousError as error:
        return fail_rank(error, 1)
    except OutOfMemory as error:
        # If the error has an explanation, the rank has already printed it.
        return fail_rank(f"rank {os.environ['RANK']} is {error}", 1, speaks=not error.explanation)
    except AGREED_ERRORS as error:
        return exit_code(error)  # already reported
    return 0


def report(error: object) -> None:
    """Print an error of the run. If a signal requested the stop, the message is not labeled as an error."""
    host = socket.gethostname()
    show(error, host if isinstance(error, AskedToStopError) else f"error on {host}")
