"""`disco-ds index`: the samples of shards, counted once into their manifest."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext, suppress

from tqdm import tqdm

from disco_ds.cli.messages import fail
from disco_ds.config.data import RemoteSettings
from disco_ds.data.broken import DataError
from disco_ds.data.counting import compare, index_shards
from disco_ds.data.listing import NAME, Listing, find_shards, list_folder
from disco_ds.data.manifest import read_manifest, write_manifest


def _is_whole(listing: Listing) -> bool:
    """Return True if the listing names every shard of a folder, whose manifest.json it may then write."""
    return listing.whole or (not listing.urls and list_folder(listing.folder).names == listing.names)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: written, or with --check still right; 1: with --check stale; 2: a mistake."""
    remote = RemoteSettings(http=True, pipe=args.pipe)
    workers = min(4, len(os.sched_getaffinity(0))) if args.workers is None else args.workers
    try:
        listing = find_shards(args.shards, remote)
        if not (args.to or args.check or _is_whole(listing)):
            raise ValueError("shards that are not all of a folder: say --to FILE, and name FILE as data.manifest")
        path, known = args.to or listing.folder / NAME, {}
        # Without --check, what cannot be read is written anew.
        with nullcontext() if args.check else suppress(ValueError):
            known = read_manifest(path)
        with tqdm(unit=" shards", total=len(listing.names)) as bar:
            manifest = index_shards(listing, workers, lambda done: bar.update(done - bar.n), known.values(), remote)
        if not args.check:
            write_manifest(manifest, path)
    except (ValueError, OSError, DataError) as error:
        return fail(error, code=2)
    count = f"{len(manifest.shards):,} shards, {manifest.num_samples:,} samples"
    if not args.check:
        print(f"{path}: {count}")
        return 0
    # Some shards of a folder are compared with their part of its manifest.
    old = known if listing.whole else {name: known[name] for name in listing.names if name in known}
    changes = compare(old.values(), manifest.shards)
    print("\n".join([*changes, f"{path} is {'stale' if changes else 'right'}: {count}"]))
    return 1 if changes else 0
