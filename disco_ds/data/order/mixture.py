"""The data order of several sources: which source a sample comes from, and its place in that source.

Each source keeps the order that it would have alone (slots.py), or its samples are drawn with replacement. The part of
a source that belongs to a slot is called a stream. Streams are numbered source * S + slot, and each has a cursor
(epoch, offset). Sample number k of slot s comes from the source whose share of [0, 1) contains the number

    frac(phase(seed, s) + k * golden ratio)

This depends only on the seed and the position, and gives each source its weight. Multiples of the golden ratio are
spread more evenly than random numbers, so within a source no slot gets far ahead of the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count

import numpy as np

from disco_ds.data.order.counter_rng import GOLDEN, keyed_int
from disco_ds.data.order.slots import DataOrder

# Keys of random numbers; slots.py uses 1 and 2.
_SEED, _PHASE, _RUN, _DRAW = 3, 4, 5, 6


class Draws:
    """The shard and entry of every sample of every slot, drawn with replacement.

    Each draw is a separate epoch with one sample, so that crop and caption differ between draws of the same sample.
    Epoch e belongs to slot e % S. A slot draws from a run of consecutive entries; after as many draws as the run has
    entries, it chooses another run. So it reads few shards at a time, every sample is equally likely in every draw, and
    draws from different runs are independent. A run as long as a shard touches two shards, so twice as many bytes are
    fetched as are used; a shorter run would waste more.

    Args:
        sizes: Number of samples in each shard.
        num_slots: S.
        seed: Seed of all draws.
        window: Number of entries in a run.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int, seed: int, window: int) -> None:
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
        """Where each shard starts, and at last the number of samples."""
        self._num_samples = int(self._starts[-1])
        self._num_slots = num_slots
        self._seed = seed
        self._run = min(window, self._num_samples)

    def length(self, slot: int, epoch: int) -> int:
        """Return the number of entries in a run."""
        return self._run

    def settle(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return the slot's current draw, or its next one if the current sample has been read."""
        epoch += offset
        return epoch + (slot - epoch) % self._num_slots, 0

    def locate(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return (shard, entry) of a draw."""
        # A slot draws in the epochs slot, slot + S, slot + 2 S, ..., so this is its draw number epoch // S.
        start = self._start(slot, epoch // self._num_slots // self._run)
        place = (start + keyed_int(self._seed, _DRAW, epoch) % self._run) % self._num_samples
        shard = self._find_shard(place)
        return shard, place - int(self._starts[shard])

    def upcoming(self, slot: int, epoch: int, offset: int) -> Iterator[tuple[int, int]]:
        """List the shards of this run, of the next run, and so on, as DataOrder.upcoming does."""
        draw = self.settle(slot, epoch, offset)[0] // self._num_slots
        for run in count(draw // self._run):
            place, left = self._start(slot, run), self._run
            while left > 0:
                shard = self._find_shard(place)
                yield max(0, run * self._run - draw), shard
                end = int(self._starts[shard + 1])
                left -= end - place
                # The first shard follows the last one.
                place = end % self._num_samples

    def _start(self, slot: int, run: int) -> int:
        """Return the first entry of a slot's run."""
        return keyed_int(self._seed, _RUN, slot, run) % self._num_samples

    def _find_shard(self, place: int) -> int:
        return int(np.searchsorted(self._starts, place, side="right")) - 1


class Mixture:
    """The combined order of one or more sources, whose shards and sample ids are numbered consecutively.

    Args:
        sizes: Number of samples in each shard, for each source.
        weights: Share of each source, up to a common factor.
        replacement: Whether a source is drawn with replacement.
        num_slots: S.
        seed: Seed of the order.
        windows: Number of entries of a slot that are shuffled together or drawn from, for each source.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        weights: Sequence[float],
        replacement: Sequence[bool],
        num_slots: int,
        seed: int,
        windows: Sequence[int],
    ) -> None:
        self._orders: list[DataOrder | Draws] = []
        for number, (part, again, window) in enumerate(
            zip(sizes, replacement, windows, strict=True)
        ):
            # Sources of equal sizes need different shuffles. The first has the order that it would have alone.
            source_seed = keyed_int(seed, _SEED, number) if number else seed
            kind = Draws if again else DataOrder
            self._orders.append(kind(part, num_slots, source_seed, window))
        self._num_slots = num_slots
        self._seed = seed
        # Shares are 64-bit integers, so that rounding on some processor cannot move a sample to another source.
        self._ends = [int(end / math.fsum(weights) * 2**64) for end in accumulate(weights)][:-1]
        self._first_shard = [0, *accumulate(map(len, sizes))]
        self._first_index = [0, *accumulate(size for part in sizes for size in part)]

    def streams(self, slot: int) -> list[int]:
        """Return the streams of a slot, one for each source."""
        return [source * self._num_slots + slot for source in range(len(self._orders))]

    def stream(self, slot: int, number: int) -> int:
        """Return the stream of the slot's sample `number`, counted from the start of the run."""
        # In fixed point, 2^64 represents 1, so the remainder is the fractional part.
        point = (keyed_int(self._seed, _PHASE, slot) + number * GOLDEN) % 2**64
        return bisect_right(self._ends, point) * self._num_slots + slot

    def length(self, stream: int, epoch: int) -> int:
        """Return the number of samples of a stream in an epoch, or the number of entries that it draws from."""
        source, slot = divmod(stream, self._num_slots)
        return self._orders[source].length(slot, epoch)

    def settle(self, stream: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return the cursor of the stream's next sample, which may be in a later epoch."""
        source, slot = divmod(stream, self._num_slots)
        return self._orders[source].settle(slot, epoch, offset)

    def locate(self, stream: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return (shard, entry) at a cursor of a stream."""
        source, slot = divmod(stream, self._num_slots)
        shard, entry = self._orders[source].locate(slot, epoch, offset)
        return self._first_shard[source] + shard, entry

    def upcoming(self, stream: int, epoch: int, offset: int) -> Iterator[tuple[float, int]]:
        """List the shards that the stream reads next, endlessly.

        Yields:
            (number of the slot's samples after which the stream may need the shard, shard).
        """
        source, slot = divmod(stream, self._num_slots)
        ends = [0, *self._ends, 2**64]
        share = (ends[source + 1] - ends[source]) / 2**64
        # Only this share of the slot's samples comes from the source, so it needs its shards later.
        for away, shard in self._orders[source].upcoming(slot, epoch, offset):
            yield away / share, self._first_shard[source] + shard

    def index(self, shard: int, entry: int) -> int:
        """Return the sample's id. Ids are consecutive, in the order of sources and manifests."""
        return self._first_index[shard] + entry
