"""`disco-ds report`: redraw report.png of a run."""

from __future__ import annotations

import argparse

from disco_ds.cli.messages import fail
from disco_ds.metrics.report import write_report


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: drawn. 2: invalid arguments.
    """
    try:
        print(write_report(args.folder))
    except (ValueError, OSError) as error:
        return fail(error, code=2)
    return 0
