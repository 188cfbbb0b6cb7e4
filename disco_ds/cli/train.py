"""`disco-ds train`, and what every rank of a launch runs: settings, session, loop, exit code."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from contextlib import ExitStack

from disco_ds.cli.arguments import describe_run, fail, parse_args
from disco_ds.config import Config, load_config
from disco_ds.distributed import comm
from disco_ds.distributed.agreement import check_agreement
from disco_ds.distributed.hostfile import count_ranks, refuse_launch
from disco_ds.distributed.slurm import adopt_slurm
from disco_ds.distributed.watchdog import die_with_launcher
from disco_ds.metrics.run_folder import mark_launch
from disco_ds.plan.out_of_memory import OutOfMemory, explained
from disco_ds.training.build import build
from disco_ds.training.loop import AskedToStopError, StopError, finish, train, wait_for_copies


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done; 1: all ranks stopped together; 2: a mistake in settings or data, told before any work;
    3: asked to stop by a signal, and saved."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    adopt_slurm()
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(args.config, args.overrides)
        if args.dry_run:
            print(describe_run(config, count_ranks(args.ranks, args.hostfile)))
            return 0
        refuse_launch()
    except ValueError as error:
        # Before the ranks know of each other: each host tells of its own mistake.
        return fail(error, os.environ.get("LOCAL_RANK", "0") == "0", code=2)
    die_with_launcher()
    try:
        return run_recipe(config, args, first)
    except OutOfMemory as error:
        return fail(RuntimeError(f"rank {os.environ['RANK']} is {error}"), not error.told, code=1)


def run_recipe(config: Config, args: Namespace, first: bool) -> int:
    """Build, train and finish. Returns: the exit code that all ranks agree on. Raises: OutOfMemory, on some."""
    with comm.session(config.timeout_s), ExitStack() as stack:
        try:
            check_agreement({**config.model_dump(mode="json"), "--resume": args.resume})
            with explained(config, lambda: "building"):
                run = build(config, args.resume, stack, unattended=args.launch_word is not None)
        except ValueError as error:
            return fail(error, first, code=2)
        if first:
            print(f"{run.folder}: {config.describe(comm.size())}", flush=True)
            mark_launch(run.folder, args.launch_word)
        code = 0
        try:
            with explained(config, lambda: run.heart.place.doing):
                train(run)
                finish(run)
        except (StopError, FloatingPointError, comm.AgreedError) as error:
            code = fail(error, first, code=1)
        except AskedToStopError as error:
            code = fail(error, first, code=3)
        wait_for_copies(run)
        if first:
            mark_launch(run.folder, args.launch_word, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
