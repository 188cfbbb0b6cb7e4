"""The command line: `disco-ds COMMAND ...`, the same as `python -m disco_ds COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

COMMANDS = {
    "train": "train a recipe (under `deepspeed --module disco_ds.train` for several ranks)",
    "launch": "train unattended: `deepspeed` on one or several hosts, ended cleanly and started again",
    "eval": "zero-shot accuracy and retrieval of a run, a checkpoint, an export or open_clip's weights",
    "export": "write trained weights as open_clip loads them",
    "report": "draw report.png of a run, finished or not",
    "doctor": "look at a run before it is started: packages, hosts, ds_config, batch, data, and --gradients",
    "plan": "memory of each GPU by part, the largest batch that fits, the time of a step; no GPU needed",
    "index": "count the samples of shards, once, into their manifest; --check whether it still holds",
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
    if command == "doctor":
        from disco_ds.doctor.__main__ import main as doctor

        return doctor(rest)
    if command == "launch":
        from disco_ds.cli.launch import main as launch

        return launch(rest)
    if command == "eval":
        from disco_ds.cli.evaluate import main as evaluate

        return evaluate(rest)
    if command == "export":
        from disco_ds.cli.export import main as export

        return export(rest)
    if command == "plan":
        from disco_ds.cli.plan import main as plan

        return plan(rest)
    if "--dry-run" in rest:
        return dry_run(rest)
    from disco_ds.cli.train import main as train

    return train(rest)


def dry_run(argv: list[str]) -> int:
    """What train does with --dry-run, without its imports."""
    from disco_ds.cli.arguments import describe_run, parse_args
    from disco_ds.config import load_config
    from disco_ds.distributed.hostfile import count_ranks

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
    from disco_ds.metrics.report import write_report

    try:
        print(write_report(args.run))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def index(argv: list[str]) -> int:
    """Count the samples of shards and write their manifest; counts of shards that have not changed since are kept."""
    parser = argparse.ArgumentParser(prog="disco-ds index", description=index.__doc__)
    parser.add_argument("shards", help="a folder of .tar files, or one by one: '/data/{000..099}.tar', 'https://...'")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the manifest (default: manifest.json in the folder)")
    parser.add_argument("--check", action="store_true", help="write nothing; say what has changed since, exit code 1")
    parser.add_argument("--workers", type=int, default=4, help="shards read at once (default: 4)")
    parser.add_argument("--pipe", action="store_true", help="allow pipe:COMMAND, which runs in a shell")
    args = parser.parse_args(argv)
    from tqdm import tqdm

    from disco_ds.config.data import RemoteSettings
    from disco_ds.data.counting import compare, find_shards, index_shards
    from disco_ds.data.listing import NAME
    from disco_ds.data.manifest import read_manifest, write_manifest
    from disco_ds.data.tar import DataError

    remote = RemoteSettings(http=True, pipe=args.pipe)
    try:
        listing, whole = find_shards(args.shards, remote)
        if not whole and not (args.to or args.check):
            raise ValueError("shards that are not all of a folder: say --to FILE, and name FILE as data.manifest")
        path, known = args.to or listing.folder / NAME, {}
        # Without --check, what cannot be read is written anew.
        with nullcontext() if args.check else suppress(ValueError):
            known = read_manifest(path)
        with tqdm(unit=" shards", total=len(listing.names)) as bar:
            manifest = index_shards(
                listing, args.workers, lambda done: bar.update(done - bar.n), known.values(), remote
            )
        if not args.check:
            write_manifest(manifest, path)
    except (ValueError, OSError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = f"{len(manifest.shards):,} shards, {manifest.num_samples:,} samples"
    if not args.check:
        print(f"{path}: {count}")
        return 0
    old = known if whole else {name: known[name] for name in listing.names if name in known}
    changes = compare(old.values(), manifest.shards)
    print("\n".join([*changes, f"{path} is {'stale' if changes else 'right'}: {count}"]))
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
