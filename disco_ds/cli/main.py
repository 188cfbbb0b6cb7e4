"""The command line: `disco-ds COMMAND ...`, the same as `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from disco_ds.cli.parser import COMMANDS, parse_args


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns: its exit code, which the function `run` of each command's module describes."""
    args = parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    if args.command != "train":  # DeepSpeed would say above the command's table that there is no GPU
        logging.getLogger("DeepSpeed").addFilter(lambda record: not record.msg.startswith("Setting accelerator to CPU"))
    # A dry run prints settings, for which the trainer and open_clip need not be imported.
    dry = args.command == "train" and args.dry_run
    try:
        code: int = import_module("disco_ds.cli.dry_run" if dry else COMMANDS[args.command].module).run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code
