"""The command line: `disco-ds COMMAND ...`, the same as `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

COMMANDS = {
    "train": "train a recipe (under `deepspeed --module disco_ds.train` for several ranks)",
    "eval": "zero-shot accuracy and retrieval of a run, a checkpoint, an export or open_clip's weights",
    "export": "write trained weights as open_clip loads them",
    "report": "draw report.png of a run, finished or not",
    "index": "write the manifest of a folder of shards",
}


def main() -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        asked = len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help")
        print(f"usage: disco-ds COMMAND ...\n{listing}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command, rest = sys.argv[1], sys.argv[2:]
    if command == "index":
        return index(rest)
    if command == "report":
        return report(rest)
    if command == "eval":
        from disco_ds.evaluate import main as evaluate

        return evaluate(rest)
    if command == "export":
        from disco_ds.export import main as export

        return export(rest)
    if "--dry-run" in rest:
        return dry_run(rest)
    from disco_ds.train import main as train

    return train(rest)


def dry_run(argv: list[str]) -> int:
    """What train does with --dry-run, without its imports."""
    from disco_ds.arguments import count_ranks, describe_run, parse_args
    from disco_ds.config import load_config

    args = parse_args(argv)
    try:
        print(describe_run(load_config(args.config, args.overrides), count_ranks(args.ranks, args.hostfile)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(argv: list[str]) -> int:
    """Draw the curves of a run, and the images it was last evaluated on, as report.png in its folder."""
    parser = argparse.ArgumentParser(prog="disco-ds report", description=report.__doc__)
    parser.add_argument("run", type=Path, help="a run folder, finished or not")
    args = parser.parse_args(argv)
    from disco_ds.report import write_report

    try:
        print(write_report(args.run))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def index(argv: list[str]) -> int:
    """Count the samples of every shard of a folder and write manifest.json beside them."""
    parser = argparse.ArgumentParser(prog="disco-ds index", description=index.__doc__)
    parser.add_argument("folder", type=Path, help="holds the .tar shards")
    parser.add_argument("--workers", type=int, default=4, help="shards read at once (default: 4)")
    args = parser.parse_args(argv)
    from tqdm import tqdm

    from disco_ds.data.manifest import index_shards, write_manifest

    try:
        with tqdm(unit=" shards") as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            manifest = index_shards(args.folder, args.workers, progress)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = write_manifest(manifest)
    print(f"{path}: {len(manifest.shards):,} shards, {manifest.num_samples:,} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
