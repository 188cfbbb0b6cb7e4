"""`disco-ds index`: count the samples of shards and write their manifest."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext, suppress

from tqdm import tqdm

from disco_ds.cli.messages import fail
from disco_ds.config.data import RemoteSettings
from disco_ds.data.images.broken import DataError
from disco_ds.data.sources.counting import compare, index_shards
from disco_ds.data.sources.listing import NAME, Listing, find_shards, list_folder
from disco_ds.data.sources.manifest import read_manifest, write_manifest


def _is_whole(listing: Listing) -> bool:
    """Return whether the listing has every shard of its folder, so that it may write its
    manifest.json."""
    return listing.whole or (
        not listing.urls and list_folder(listing.folder).names == listing.names
    )


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: written, or the manifest is right (--check). 1: it is stale (--check). 2:
        invalid arguments.
    """
    remote = RemoteSettings(http=True, pipe=args.pipe)
    workers = min(4, len(os.sched_getaffinity(0))) if args.workers is None else args.workers
    try:
        listing = find_shards(args.shards, remote)
        if not (args.to or args.check or _is_whole(listing)):
            raise ValueError(
                "these are not all shards of the folder: pass --to FILE, and set data.manifest=FILE"
            )
        path = args.to or listing.folder / NAME
        known = {}
        # Without --check, a manifest that cannot be read is replaced.
        with nullcontext() if args.check else suppress(ValueError):
            known = read_manifest(path)
        with tqdm(unit=" shards", total=len(listing.names)) as bar:
            manifest = index_shards(
                listing, workers, lambda done: bar.update(done - bar.n), known.values(), remote
            )
        if not args.check:
            write_manifest(manifest, path)
    except (ValueError, OSError, DataError) as error:
        return fail(error, code=2)
    count = f"{len(manifest.shards):,} shards, {manifest.num_samples:,} samples"
    if not args.check:
        print(f"{path}: {count}")
        return 0
    if not listing.whole:  # compare with the entries of these shards only
        known = {name: known[name] for name in listing.names if name in known}
    changes = compare(known.values(), manifest.shards)
    for change in changes:
        print(change)
    print(f"{path} is {'stale' if changes else 'right'}: {count}")
    return 1 if changes else 0
