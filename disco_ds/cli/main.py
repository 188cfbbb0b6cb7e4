"""The command line: `disco-ds COMMAND ...`, the same as `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from disco_ds.cli.parser import COMMANDS, parse_args


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        Its exit code; see the function `run` of each command's module.
    """
    args = parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    # Outside of training, DeepSpeed would print that there is no GPU above the command's output.
    if args.command != "train":
        logging.getLogger("DeepSpeed").addFilter(
            lambda record: not record.msg.startswith("Setting accelerator to CPU")
        )
    module = COMMANDS[args.command].module
    # A dry run does not need the trainer, whose import takes seconds.
    if args.command == "train" and args.dry_run:
        module = "disco_ds.cli.dry_run"
    try:
        code: int = import_module(module).run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code
