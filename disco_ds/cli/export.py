"""`disco-ds export`: write trained weights in open_clip's format."""

from __future__ import annotations

import argparse

from disco_ds.checkpoints.export import export_run
from disco_ds.cli.messages import fail


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: written. 2: invalid arguments; nothing is written.
    """
    try:
        folder = export_run(args.source, args.to, args.format, args.dtype)
    except (ValueError, OSError) as error:
        return fail(error, code=2)
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {files}; README.md explains how to load it")
    return 0
