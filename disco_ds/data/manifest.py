"""The manifest of a shard folder: which shards it has and how many samples each, counted once by `disco-ds index`.

Sample ids and the data order follow from it, so every rank must find the same shards. Nothing is decoded here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.config import PACKAGE
from disco_ds.data.tar import TarIndex

NAME = "manifest.json"
VERSION = 1
_BUNDLED = "bundled:"
_NAMED = 5
"""Shards that an error names before it only counts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    name: str
    samples: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    folder: Path
    shards: tuple[Shard, ...]

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


def resolve_shards(text: str) -> Path:
    """The folder that data.shards names: a path, or `bundled:<set>` for data of the package.

    Raises:  ValueError listing the bundled sets when there is none of that name.
    """
    if not text.startswith(_BUNDLED):
        return Path(text).expanduser()
    assets = PACKAGE / "assets"
    folder = assets / text.removeprefix(_BUNDLED)
    if not folder.is_dir():
        known = sorted(_BUNDLED + path.parent.relative_to(assets).as_posix() for path in assets.rglob(NAME))
        raise ValueError(f"no bundled data is called {text!r}; known: {', '.join(known) or 'none'}")
    return folder


def index_shards(folder: Path, workers: int = 0, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Count the samples of every .tar of a folder from its headers.

    Args:    workers: processes that count; progress: called with (shards done, shards in all).
    Returns: the manifest, sorted by name; a truncated shard counts up to its last complete sample, with a warning.
    Raises:  ValueError when there is no shard, or one without samples.
    """
    names = _find_tars(folder)
    shards = []
    for number, (shard, truncated) in enumerate(_count_all(folder, names, workers), start=1):
        shards.append(shard)
        if truncated:
            logger.warning("%s is truncated: %s; counted %d samples", folder / shard.name, truncated, shard.samples)
        if progress is not None:
            progress(number, len(names))
    _refuse_empty(folder, shards)
    return Manifest(folder, tuple(shards))


def write_manifest(manifest: Manifest) -> Path:
    """Write manifest.json into the manifest's folder, by a rename, and return its path."""
    path = manifest.folder / NAME
    shards = [{"name": shard.name, "samples": shard.samples, "bytes": shard.bytes} for shard in manifest.shards]
    partial_path = path.with_suffix(f".{os.getpid()}.partial")
    partial_path.write_text(json.dumps({"version": VERSION, "shards": shards}, indent=1) + "\n", encoding="utf-8")
    partial_path.replace(path)
    return path


def load_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest and hold it against the shards that lie there.

    Raises:  ValueError saying what differs and the remedy. A shard of another size in bytes is only a warning: a
             truncated one costs the samples it lost.
    """
    present = set(_find_tars(folder))
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} has {len(present)} shards and no {NAME}; count them: disco-ds index {folder}")
    shards = _parse(path)
    listed = {shard.name for shard in shards}
    again = f"; restore the shards, or count again: disco-ds index {folder}"
    if listed - present:
        raise ValueError(f"{path} lists shards that are not there: {_some(listed - present)}{again}")
    if present - listed:
        raise ValueError(f"{folder} has shards that {NAME} does not list: {_some(present - listed)}{again}")
    _refuse_empty(folder, shards)
    for shard in shards:
        found = (folder / shard.name).stat().st_size
        if found != shard.bytes:
            logger.warning("%s has %d bytes, its manifest says %d", folder / shard.name, found, shard.bytes)
    return Manifest(folder, tuple(shards))


def _find_tars(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"data.shards: there is no folder {folder}")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".tar"))
    if not names:
        raise ValueError(f"{folder} holds no .tar file; data.shards names a folder of webdataset shards")
    return names


def _count_all(folder: Path, names: list[str], workers: int) -> Iterable[tuple[Shard, str | None]]:
    if workers == 0:
        yield from (_count(folder, name) for name in names)
        return
    # Not fork: the caller may have threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(_count, folder), names, chunksize=4)


def _count(folder: Path, name: str) -> tuple[Shard, str | None]:
    with open(folder / name, "rb", buffering=0) as file:
        index = TarIndex(file)
        return Shard(name, len(index), os.fstat(file.fileno()).st_size), index.truncated


def _parse(path: Path) -> list[Shard]:
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        version = tree["version"]
        if version == VERSION:
            shards = [Shard(str(item["name"]), int(item["samples"]), int(item["bytes"])) for item in tree["shards"]]
            return sorted(shards, key=lambda shard: shard.name)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a manifest ({type(error).__name__}: {error}); write it anew: disco-ds index {path.parent}"
        ) from None
    raise ValueError(f"{path} has version {version!r}, this program reads {VERSION}: disco-ds index {path.parent}")


def _refuse_empty(folder: Path, shards: Iterable[Shard]) -> None:
    empty = {shard.name for shard in shards if shard.samples == 0}
    if empty:
        raise ValueError(f"{folder} has shards without a complete sample: {_some(empty)}; remove them and index again")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
