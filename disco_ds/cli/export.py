"""`disco-ds export`: trained weights as open_clip loads them."""

from __future__ import annotations

import argparse

from disco_ds.cli.messages import fail
from disco_ds.training.export import export_run


def run(args: argparse.Namespace) -> int:
    """Exit code 0: written; 2: a mistake, and nothing is written."""
    try:
        folder = export_run(args.source, args.to, args.format, args.dtype)
    except (ValueError, OSError) as error:
        return fail(error, code=2)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}; README.md says how to load it")
    return 0
