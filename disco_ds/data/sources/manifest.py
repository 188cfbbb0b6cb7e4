"""Tar shards and their manifest: the names and sample counts that `disco-ds index` writes (counting.py).

Sample ids and the data order follow from the manifest, so every rank must find the same shards. With data.index=none,
there is no manifest, and order/whole_shards.py defines the order.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from disco_ds.config.data import RemoteSettings
from disco_ds.config.text_file import write_text
from disco_ds.data.order import estimate_open_shards
from disco_ds.data.remote.shard_cache import ShardCache
from disco_ds.data.remote.stores import Version
from disco_ds.data.sources.base import Source, digest
from disco_ds.data.sources.listing import NAME, Listing, list_folder
from disco_ds.data.sources.tar import TarReader
from disco_ds.names import plural

_NUM_NAMED = 5
"""Maximum number of shards that a message lists by name."""

logger = logging.getLogger(__name__)


# A tuple, because a data worker would take twice as long to unpickle 140,000 dataclass objects.
class Shard(NamedTuple):
    """A tar file and its number of samples."""

    name: str
    samples: int
    """Number of complete samples; 0 also if samples are not counted (data.index=none)."""
    bytes: int
    """Size in bytes; 0 if unknown."""
    tag: str = ""
    """ETag or time of the last modification when the shard was counted; "" if unknown."""


@dataclass(frozen=True)
class Manifest(Source):
    """Tar shards, local or remote."""

    folder: Path
    shards: tuple[Shard, ...]
    urls: tuple[str, ...] = ()
    """URLs of remote shards; empty if the shards are in the folder."""
    remote: RemoteSettings = field(default=RemoteSettings(), compare=False, repr=False)
    """How remote shards are fetched."""
    missing: tuple[str, ...] = field(default=(), compare=False)
    """Names of shards that did not exist when the other shards were counted. They are not part of the source."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples in each shard."""
        return [shard.samples for shard in self.shards]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names and sample counts. It does not include the folder, which may move."""
        return digest([(shard.name, shard.samples) for shard in self.shards])

    def open(self, num_slots: int = 1, window: int = 1) -> TarReader:
        """Open the shards for reading in one process. See Source.open."""
        names = [shard.name for shard in self.shards]
        # An uncounted shard is read whole, so a slot reads one shard at a time.
        num_open, sizes = num_slots, None
        if self.num_samples:
            num_open *= estimate_open_shards(len(names), self.num_samples, window)
            sizes = self.sizes
        if not self.urls:
            return TarReader(self.folder, names, num_open, sizes=sizes)
        cache = self._open_cache()
        return TarReader(cache.folder, names, num_open, cache.open, sizes)

    def open_fetcher(self) -> Callable[[int], None] | None:
        """Return a function that fetches a remote shard into the cache, or None if the shards are local."""
        return self._open_cache().fetch_ahead if self.urls else None

    def _open_cache(self) -> ShardCache:
        names = [shard.name for shard in self.shards]
        versions = [Version(shard.bytes, shard.tag) for shard in self.shards]
        return ShardCache(self.urls, names, versions, self.remote)

    def label(self, shard: int, entry: int) -> str:
        """Return a name for a sample without reading anything."""
        return f"{self.shards[shard].name}, entry {entry}"


def write_manifest(manifest: Manifest, path: Path | None = None) -> Path:
    """Write a manifest atomically, by default to manifest.json in its folder, and return the path of the file."""
    path = path or manifest.folder / NAME
    shards = [shard._asdict() for shard in manifest.shards]
    tree = {"version": 1, "shards": shards, "missing": manifest.missing}
    write_text(path, json.dumps(tree, indent=1) + "\n")
    return path


def read_manifest(path: Path) -> dict[str, Shard]:
    """Read a manifest file, and return its shards by name.

    Raises:
        ValueError: If the file is not a manifest.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        shards = [
            Shard(item["name"], item["samples"], item["bytes"], item.get("tag", ""))
            for item in tree["shards"]
        ]
        if not all(type(shard.samples) is int and shard.samples >= 0 for shard in shards):
            raise ValueError("a number of samples is not a whole number")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a manifest ({type(error).__name__}: {error}); write it with disco-ds index"
        ) from None
    return {shard.name: shard for shard in shards}


def load_manifest(
    where: Path | Listing, path: Path | None = None, remote: RemoteSettings | None = None
) -> Manifest:
    """Read the manifest entries of a folder or of the listed shards, and compare them with the shards.

    A shard that has changed since it was counted causes only a warning. If it was truncated, only the samples that were
    cut off are lost.

    Args:
        where: The folder or the listing.
        path: Path of the manifest; None means manifest.json in the folder.
        remote: How remote shards will be fetched.

    Raises:
        ValueError: If manifest and shards do not match. The message states the difference and the remedy.
        OSError: If a listed local shard cannot be found.
    """
    listing = where if isinstance(where, Listing) else list_folder(where)
    folder, names = listing.folder, set(listing.names)
    command = "disco-ds index 'SHARDS' --to FILE, and set data.manifest=FILE"
    if listing.whole:
        command = f"disco-ds index {folder}" + (f" --to {path}" if path else "")
    if path is None and listing.urls:
        raise ValueError(f"remote shards need a manifest; index them: {command}")
    path = path or folder / NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; index the shards: {command}")
    known = read_manifest(path)
    # A folder must match its manifest exactly; a listing may name only some of its shards.
    if listing.whole and (gone := known.keys() - names):
        raise ValueError(
            f"{path} lists missing shards: {some(gone)}; restore them, or index the shards again: {command}"
        )
    uncounted = names - known.keys()
    if uncounted:
        # Shards that did not exist when the manifest was written are left out.
        uncounted -= set(json.loads(path.read_text(encoding="utf-8")).get("missing", ()))
    if uncounted:
        raise ValueError(f"{path} does not list {some(uncounted)}; index the shards: {command}")
    found = [name for name in listing.names if name in known]
    shards = tuple(known[name] for name in found)
    urls = tuple(listing.urls[name] for name in found if listing.urls)
    manifest = Manifest(folder, shards, urls, remote or RemoteSettings())
    if not manifest.num_samples:
        raise ValueError(f"the shards of {path} contain no complete sample")
    if changed := find_changed(manifest):
        logger.warning(
            "%s: %d of %s changed in size since they were counted: %s; disco-ds index --check shows whether the "
            "counts are still correct",
            folder,
            len(changed),
            plural(len(names), "shard"),
            some(changed),
        )
    return manifest


def find_changed(manifest: Manifest) -> list[str]:
    """Return the names of the local shards whose size has changed since they were counted.

    Raises:
        FileNotFoundError: If a shard no longer exists.
    """
    if manifest.urls:
        return []
    folder = manifest.folder
    return [
        each.name for each in manifest.shards if os.stat(folder / each.name).st_size != each.bytes
    ]


def some(names: Collection[str], most: int = _NUM_NAMED) -> str:
    """Return the first few names, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
