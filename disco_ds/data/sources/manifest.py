"""The manifest of tar shards: their names and sample counts, as `disco-ds index` has counted them.

Sample ids and the data order follow from it, so every rank must find the same shards. Counting is in counting.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from disco_ds.config.data import DataSettings, RemoteSettings
from disco_ds.config.text_file import write_text
from disco_ds.data.order.slots import count_at_hand
from disco_ds.data.remote.shard_cache import ShardCache
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.listing import NAME, Listing, find_shards, list_folder
from disco_ds.data.sources.tar import TarReader

VERSION = 1
_NAMED = 5
"""How many shards a message names; further ones are counted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    samples: int
    bytes: int
    mtime: int = 0
    """When a local shard was last written, in seconds; 0: not known."""


@dataclass(frozen=True)
class Manifest(Source):
    """Tar shards with known sample counts, local or remote."""

    folder: Path
    shards: tuple[Shard, ...]
    urls: tuple[str, ...] = ()
    """Of remote shards; others are in the folder."""
    remote: RemoteSettings = field(default=RemoteSettings(), compare=False, repr=False)
    """How remote shards are fetched."""

    @cached_property
    def sizes(self) -> list[int]:
        return [shard.samples for shard in self.shards]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names and sample counts; the folder may move."""
        text = json.dumps([(shard.name, shard.samples) for shard in self.shards])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self, num_slots: int = 1, window: int = 1) -> TarReader:
        names = [shard.name for shard in self.shards]
        at_hand = num_slots * count_at_hand(len(names), self.num_samples, window)
        if not self.urls:
            return TarReader(self.folder, names, at_hand)
        return TarReader(self._cache.folder, names, at_hand, self._cache.open)

    def open_fetcher(self) -> Callable[[int], None] | None:
        return self._cache.fetch_ahead if self.urls and self.remote.ahead else None

    @property
    def _cache(self) -> ShardCache:
        names, sizes = [shard.name for shard in self.shards], [shard.bytes for shard in self.shards]
        return ShardCache(self.urls, names, sizes, self.remote)

    def label(self, shard: int, entry: int) -> str:
        return f"{self.shards[shard].name}, entry {entry}"

    @staticmethod
    def takes(shards: str) -> bool:
        return True

    @classmethod
    def load(cls, shards: str, manifest: Path | None, settings: DataSettings) -> Manifest:
        """The shards that a text means, as counted in their manifest. Raises: as find_shards and load_manifest."""
        return load_manifest(find_shards(shards, settings.remote), manifest, settings.remote)


def write_manifest(manifest: Manifest, path: Path | None = None) -> Path:
    """Write a manifest, by default into its folder, by a rename, and return its path."""
    path = path or manifest.folder / NAME
    shards = [asdict(shard) for shard in manifest.shards]
    write_text(path, json.dumps({"version": VERSION, "shards": shards}, indent=1) + "\n")
    return path


def read_manifest(path: Path) -> dict[str, Shard]:
    """The shards in a manifest file, by name. Raises: ValueError if it is not a manifest of this version."""
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        version = tree["version"]
        if version == VERSION:
            shards = [
                Shard(
                    str(item["name"]),
                    int(item["samples"]),
                    int(item["bytes"]),
                    int(item.get("mtime", 0)),
                )
                for item in tree["shards"]
            ]
            return {shard.name: shard for shard in sorted(shards, key=lambda shard: shard.name)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a manifest ({type(error).__name__}: {error}); write it anew: disco-ds index"
        ) from None
    raise ValueError(
        f"{path} has version {version!r}, this program reads {VERSION}: disco-ds index"
    )


def load_manifest(
    where: Path | Listing, path: Path | None = None, remote: RemoteSettings | None = None
) -> Manifest:
    """Read the manifest of a folder's shards, or the part of it that a listing names, and compare it with the shards.

    Args:    path: of the manifest; None: manifest.json in the folder; remote: how remote shards will be fetched.
    Raises:  ValueError stating what differs and the remedy. A shard that has changed is only a warning: a truncated one
             costs the samples it lost.
    """
    listing = where if isinstance(where, Listing) else list_folder(where)
    folder, names = listing.folder, set(listing.names)
    again = "disco-ds index 'SHARDS' --to FILE, and name FILE as manifest"
    if listing.whole:
        again = f"disco-ds index {folder}" + (f" --to {path}" if path else "")
    if path is None and listing.urls:
        raise ValueError(f"remote shards need a manifest; count them: {again}")
    path = path or folder / NAME
    if not path.is_file():
        raise ValueError(f"there is no {path}; count the shards: {again}")
    known = read_manifest(path)
    # A folder must match its manifest exactly; a listing may name a part of what the manifest counts.
    if listing.whole and (gone := known.keys() - names):
        raise ValueError(
            f"{path} lists shards that are not there: {some(gone)}; restore them, or count again: {again}"
        )
    if uncounted := names - known.keys():
        raise ValueError(f"{path} does not list {some(uncounted)}; count the shards: {again}")
    if not (listing.whole or listing.urls) and (
        gone := {name for name in names if not (folder / name).is_file()}
    ):
        raise ValueError(f"{folder} has no {some(gone)}")
    manifest = Manifest(
        folder,
        tuple(known[name] for name in listing.names),
        listing.urls,
        remote or RemoteSettings(),
    )
    refuse_empty(manifest)
    if changed := find_changed(manifest):
        logger.warning(
            "%s: %d of %d shards have another size or time than when they were counted: %s; disco-ds index --check "
            "shows whether the counts still hold",
            folder,
            len(changed),
            len(names),
            some({manifest.shards[i].name for i in changed}),
        )
    return manifest


def find_changed(manifest: Manifest) -> list[int]:
    """Numbers of the local shards that have changed since they were counted."""
    return (
        []
        if manifest.urls
        else [i for i, s in enumerate(manifest.shards) if has_changed(manifest.folder, s)]
    )


def has_changed(folder: Path, shard: Shard) -> bool:
    """Whether the size of a local shard or, where it is known, its time differs from when it was counted."""
    status = os.stat(folder / shard.name)
    return status.st_size != shard.bytes or (
        shard.mtime != 0 and int(status.st_mtime) != shard.mtime
    )


def refuse_empty(manifest: Manifest) -> None:
    """Raises: ValueError for shards without samples."""
    empty = {shard.name for shard in manifest.shards if shard.samples == 0}
    if empty:
        where = "the list" if manifest.urls else manifest.folder
        raise ValueError(
            f"{where} has shards without a complete sample: {some(empty)}; remove them and index again"
        )


def some(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
