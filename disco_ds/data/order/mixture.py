"""Several sources in one data order: which of them a sample comes from, and its place in that source.

A source keeps the slots and the order that it would have alone (order.py), or its samples are drawn with replacement.
The part of a source that belongs to a slot is a stream, number source * S + slot, with a cursor (epoch, offset) of its
own. Sample number k of slot s comes from the source whose share of [0, 1) contains the number

    frac(phase(seed, s) + k * golden ratio)

This is a function of seed and position alone and gives each source its weight. Since multiples of the golden ratio are
spread more evenly than random numbers, no slot runs far ahead of the others in a source.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count

import numpy as np

from disco_ds.data.order.counter_rng import GOLDEN, keyed_int
from disco_ds.data.order.slots import DataOrder

_SEED, _PHASE, _RUN, _DRAW = 3, 4, 5, 6


class Draws:
    """The places of the samples of every slot, drawn with replacement.

    Each draw is an epoch of its own, so that crop and caption differ between draws of the same sample: epoch e has one
    sample, of slot e % S. A slot draws from a run of consecutive entries, as many as are shuffled together without
    replacement, and takes another run after as many draws. So it reads few shards at a time, every sample is equally
    likely at every draw, and draws of different runs are independent. A run of one shard's length touches two shards,
    so that twice as much is fetched as is drawn; a shorter run would waste more.

    Args:    sizes: samples per shard; num_slots S; seed; window: length of a run.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int, seed: int, window: int) -> None:
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        self._num_slots = num_slots
        self._seed = seed
        self._run = min(window, int(self._ends[-1]))

    def length(self, slot: int, epoch: int) -> int:
        """Number of entries that are drawn from."""
        return self._run

    def settle(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """The slot's next draw, which is this one while its sample is unread."""
        epoch += offset
        return epoch + (slot - epoch) % self._num_slots, 0

    def locate(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """(shard, entry) of a draw."""
        num_samples = int(self._ends[-1])
        # Draws of a slot have the epochs slot, slot + S, slot + 2 S, ...: this is draw number epoch // S.
        start = self._start(slot, epoch // self._num_slots // self._run)
        place = (start + keyed_int(self._seed, _DRAW, epoch) % self._run) % num_samples
        shard = int(np.searchsorted(self._ends, place, side="right"))
        return shard, place - (int(self._ends[shard - 1]) if shard else 0)

    def upcoming(self, slot: int, epoch: int, offset: int) -> Iterator[tuple[int, int]]:
        """As DataOrder.upcoming: the shards of this run, of the next one, and so on."""
        num_samples, draw = (
            int(self._ends[-1]),
            self.settle(slot, epoch, offset)[0] // self._num_slots,
        )
        for run in count(draw // self._run):
            place, left = self._start(slot, run), self._run
            while left > 0:
                shard = int(np.searchsorted(self._ends, place, side="right"))
                yield max(0, run * self._run - draw), shard
                # The last shard is followed by the first.
                left -= int(self._ends[shard]) - place
                place = int(self._ends[shard]) % num_samples

    def _start(self, slot: int, run: int) -> int:
        """The first entry of a slot's run."""
        return keyed_int(self._seed, _RUN, slot, run) % int(self._ends[-1])


class Mixture:
    """The orders of one or more sources as one, with consecutive numbers for their shards and sample ids.

    Args:    sizes: samples per shard, by source; weights: share of each source, up to a factor; replacement: whether it
             is drawn with replacement; num_slots S; seed; windows: entries of a slot that are shuffled together, by
             source.
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
            # Sources of equal sizes must not be shuffled alike; the first is ordered as it would be alone.
            own = keyed_int(seed, _SEED, number) if number else seed
            self._orders.append((Draws if again else DataOrder)(part, num_slots, own, window))
        self._num_slots = num_slots
        self._seed = seed
        # Shares as 64-bit integers, so that no rounding of a processor can move a sample to another source.
        self._ends = [int(end / math.fsum(weights) * 2**64) for end in accumulate(weights)][:-1]
        self._first_shard = [0, *accumulate(map(len, sizes))]
        self._first_index = [0, *accumulate(size for part in sizes for size in part)]

    def streams(self, slot: int) -> list[int]:
        """The streams of a slot, one for each source."""
        return [source * self._num_slots + slot for source in range(len(self._orders))]

    def stream(self, slot: int, number: int) -> int:
        """The stream that the slot's sample `number`, from the run's start, comes from."""
        # In fixed point, 2^64 stands for 1, so the remainder is the fraction.
        point = (keyed_int(self._seed, _PHASE, slot) + number * GOLDEN) % 2**64
        return bisect_right(self._ends, point) * self._num_slots + slot

    def length(self, stream: int, epoch: int) -> int:
        """Number of samples of a stream in an epoch, or of those that it draws from."""
        source, slot = divmod(stream, self._num_slots)
        return self._orders[source].length(slot, epoch)

    def settle(self, stream: int, epoch: int, offset: int) -> tuple[int, int]:
        """A place of the stream; past the end of an epoch, the beginning of the next one."""
        source, slot = divmod(stream, self._num_slots)
        return self._orders[source].settle(slot, epoch, offset)

    def locate(self, stream: int, epoch: int, offset: int) -> tuple[int, int]:
        """(shard, entry) at a place of a stream."""
        source, slot = divmod(stream, self._num_slots)
        shard, entry = self._orders[source].locate(slot, epoch, offset)
        return self._first_shard[source] + shard, entry

    def upcoming(self, stream: int, epoch: int, offset: int) -> Iterator[tuple[float, int]]:
        """(number of the slot's samples after which the stream may need it, shard), as DataOrder.upcoming."""
        source, slot = divmod(stream, self._num_slots)
        ends = [0, *self._ends, 2**64]
        share = (ends[source + 1] - ends[source]) / 2**64
        # Of the slot's samples only this share comes from the source, which therefore needs its shards later.
        for away, shard in self._orders[source].upcoming(slot, epoch, offset):
            yield away / share, self._first_shard[source] + shard

    def index(self, shard: int, entry: int) -> int:
        """The sample's id: contiguous, in the order of sources and manifests."""
        return self._first_index[shard] + entry
