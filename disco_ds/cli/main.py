"""The command line: `disco-ds COMMAND ...`, or `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from disco_ds.cli.parser import parse_args
from disco_ds.distributed.launcher import adopt_slurm

MODULES = {
    "eval": "disco_ds.cli.evaluate",
    "launch": "disco_ds.launch.launcher",
}
"""Command -> its module. The module of a command that is not listed is in disco_ds.cli and has the command's name."""
RANK_COMMANDS = {"train", "launch", "eval", "doctor"}
"""Commands that report user errors themselves. Their other errors are shown with a traceback."""


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code of the command: 0 for success, 2 for invalid arguments, 130 if interrupted. `run`
        in the command's module documents its other exit codes.
    """
    args = parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    # DeepSpeed's notices, for example that there is no GPU, would mix with the command's output.
    if args.command != "train":
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    command = args.command.replace("-", "_")
    # A dry run does not need the trainer, whose import takes seconds.
    if command == "train" and args.dry_run:
        command = "dry_run"
    if command in ("train", "eval", "doctor", "embed"):
        try:
            adopt_slurm()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    try:
        module = import_module(MODULES.get(command, f"disco_ds.cli.{command}"))
        code: int = module.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if command in RANK_COMMANDS:
            raise
        # Not imported at the top: the module imports libraries that --help does not need.
        from disco_ds.runs.messages import show

        show(error)
        return 2
    return code
