"""`disco-ds export`: trained weights as open_clip loads them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from disco_ds.training.export import DTYPES, Layout, export_run


def make_parser() -> argparse.ArgumentParser:
    description = "Write trained weights, in a new folder, as open_clip loads them."
    parser = argparse.ArgumentParser(prog="disco-ds export", description=description)
    parser.add_argument("source", type=Path, help="run folder (its last checkpoint), checkpoint folder, or export")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="new folder")
    parser.add_argument("--format", choices=get_args(Layout), default="both", help="default: both")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights; default: fp32")
    return parser


def main(argv: list[str]) -> int:
    """Exit code 0: written; 2: a mistake, and nothing is."""
    args = make_parser().parse_args(argv)
    try:
        folder = export_run(args.source, args.to, args.format, args.dtype)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}; README.md says how to load it")
    return 0
