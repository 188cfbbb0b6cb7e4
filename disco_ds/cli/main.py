"""The command line: `disco-ds COMMAND ...`, or `python -m disco_ds COMMAND ...`."""

import logging
import sys
from pkgutil import resolve_name

from disco_ds.cli.options import COMMANDS, parse_args
from disco_ds.distributed.launcher import adopt_slurm

RANK_COMMANDS = {"train", "launch", "eval", "doctor"}
"""Commands that report user errors themselves. Their other errors are shown with a traceback."""


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code of the command: 0 for success, 2 for invalid arguments, 130 if interrupted. The command's help
        text lists its other exit codes.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = parse_args(argv)
    command = argv[0]
    function = COMMANDS[command][1]
    if command == "train" and options.dry_run:
        command, function = "dry run", "disco_ds.cli.commands:dry_run"
    # DeepSpeed's notices, for example that there is no GPU, would mix with the command's output.
    if command != "train":
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    is_launched = False
    try:
        if command in ("train", "eval", "doctor", "embed"):
            adopt_slurm()
        is_launched = command in RANK_COMMANDS
        return resolve_name(function)(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        # The messages of these errors are for users. A traceback would hide them.
        is_ours = type(error).__module__.startswith("disco_ds.")
        if is_launched or not (is_ours or isinstance(error, ValueError | OSError)):
            raise
        # Not imported at the top: the module imports libraries that --help does not need.
        from disco_ds.runs.messages import show

        show(error)
        return 2
