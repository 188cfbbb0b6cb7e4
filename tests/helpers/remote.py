"""Settings and shard caches for tests that read shards from a local server."""

from pathlib import Path
from typing import Any

from disco_ds.config import DataSettings
from disco_ds.config.data import RemoteSettings
from disco_ds.data import Manifest
from disco_ds.data.sources.cache import ShardCache
from helpers.shards import settings

ALL = "{00000..00007}.tar"


def fetching(
    cache: Path, tries: int = 2, timeout_s: float = 20.0, **changes: Any
) -> RemoteSettings:
    derived = {"tries": tries, "timeout_s": timeout_s}
    return RemoteSettings(cache=cache, **changes).model_copy(update=derived)


def remote(shards: str, manifest: Path | None, cache: Path, **changes: Any) -> DataSettings:
    own = fetching(cache, **{"pipe": True, **changes.pop("remote", {})})
    return settings(shards, manifest=manifest, remote=own, **changes)


def open_cache(shards: Manifest, url: str, folder: Path, **changes: Any) -> ShardCache:
    urls = [f"{url}/{shard.name}" for shard in shards.shards]
    return ShardCache(urls, list(shards.shards), fetching(folder, **changes))
