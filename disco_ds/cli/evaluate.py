"""`disco-ds eval`, alone or on every rank of a launcher: the table and the JSON file of run.py's results."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from disco_ds.cli.messages import fail_rank, set_up_logging
from disco_ds.config.ds_config import precision
from disco_ds.config.text_file import write_text
from disco_ds.distributed.comm import RendezvousError
from disco_ds.eval import Result, describe
from disco_ds.launch.slurm import adopt_slurm
from disco_ds.launch.watchdog import die_with_launcher
from disco_ds.run import RefusedError, evaluate_session, evaluation_settings


def run(args: argparse.Namespace) -> int:
    """Exit code 0: done; 1: all ranks stopped together; 2: a mistake in settings or data, found before any work."""
    adopt_slurm()
    first = set_up_logging()
    # Its notices would stand between the lines of the table.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        config = evaluation_settings(args.model, args.overrides, args.config, args.weights)
        if args.json and not args.json.parent.is_dir():
            raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    except ValueError as error:
        return fail_rank(error, 2, speaks=first)
    die_with_launcher()
    if first and (kind := precision(config.deepspeed)) != "fp32":
        print(f"Evaluated in {kind}, as the run trains; with deepspeed={{}} in fp32.", flush=True)

    def publish(results: list[Result]) -> None:
        if first:
            print(describe(results), flush=True)
        if first and args.json:
            write_json(args.json, args.model, results)

    try:
        outcome = evaluate_session(config, args.model, args.weights, publish)
    except RendezvousError as error:
        return fail_rank(error, 1)
    if isinstance(outcome, Exception):
        return fail_rank(outcome, 2 if isinstance(outcome, RefusedError) else 1, speaks=first)
    return 0


def write_json(path: Path, model: str, results: Sequence[Result]) -> None:
    """Write the metrics of the printed table to a JSON file, unrounded."""
    sets = [
        {"kind": result.kind, "name": result.name} | result.values | result.counts
        for result in results
    ]
    write_text(path, json.dumps({"model": model, "sets": sets}, indent=1) + "\n")
