"""The manifest of shards: which there are and how many samples each has, counted once by `disco-ds index`.

Sample ids and the data order follow from it, so every rank must find the same shards. Nothing is counted here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disco_ds.data.listing import NAME, Listing

VERSION = 1
_NAMED = 5
"""Shards that a message names before it only counts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    name: str
    samples: int
    bytes: int
    mtime: int = 0
    """When a local shard was last written, in seconds; 0: not known."""


@dataclass(frozen=True)
class Manifest:
    folder: Path
    shards: tuple[Shard, ...]
    urls: tuple[str, ...] = ()
    """Of remote shards; others lie in the folder."""

    @property
    def sizes(self) -> list[int]:
        return [shard.samples for shard in self.shards]

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Of what the data order depends on: names and sample counts, not the folder."""
        text = json.dumps([(shard.name, shard.samples) for shard in self.shards])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_manifest(manifest: Manifest, path: Path | None = None) -> Path:
    """Write a manifest, into its folder unless a path is given, by a rename, and return its path."""
    path = path or manifest.folder / NAME
    shards = [asdict(shard) for shard in manifest.shards]
    partial_path = path.with_suffix(f".{os.getpid()}.partial")
    partial_path.write_text(json.dumps({"version": VERSION, "shards": shards}, indent=1) + "\n", encoding="utf-8")
    partial_path.replace(path)
    return path


def read_manifest(path: Path) -> dict[str, Shard]:
    """The shards of a manifest file by name. Raises: ValueError when it is none of this version."""
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        version = tree["version"]
        if version == VERSION:
            shards = [
                Shard(str(item["name"]), int(item["samples"]), int(item["bytes"]), int(item.get("mtime", 0)))
                for item in tree["shards"]
            ]
            return {shard.name: shard for shard in sorted(shards, key=lambda shard: shard.name)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a manifest ({type(error).__name__}: {error}); write it anew: disco-ds index"
        ) from None
    raise ValueError(f"{path} has version {version!r}, this program reads {VERSION}: disco-ds index")


def load_manifest(folder: Path, path: Path | None = None) -> Manifest:
    """Read the manifest of a whole folder and hold it against the shards that lie there.

    Args:    path: of the manifest; None: manifest.json in the folder.
    Raises:  ValueError saying what differs and the remedy. A shard that has changed is only a warning: a truncated one
             costs the samples it lost.
    """
    present = set(find_tars(folder))
    again = f"disco-ds index {folder}" + (f" --to {path}" if path else "")
    remedy = f"restore the shards, or count again: {again}"
    path = path or folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} has {len(present)} shards and no {path.name}; count them: {again}")
    shards = read_manifest(path)
    if gone := shards.keys() - present:
        raise ValueError(f"{path} lists shards that are not there: {some(gone)}; {remedy}")
    if new := present - shards.keys():
        raise ValueError(f"{folder} has shards that {path.name} does not list: {some(new)}; {remedy}")
    return _check(Manifest(folder, tuple(shards.values())))


def load_listed(listing: Listing, path: Path | None) -> Manifest:
    """The part of a manifest that a listing names.

    Args:    path: of the manifest; None: manifest.json in the folder of local shards.
    Raises:  ValueError when the manifest or a local shard is missing; as load_manifest.
    """
    again = "disco-ds index 'SHARDS' --to FILE, and name FILE as manifest"
    if path is None and listing.urls:
        raise ValueError(f"remote shards need a manifest; count them: {again}")
    path = path or listing.folder / NAME
    if not path.is_file():
        raise ValueError(f"there is no {path}; count the shards: {again}")
    known = read_manifest(path)
    if uncounted := set(listing.names) - known.keys():
        raise ValueError(f"{path} does not list {some(uncounted)}; count the shards: {again}")
    if not listing.urls and (gone := {name for name in listing.names if not (listing.folder / name).is_file()}):
        raise ValueError(f"{listing.folder} has no {some(gone)}")
    return _check(Manifest(listing.folder, tuple(known[name] for name in listing.names), listing.urls))


def find_tars(folder: Path) -> list[str]:
    """Names of a folder's shards. Raises: ValueError when there are none."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".tar"))
    if not names:
        raise ValueError(f"{folder} holds no .tar file, expected a folder of webdataset shards")
    return names


def has_changed(folder: Path, shard: Shard) -> bool:
    """Whether a local shard has another size or, where that is known, another time than when it was counted."""
    status = os.stat(folder / shard.name)
    return status.st_size != shard.bytes or (shard.mtime != 0 and int(status.st_mtime) != shard.mtime)


def refuse_empty(manifest: Manifest) -> None:
    """Raises: ValueError for shards without samples."""
    empty = {shard.name for shard in manifest.shards if shard.samples == 0}
    if empty:
        where = "the list" if manifest.urls else manifest.folder
        raise ValueError(f"{where} has shards without a complete sample: {some(empty)}; remove them and index again")


def some(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _check(manifest: Manifest) -> Manifest:
    refuse_empty(manifest)
    changed = [] if manifest.urls else [s.name for s in manifest.shards if has_changed(manifest.folder, s)]
    if changed:
        logger.warning(
            "%s: %d of %d shards have another size or time than when they were counted: %s; disco-ds index --check "
            "tells whether the counts still hold",
            manifest.folder,
            len(changed),
            len(manifest.shards),
            some(changed),
        )
    return manifest
