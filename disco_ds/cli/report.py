"""`disco-ds report`: report.png of a run, drawn again."""

from __future__ import annotations

import argparse

from disco_ds.cli.messages import fail
from disco_ds.metrics.report import write_report


def run(args: argparse.Namespace) -> int:
    """Exit code 0: drawn; 2: a mistake."""
    try:
        print(write_report(args.folder))
    except (ValueError, OSError) as error:
        return fail(error, code=2)
    return 0
