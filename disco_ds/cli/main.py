"""The command line: `disco-ds COMMAND ...`, or `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from disco_ds.cli.parser import parse_args

RANK_COMMANDS = {"train", "launch", "evaluate", "doctor"}
"""They report mistakes themselves. Any other error of theirs needs a traceback."""


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        Its exit code: 0 for success, 2 for invalid arguments, 130 if interrupted, and others as
        documented by `run` of the command's module.
    """
    args = parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    # DeepSpeed's notices, for example that there is no GPU, would mix with the command's output.
    if args.command != "train":
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    module = "evaluate" if args.command == "eval" else args.command
    # A dry run does not need the trainer, whose import takes seconds.
    if args.command == "train" and args.dry_run:
        module = "dry_run"
    try:
        code: int = import_module(f"disco_ds.cli.{module}").run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if module in RANK_COMMANDS:
            raise
        # Not at the top: it imports libraries, which --help does not need.
        from disco_ds.cli.messages import show

        show(error)
        return 2
    return code
