"""Sample counts that data sets publish next to their shards, so that shards need not be downloaded to be counted.

    sizes.json          open_clip and DataComp: {"00000.tar": 1000, ...}
    _info.json          timm and Hugging Face: {"splits": {"train": {"filenames": [...], "shard_lengths": [...]}}}
    00000_stats.json    img2dataset: {"successes": 1000, ...}, one file for each shard

The counts may be wrong. When tar.py reads a shard, it warns if the number of samples differs.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from disco_ds.config.data import PIPE, RemoteSettings
from disco_ds.data.remote.stores import (
    BUCKETS,
    StoreError,
    Version,
    describe,
    list_objects,
    read_object,
    read_version,
)
from disco_ds.data.sources.listing import Listing
from disco_ds.data.sources.manifest import Shard

_REQUESTS = 32
"""Maximum number of concurrent requests."""
_TABLES = ("sizes.json", "_info.json", "info.json")

logger = logging.getLogger(__name__)


def find_counts(
    listing: Listing, remote: RemoteSettings, published: bool, known: Mapping[str, Shard]
) -> Iterator[tuple[str, Shard | Version | Exception]]:
    """Find the versions and the known or published sample counts of shards, without reading the shards.

    Args:
        listing: The shards.
        remote: Number of attempts and timeout of each request.
        published: Whether to look for published counts. If False, only versions are found.
        known: Shards that were counted before. Their counts are used if their versions have not changed.

    Yields:
        The name of each shard, in any order, and what was found: the shard, only its version if its count is neither
        known nor published, or the exception if its version cannot be read. The exception is FileNotFoundError if the
        shard does not exist.

    Raises:
        StoreError: If a bucket cannot be listed.
    """
    places = listing.urls or {name: str(listing.folder / name) for name in listing.names}
    folders = {place.rpartition("/")[0] for place in places.values() if _is_plain(place)}
    listed: dict[str, Version] = {}
    for folder in sorted(folders):
        if folder.startswith(BUCKETS):
            listed |= list_objects(folder + "/", remote)
    tables = {folder: _read_table(folder, listed, remote) for folder in folders if published}

    def find(name: str) -> tuple[str, Shard | Version | Exception]:
        place = places[name]
        try:
            version = _find_version(place, listed, remote)
        except (StoreError, OSError) as error:
            return name, error
        # A shard with 0 samples may have been missing, so it is counted again.
        shard = known.get(name)
        if (
            shard
            and shard.samples
            and version.bytes in (0, shard.bytes)
            and shard.tag in ("", version.tag)
        ):
            return name, shard._replace(tag=version.tag)
        samples = None
        if published and _is_plain(place):
            folder, _, base = place.rpartition("/")
            samples = tables[folder].get(base)
            if samples is None:
                stats = _read_json(f"{place.removesuffix('.tar')}_stats.json", listed, remote)
                samples = stats.get("successes")
        # A sample has at least one member, and its header and data take at least 1,024 bytes.
        if type(samples) is int and 0 <= samples <= version.bytes // 1024:
            return name, Shard(name, samples, *version)
        return name, version

    with ThreadPoolExecutor(_REQUESTS) as pool:
        try:
            for done in as_completed([pool.submit(find, name) for name in listing.names]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _is_plain(place: str) -> bool:
    """Return whether a shard is a file or a plain URL, so that other files next to it can be read.

    This is impossible for the output of a command and for a signed URL.
    """
    return not (place.startswith(PIPE) or (place.startswith("http") and "?" in place))


def _find_version(place: str, listed: Mapping[str, Version], remote: RemoteSettings) -> Version:
    """Return the version of a shard.

    Raises:
        FileNotFoundError: If the shard does not exist.
        StoreError: If the server does not return the version.
        OSError: If the shard is local and is not a regular file, or if its status cannot be read.
    """
    if place.startswith(PIPE):
        return Version(0, "")
    if "://" not in place:
        status = os.stat(place)
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe might block
            raise OSError(errno.EINVAL, "not a regular file", place)
        return Version(status.st_size, str(status.st_mtime_ns))
    if place.startswith(BUCKETS):
        if place not in listed:
            raise FileNotFoundError(place)
        return listed[place]
    return read_version(place, remote)


def _read_table(
    folder: str, listed: Mapping[str, Version], remote: RemoteSettings
) -> Mapping[str, Any]:
    """Return the sample counts that a folder publishes for all its shards in one file, keyed by shard file name."""
    for name in _TABLES:
        table = _read_json(f"{folder}/{name}", listed, remote)
        splits = table.get("splits")
        if isinstance(splits, dict):
            counts: dict[str, Any] = {}
            for split in splits.values():
                # An unrelated file may have the same name.
                with suppress(AttributeError, KeyError, TypeError):
                    names = [Path(file).name for file in split["filenames"]]
                    counts.update(zip(names, split["shard_lengths"], strict=False))
            return counts
        if table:
            return table
    return {}


def _read_json(
    place: str, listed: Mapping[str, Version], remote: RemoteSettings
) -> Mapping[str, Any]:
    """Return the content of a JSON file, or {} if the file does not exist or has no usable content."""
    if place.startswith(BUCKETS) and place not in listed:
        return {}
    try:
        content = read_object(place, remote) if "://" in place else Path(place).read_bytes()
        tree = json.loads(content)
    except FileNotFoundError:
        return {}
    except (StoreError, OSError, ValueError) as error:
        logger.warning("%s is ignored: %s", describe(place), error)
        return {}
    return tree if isinstance(tree, dict) else {}
