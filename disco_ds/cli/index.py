"""`disco-ds index`: count the samples of shards and write their manifest."""

from contextlib import suppress
from functools import partial

from tqdm import tqdm

from disco_ds.cli.options import Index
from disco_ds.config.data import RemoteSettings
from disco_ds.data.sources.counting import compare, index_shards
from disco_ds.data.sources.shards import (
    NAME,
    Shard,
    find_shards,
    list_folder,
    read_manifest,
    write_manifest,
)
from disco_ds.names import plural


def run(options: Index) -> int:
    """Run the command.

    Returns:
        Exit code 0: the manifest was written or, with --check, nothing has changed. 1: with --check,
        something has changed.

    Raises:
        ValueError: If an argument is invalid, the manifest cannot be written, a shard cannot be read, or no shard has a
            complete sample.
    """
    remote = RemoteSettings(**options.model_dump(include={"pipe", "cache"}, exclude_none=True))
    listing = find_shards(options.shards, remote)
    # A folder's manifest.json may be written only if all shards of the folder are listed.
    if not (options.to or options.check or listing.whole) and (
        listing.urls
        or "/" in listing.names[0]
        or list_folder(listing.folder).names != listing.names
    ):
        raise ValueError(
            "these are not all shards of the folder, so their manifest cannot be the folder's manifest.json: "
            "pass --to FILE, and train with data.manifest=FILE"
        )
    path = options.to or listing.folder / NAME
    # Counts are saved here until all shards are counted, so that a run cannot use an incomplete manifest.
    unfinished = path.with_name(f"{path.name}.partial")
    known: tuple[Shard, ...] = ()
    if options.check:
        known = read_manifest(path).shards
    else:
        for file in (path, unfinished):
            with suppress(ValueError):  # a manifest that cannot be read is replaced
                known += read_manifest(file).shards
    is_remote = bool(listing.urls)
    with tqdm(unit=" shards", total=len(listing.names)) as bar:
        manifest = index_shards(
            listing,
            options.workers,
            bar.update,
            # A shard that was counted before is read only if its size or modification time has changed. With
            # --check, a remote shard is counted again unless its count is published. With --full, all are read.
            () if options.full or (options.check and is_remote) else known,
            skip_missing=options.missing == "skip",
            save=None if options.check else partial(write_manifest, path=unfinished),
            whole=options.full,
        )
    count = f"{plural(len(manifest.shards), 'shard')}, {plural(manifest.num_samples, 'sample')}"
    if not options.check:
        if not manifest.num_samples:
            unfinished.unlink(missing_ok=True)
            raise ValueError(
                f"no shard of {options.shards} has a complete sample, so {path} is not written"
            )
        write_manifest(manifest, path)
        unfinished.unlink(missing_ok=True)
        print(f"{path}: {count}")
        return 0
    if not listing.whole:  # ignore the manifest's entries for other shards
        names = set(listing.names)
        known = tuple(shard for shard in known if shard.name in names)
    changes = compare(known, manifest.shards, tags=is_remote)
    for change in changes:
        print(change)
    print(f"{path} is {'stale' if changes else 'up to date'}: {count}")
    return 1 if changes else 0
