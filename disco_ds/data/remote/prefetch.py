"""Fetches shards before they are read, in threads beside the worker that will read them.

What a slot reads next follows from the data order, so nothing is guessed: of all shards that the worker's streams will
need, the one that is needed first is fetched first. It is a help only: the order does not depend on it, and what could
not be fetched ahead is fetched, or reported, by the reader.
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
from disco_ds.data.sources.base import Source

_THREADS = 2
"""While one waits for an answer, the other one receives."""
_POLL_S = 0.5
_LATER_S = 30.0
"""Pause after a failure: of this shard or, where the cache is full, of all."""
_BUSY_S = 1.0
"""Pause after any other failure, before the next shard."""
_NEVER = math.inf

Cursor = dict[int, tuple[int, int]]
"""The next (epoch, offset) of streams."""


def fetch_ahead(sources: Sequence[Source], order: Mixture, least: int) -> FetchAhead | None:
    """As FetchAhead; None if no source has anything to fetch."""
    return (
        FetchAhead(sources, order, least)
        if least and any(source.open_fetcher() for source in sources)
        else None
    )


class FetchAhead:
    """The shards to fetch for some streams of a data order.

    Args:    sources: whose shards the order numbers consecutively; least: number of shards for every stream, beside
             those that it reads from now.
    """

    def __init__(self, sources: Sequence[Source], order: Mixture, least: int) -> None:
        self._sources = sources
        self._order = order
        self._least = least
        self._cursor: Cursor = {}
        self._not_before: dict[int, float] = {}
        """Shards to leave alone until a time; for good, once they are fetched, or being fetched."""

    def start(self, cursor: Cursor) -> None:
        """Start the threads, which end with the process."""
        self._cursor = cursor
        # An order keeps what it has computed last, so the reader needs another one.
        self._order = copy.deepcopy(self._order)
        self._lock = threading.Lock()
        for _ in range(_THREADS):
            threading.Thread(target=self._run, daemon=True).start()

    def move(self, cursor: Cursor) -> None:
        """The streams have gone on. Called by the reading thread."""
        self._cursor = cursor

    def find_wanted(self) -> list[int]:
        """The shards that the streams need next, the most urgent first, among them those in use now."""
        needed: dict[int, float] = {}
        for stream, place in self._cursor.items():
            beyond, reached = 0, 0.0
            for away, shard in self._order.upcoming(stream, *place):
                # A window's shards are needed together.
                if away > reached and beyond >= self._least:
                    break
                needed[shard] = min(away, needed.get(shard, away))
                beyond += away > 0
                reached = away
        return sorted(needed, key=lambda shard: (needed[shard], shard))

    def _claim(self) -> int | None:
        """The most urgent shard that nothing has been done about."""
        with self._lock:
            wanted = self.find_wanted()
            self._not_before = {
                shard: self._not_before[shard] for shard in wanted if shard in self._not_before
            }
            for shard in wanted:
                if time.monotonic() >= self._not_before.get(shard, 0):
                    self._not_before[shard] = _NEVER
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
            except (
                Exception
            ) as error:  # a source of one's own may raise anything; its reader reports what lasts
                with self._lock:
                    self._not_before[shard] = time.monotonic() + _LATER_S
                # Where the cache is full there is no room for the others either; a server may be busy.
                time.sleep(_LATER_S if isinstance(error, CacheFullError) else _BUSY_S)
