"""`disco-ds index`: the samples of shards, counted once into their manifest."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from tqdm import tqdm

from disco_ds.config.data import RemoteSettings
from disco_ds.data.counting import compare, index_shards
from disco_ds.data.listing import NAME, find_shards
from disco_ds.data.manifest import read_manifest, write_manifest
from disco_ds.data.tar import DataError


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disco-ds index",
        description="Count the samples of shards and write their manifest; counts of shards that have not changed "
        "since are kept.",
    )
    parser.add_argument("shards", help="a folder of .tar files, or one by one: '/data/{000..099}.tar', 'https://...'")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the manifest (default: manifest.json in the folder)")
    parser.add_argument("--check", action="store_true", help="write nothing; say what has changed since, exit code 1")
    parser.add_argument("--workers", type=int, default=4, help="shards read at once (default: 4)")
    parser.add_argument("--pipe", action="store_true", help="allow pipe:COMMAND, which runs in a shell")
    return parser


def main(argv: list[str]) -> int:
    """Exit code 0: written, or with --check right; 1: with --check stale; 2: a mistake."""
    args = make_parser().parse_args(argv)
    remote = RemoteSettings(http=True, pipe=args.pipe)
    try:
        listing = find_shards(args.shards, remote)
        if not listing.whole and not (args.to or args.check):
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
    old = known if listing.whole else {name: known[name] for name in listing.names if name in known}
    changes = compare(old.values(), manifest.shards)
    print("\n".join([*changes, f"{path} is {'stale' if changes else 'right'}: {count}"]))
    return 1 if changes else 0
