"""`disco-ds eval`: evaluate a model and print a table of results. Runs alone or on every rank of a launcher."""

from __future__ import annotations

import argparse
import json

from disco_ds.config.text_file import write_text
from disco_ds.distributed.comm import AgreedError, RefusedError, RendezvousError
from disco_ds.distributed.launcher import die_with_launcher
from disco_ds.eval import describe
from disco_ds.run import evaluate_run
from disco_ds.runs.messages import fail_rank, set_up_logging


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: done. 1: failed. 2: invalid settings, data or weights, found before any work.
    """
    first = set_up_logging()
    die_with_launcher()
    try:
        if args.json and not args.json.parent.is_dir():
            raise RefusedError(f"--json {args.json}: there is no folder {args.json.parent}")
        results = evaluate_run(args.model, args.overrides, args.config, args.weights, args.ema)
        if first:
            print(describe(results), flush=True)
            if args.json:
                sets = [
                    {"kind": result.kind, "name": result.name} | result.values | result.counts
                    for result in results
                ]
                write_text(
                    args.json, json.dumps({"model": args.model, "sets": sets}, indent=1) + "\n"
                )
    except RendezvousError as error:
        return fail_rank(error, 1)
    except AgreedError as error:
        return fail_rank(error, error.exit_code, speaks=first)
    except OSError as error:
        return fail_rank(error, 1)
    return 0
