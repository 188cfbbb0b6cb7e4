"""Sample counts that data sets publish next to their shards, so that shards need not be downloaded to be counted.

    sizes.json          open_clip and DataComp: {"00000.tar": 1000, ...}
    _info.json          timm and Hugging Face: {"splits": {"train": {"filenames": [...], "shard_lengths": [...]}}}
    00000_stats.json    img2dataset: {"successes": 1000, ...}, one file for each shard

The counts are claims. The reader of a shard warns if the shard has another number of samples (tar.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from disco_ds.config.data import PIPE, RemoteSettings
from disco_ds.data.remote.stores import (
    BUCKETS,
    StoreError,
    describe,
    list_objects,
    read_object,
    read_size,
    retry,
)
from disco_ds.data.sources.listing import Listing

_REQUESTS = 32
"""Maximum number of concurrent requests."""
_TABLES = ("sizes.json", "_info.json", "info.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """The size and the published sample count of a shard, found without reading the shard."""

    name: str
    samples: int | None = None
    """Published number of samples; None if none is published."""
    bytes: int | None = None
    """Size in bytes; None if it is unknown, as for the output of a command."""
    mtime: int = 0
    """Time when a local shard was last written, in seconds; 0 for a remote one."""
    error: str | None = None
    """Reason why the size could not be read, if it could not."""
    missing: bool = False
    """True if the shard does not exist."""


def find_counts(
    listing: Listing, names: Sequence[str], remote: RemoteSettings, published: bool = True
) -> Iterator[Found]:
    """Find the sizes and the published sample counts of shards.

    Args:
        listing: The listing that has the shards.
        names: Names of the shards to look for.
        remote: Attempts and timeout of a request.
        published: Whether to look for published counts. False: only sizes.

    Yields:
        What was found for each shard, in any order.

    Raises:
        StoreError: If a bucket cannot be listed.
    """
    where = dict(zip(listing.names, listing.urls, strict=True)) if listing.urls else {}
    places = {name: where.get(name) or str(listing.folder / name) for name in names}
    # A signed URL is valid for one file, so nothing can be looked for next to it.
    plain = [place for place in places.values() if not place.startswith(PIPE) and "?" not in place]
    folders = {place.rpartition("/")[0] for place in plain}
    listed: dict[str, int] = {}
    for folder in sorted(folders):
        if folder.startswith(BUCKETS):
            listed |= retry(partial(list_objects, folder + "/", remote.timeout_s), remote)
    read = partial(_read, listed=listed, remote=remote)
    tables = {folder: _read_tables(folder, read) if published else {} for folder in folders}

    def find(name: str) -> Found:
        place = places[name]
        if place.startswith(PIPE):
            return Found(name)
        try:
            size, mtime = _measure(place, listed, remote)
        except FileNotFoundError:
            return Found(name, missing=True)
        except (StoreError, OSError) as error:
            return Found(name, error=str(error))
        folder, _, base = place.rpartition("/")
        samples = tables.get(folder, {}).get(base)
        if samples is None and published and folder in folders:
            stats = _parse(f"{place.removesuffix('.tar')}_stats.json", read)
            samples = stats.get("successes") if isinstance(stats, dict) else None
        return Found(name, samples if isinstance(samples, int) else None, size, mtime)

    with ThreadPoolExecutor(_REQUESTS) as pool:
        try:
            for done in as_completed([pool.submit(find, name) for name in names]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _measure(place: str, listed: dict[str, int], remote: RemoteSettings) -> tuple[int, int]:
    """Return the size and, if it is local, the modification time of a shard.

    Raises:
        FileNotFoundError: If it does not exist.
        StoreError: If its server does not answer.
        OSError: If it is local and cannot be examined.
    """
    if "://" not in place:
        status = os.stat(place)
        return status.st_size, int(status.st_mtime)
    if place.startswith(BUCKETS):
        if place not in listed:
            raise FileNotFoundError(place)
        return listed[place], 0
    try:
        return retry(partial(read_size, place, remote.timeout_s), remote), 0
    except StoreError as error:
        if error.missing:
            raise FileNotFoundError(place) from None
        raise


def _read_tables(folder: str, read: Callable[[str], bytes | None]) -> dict[str, int]:
    """Return the counts by file name that a folder publishes for all its shards."""
    for name in _TABLES:
        tree = _parse(f"{folder}/{name}", read)
        if isinstance(tree, dict) and isinstance(tree.get("splits"), dict):
            return {
                Path(file).name: count
                for split in tree["splits"].values()
                for file, count in zip(
                    split.get("filenames", ()), split.get("shard_lengths", ()), strict=False
                )
            }
        if isinstance(tree, dict):
            return tree
    return {}


def _parse(place: str, read: Callable[[str], bytes | None]) -> object:
    """Parse a JSON file. Return None if the file does not exist or is not valid JSON."""
    content = read(place)
    if content is None:
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        logger.warning("%s is not JSON, so it is ignored: %s", describe(place), error)
        return None


def _read(place: str, listed: dict[str, int], remote: RemoteSettings) -> bytes | None:
    """Return the content of a file. Return None if the file does not exist or cannot be read."""
    if "://" not in place:
        return Path(place).read_bytes() if os.path.isfile(place) else None
    if place.startswith(BUCKETS) and place not in listed:
        return None
    try:
        return retry(partial(read_object, place, remote.timeout_s), remote)
    except StoreError as error:
        if not error.missing:
            logger.warning("%s cannot be read, so it is ignored: %s", describe(place), error)
        return None
