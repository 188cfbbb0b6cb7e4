"""`disco-ds report`: report.png of a run, drawn again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from disco_ds.metrics.report import write_report


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disco-ds report",
        description="Draw the curves of a run, and the images it was last evaluated on, as report.png in its folder.",
    )
    parser.add_argument("run", type=Path, help="a run folder, finished or not")
    return parser


def main(argv: list[str]) -> int:
    """Exit code 0: drawn; 2: a mistake."""
    args = make_parser().parse_args(argv)
    try:
        print(write_report(args.run))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
