"""`disco-ds export`: write trained weights for open_clip or transformers."""

from __future__ import annotations

import argparse

from disco_ds.checkpoints.export import export_run


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: the files were written.

    Raises:
        ValueError: If an argument is invalid. Then nothing is written.
        OSError: If the files cannot be written.
    """
    folder = export_run(args.source, args.to, args.format, args.dtype, args.ema)
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {files}; README.md explains how to load the weights")
    return 0
