"""`disco-ds report`: redraw a run's report.png."""

from __future__ import annotations

import argparse

from disco_ds.metrics.report import write_report


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: the picture was drawn.

    Raises:
        ValueError: If the folder is not a run folder with metrics.
        OSError: If the picture cannot be written.
    """
    print(write_report(args.folder))
    return 0
