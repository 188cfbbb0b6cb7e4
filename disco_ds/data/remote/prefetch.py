"""Prefetching of remote shards, in threads of the worker that will read them.

The data order determines what each slot reads next, so nothing is guessed: among all shards that the worker's streams
will need, the one that is needed first is fetched first. Prefetching is best effort. The order does not depend on it,
and if it fails, the reader fetches the shard itself or reports the error.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from disco_ds.data.errors import CacheFullError
from disco_ds.data.order import Cursor, Mixture
from disco_ds.data.sources.base import Source

_THREADS = 2
"""Number of threads per worker. While one thread waits for an answer, the other one can receive data."""
_POLL_S = 0.5
_RETRY_S = 30.0
"""Pause before a shard that could not be fetched is tried again. If the cache is full, the thread does not try any
other shard during this pause either."""
_BUSY_S = 1.0
"""Pause after a failure other than a full cache, before the next shard is fetched."""

Place = tuple[int, int]
"""A shard, as the number of its source and its number in that source."""


class FetchAhead:
    """Prefetches shards for some streams of a data order.

    Args:
        sources: The sources of the order.
        order: The data order.
        least: Minimum number of shards to prefetch for every stream, in addition to those that it is reading. If it is
            0, nothing is prefetched.
    """

    def __init__(self, sources: Sequence[Source], order: Mixture, least: int) -> None:
        self._sources = sources
        self._order = order
        self._least = least
        self._cursor: Cursor = {}
        self._not_before: dict[Place, float] = {}
        """The time before which each shard is skipped; infinity if it was fetched or is being fetched."""

    def start(self) -> None:
        """Start the threads if a source has anything to prefetch. They end with the process."""
        if not self._least or not any(source.open_fetcher() for source in self._sources):
            return
        self._lock = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._run, daemon=True).start()

    def move(self, cursor: Cursor) -> None:
        """Set the position of the streams. The reading thread calls this."""
        self._cursor = cursor

    def find_wanted(self) -> list[Place]:
        """List the (source, shard) pairs that the streams are reading or need next, the most urgent first."""
        needed: dict[Place, float] = {}
        for stream, cursor in self._cursor.items():
            source, _ = self._order.split(stream)
            beyond, reached = 0, 0.0
            for away, shard in self._order.upcoming(stream, *cursor):
                # The shards of a window are needed together, so stop only between windows.
                if away > reached and beyond >= self._least:
                    break
                place = source, shard
                needed[place] = min(away, needed.get(place, away))
                beyond += away > 0
                reached = away
        return sorted(needed, key=lambda place: (needed[place], place))

    def _claim(self) -> Place | None:
        """Choose the most urgent shard, and mark it as being fetched. Return None if no shard needs to be fetched."""
        with self._lock:
            wanted = self.find_wanted()
            self._not_before = {place: self._not_before.get(place, 0) for place in wanted}
            for place in wanted:
                if time.monotonic() >= self._not_before[place]:
                    self._not_before[place] = math.inf
                    return place
        return None

    def _run(self) -> None:
        fetchers = [source.open_fetcher() for source in self._sources]
        while True:
            if (place := self._claim()) is None:
                time.sleep(_POLL_S)
                continue
            source, shard = place
            try:
                if (fetch := fetchers[source]) is not None:
                    fetch(shard)
            except Exception as error:
                # Custom sources may raise anything. If the failure persists, the reader reports it.
                with self._lock:
                    self._not_before[place] = time.monotonic() + _RETRY_S
                # If the cache is full, no other shard fits either, so pause for a long time. After any other failure,
                # the server may be busy, so pause only briefly.
                time.sleep(_RETRY_S if isinstance(error, CacheFullError) else _BUSY_S)
