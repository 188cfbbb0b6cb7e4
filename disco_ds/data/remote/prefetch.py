"""Prefetching of remote shards, in threads of the worker that will read them.

The data order determines what each slot reads next, so nothing is guessed: among all shards that the worker's streams
will need, the one that is needed first is fetched first. Prefetching is best effort. The order does not depend on it,
and if it fails, the reader fetches the shard or reports the error.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from disco_ds.data.images.broken import CacheFullError
from disco_ds.data.order.mixture import Mixture
from disco_ds.data.order.whole_shards import WholeShards
from disco_ds.data.sources.base import Source

_THREADS = 2
"""While one thread waits for an answer, the other one receives."""
_POLL_S = 0.5
_RETRY_S = 30.0
"""Pause before a shard that could not be fetched is tried again or, if the cache is full, before any shard is."""
_BUSY_S = 1.0
"""Pause after any other failure, before the next shard."""

Cursor = dict[int, tuple[int, int]]
"""The next (epoch, offset) of streams."""


class FetchAhead:
    """Prefetches shards for some streams of a data order.

    Args:
        sources: The sources of the order, which numbers their shards consecutively.
        order: The data order.
        least: Number of shards to prefetch for every stream, in addition to those that it is reading; 0: none.
    """

    def __init__(self, sources: Sequence[Source], order: Mixture | WholeShards, least: int) -> None:
        self._sources = sources
        self._order = order
        self._least = least
        self._cursor: Cursor = {}
        self._not_before: dict[int, float] = {}
        """Times before which a shard is skipped; infinity if it was fetched or is being fetched."""

    def start(self) -> None:
        """Start the threads, which end with the process, if a source has anything to prefetch."""
        if not self._least or not any(source.open_fetcher() for source in self._sources):
            return
        # The reader needs a separate order, because an order caches its last results without locks.
        self._order = copy.deepcopy(self._order)
        self._lock = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._run, daemon=True).start()

    def move(self, cursor: Cursor) -> None:
        """Set the position of the streams. The reading thread calls this."""
        self._cursor = cursor

    def find_wanted(self) -> list[int]:
        """List the shards that the streams are reading or need next, the most urgent first."""
        needed: dict[int, float] = {}
        for stream, place in self._cursor.items():
            beyond, reached = 0, 0.0
            for away, shard in self._order.upcoming(stream, *place):
                # The shards of a window are needed together.
                if away > reached and beyond >= self._least:
                    break
                needed[shard] = min(away, needed.get(shard, away))
                beyond += away > 0
                reached = away
        return sorted(needed, key=lambda shard: (needed[shard], shard))

    def _claim(self) -> int | None:
        """Return the most urgent shard that is neither fetched nor being fetched."""
        with self._lock:
            wanted = self.find_wanted()
            self._not_before = {shard: self._not_before.get(shard, 0) for shard in wanted}
            for shard in wanted:
                if time.monotonic() >= self._not_before[shard]:
                    self._not_before[shard] = math.inf
                    return shard
        return None

    def _run(self) -> None:
        fetchers = [source.open_fetcher() for source in self._sources]
        first = list(accumulate((len(source.sizes) for source in self._sources), initial=0))
        while True:
            if (shard := self._claim()) is None:
                time.sleep(_POLL_S)
                continue
            number = bisect_right(first, shard) - 1
            try:
                if (fetch := fetchers[number]) is not None:
                    fetch(shard - first[number])
            except Exception as error:
                # Custom sources may raise anything. If the failure persists, the reader reports it.
                with self._lock:
                    self._not_before[shard] = time.monotonic() + _RETRY_S
                # A full cache has no room for the other shards either; any other failure may be a busy server.
                time.sleep(_RETRY_S if isinstance(error, CacheFullError) else _BUSY_S)
