"""`disco-ds train`, and what every rank of a launch runs: the messages, exit codes and launch marks around run.py."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from disco_ds.cli.messages import fail_rank, set_up_logging
from disco_ds.config import load_config
from disco_ds.config.secrets import redact
from disco_ds.distributed import comm
from disco_ds.launch.hostfile import refuse_launch
from disco_ds.launch.slurm import adopt_slurm
from disco_ds.launch.watchdog import die_with_launcher
from disco_ds.run import Observer, RefusedError, train_session
from disco_ds.runs.run_folder import mark_launch
from disco_ds.runs.run_log import note, say
from disco_ds.training.build import Run
from disco_ds.training.loop import AskedToStopError
from disco_ds.training.out_of_memory import OutOfMemory


def run(args: argparse.Namespace) -> int:
    """Exit code 0: done, or done before and --resume auto; 1: all ranks stopped together; 2: a mistake in settings or
    data, found before any work; 3: asked to stop by a signal, and saved."""
    adopt_slurm()
    first = set_up_logging()
    try:
        config = load_config(args.config, args.overrides)
        refuse_launch()
    except ValueError as error:
        # The ranks do not know of each other yet: each host reports its own mistake.
        return fail_rank(error, 2, speaks=os.environ.get("LOCAL_RANK", "0") == "0")
    die_with_launcher()  # or this rank would train on without it
    try:
        outcome = train_session(
            config, args.resume, make_observer(args.launch_id, first), args.allow_change
        )
    except comm.RendezvousError as error:
        return fail_rank(error, 1)
    except OutOfMemory as error:
        # The rank with the explanation has printed it already.
        return fail_rank(f"rank {os.environ['RANK']} is {error}", 1, speaks=not error.explanation)
    return exit_code(outcome) if isinstance(outcome, Exception) else 0


def make_observer(launch_id: str | None, first: bool) -> Observer:
    """Messages of the first rank, and its marks for `disco-ds launch`, if that has started the run."""

    def started(run: Run) -> None:
        if first:
            resumed = f"goes on after step {run.first_step:,}, " if run.first_step else ""
            say(f"{run.folder}: {resumed}{run.config.describe(comm.size())}")
            mark_launch(run.folder, launch_id)

    def ended(run: Run, error: Exception | None) -> None:
        if first:
            mark_launch(run.folder, launch_id, exit_code(error))

    def failed(error: Exception) -> None:
        if first:
            note(redact(str(error)))
        if not isinstance(error, AskedToStopError):
            fail_rank(error, code=1, speaks=first)
        elif first:
            with suppress(OSError):
                print(f"{socket.gethostname()}: {error}", file=sys.stderr, flush=True)

    def finished(folder: Path) -> None:
        if first:
            say(f"{folder} has done all its steps")
            mark_launch(folder, launch_id, 0)

    return Observer(
        started=started,
        finished=finished,
        failed=failed,
        ended=ended,
        explain=partial(fail_rank, code=1),
        unattended=launch_id is not None,
    )


def exit_code(error: Exception | None) -> int:
    if error is None:
        return 0
    return 2 if isinstance(error, RefusedError) else 3 if isinstance(error, AskedToStopError) else 1
