"""Tar shards that have not been counted (data.index=none). Their order is order/whole_shards.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from disco_ds.config.data import RemoteSettings
from disco_ds.data.images.broken import DataError
from disco_ds.data.remote.shard_cache import ShardCache
from disco_ds.data.remote.stores import StoreError, describe, read_size, retry
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.tar import TarReader


@dataclass(frozen=True)
class Uncounted(Source):
    """Tar shards by name, local or remote."""

    folder: Path
    names: tuple[str, ...]
    urls: tuple[str, ...] = ()
    """URLs of remote shards; empty if the shards are in the folder."""
    remote: RemoteSettings = field(default=RemoteSettings(), compare=False, repr=False)

    @property
    def sizes(self) -> list[int]:  # type: ignore[override]
        """Zeros, because the numbers of samples are unknown."""
        return [0] * len(self.names)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the names; the folder may move."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]

    def open(self, num_slots: int = 1, window: int = 1) -> TarReader:
        """Open the shards for reading in one process, see Source.open."""
        if not self.urls:
            return TarReader(self.folder, list(self.names), num_slots)
        cache = self._open_cache()
        return TarReader(cache.folder, list(self.names), num_slots, cache.open)

    def open_fetcher(self) -> Callable[[int], None] | None:
        """Return a function that fetches a remote shard into the cache, see Source.open_fetcher."""
        return self._open_cache().fetch_ahead if self.urls and self.remote.prefetch_shards else None

    def _open_cache(self) -> ShardCache:
        sizes = _RemoteSizes(self.urls, self.names, self.remote)
        return ShardCache(self.urls, self.names, sizes, self.remote)

    def label(self, shard: int, entry: int) -> str:
        """Return a name for a sample without reading anything."""
        return f"{self.names[shard]}, entry {entry}"


class _RemoteSizes(Sequence[int]):
    """Sizes of remote shards in bytes. Each is requested when it is first needed."""

    def __init__(self, urls: Sequence[str], names: Sequence[str], remote: RemoteSettings) -> None:
        self._urls, self._names, self._remote = urls, names, remote
        self._known: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def __getitem__(self, shard):  # type: ignore[no-untyped-def]
        if shard not in self._known:
            url = self._urls[shard]
            try:
                self._known[shard] = retry(
                    partial(read_size, url, self._remote.timeout_s), self._remote
                )
            except StoreError as error:
                raise DataError(
                    f"the size of shard {self._names[shard]} cannot be read from {describe(url)}: {error}"
                ) from None
        return self._known[shard]
