"""The data order of several sources: which source each sample comes from, and its position in that source.

A source is read either in the order that it would have as the only source (slots.py), or with replacement. The part of
a source that belongs to one of the S slots is called a stream. Streams are numbered source * S + slot. Each stream has
a cursor (epoch, offset). The interval [0, 1) is divided among the sources in proportion to their weights. Sample number
k of slot s comes from the source whose part of [0, 1) contains the number

    frac(phase(seed, s) + k * golden ratio)

This depends only on the seed and the position. Multiples of the golden ratio are spread more evenly than random
numbers, so all slots advance through a source at nearly the same rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count

import numpy as np

from disco_ds.data.order.counter_rng import GOLDEN, keyed_int
from disco_ds.data.order.slots import DataOrder
from disco_ds.data.order.whole_shards import WholeShards

# Keys that keep different uses of random numbers independent. slots.py uses the keys 1 and 2.
_SEED, _PHASE, _RUN, _DRAW = 3, 4, 5, 6
_ONE = 2**64
"""Represents 1 in fixed-point numbers."""


class Draws:
    """The order of a source that is drawn with replacement: the shard and entry of every draw of every slot.

    Each draw counts as a separate epoch with one sample, so that the crop and caption differ between two draws of the
    same sample. Epoch e belongs to slot e % S.

    A slot draws at random from a run, which is a sequence of consecutive entries. After as many draws as the run has
    entries, the slot chooses another run. A slot therefore reads few shards at a time. Every sample is equally likely
    in every draw, and draws from different runs are independent. A run as long as a shard usually overlaps two shards,
    so twice as many bytes are fetched as are used. With shorter runs, this ratio would be worse.

    Args:
        sizes: Number of samples in each shard.
        num_slots: Number of slots, S.
        seed: Seed of all draws.
        window: Number of entries in a run, at most the number of samples.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int, seed: int, window: int) -> None:
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
        """Number of samples before each shard, followed by the total number of samples."""
        self._num_samples = int(self._starts[-1])
        self._num_slots = num_slots
        self._seed = seed
        self._run = min(window, self._num_samples)

    def length(self, slot: int, epoch: int) -> int:
        """Return the number of entries in a run, which is the same for every slot and epoch."""
        return self._run

    def settle(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return the cursor of the slot's current draw or, if that draw has been read, of its next draw."""
        epoch += offset
        return epoch + (slot - epoch) % self._num_slots, 0

    def locate(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return the (shard, entry) that a slot draws in an epoch."""
        # The slot's draws are the epochs slot, slot + S, slot + 2 S, ..., so this is its draw number epoch // S.
        start = self._start(slot, epoch // self._num_slots // self._run)
        place = (start + keyed_int(self._seed, _DRAW, epoch) % self._run) % self._num_samples
        shard = self._find_shard(place)
        return shard, place - int(self._starts[shard])

    def upcoming(self, slot: int, epoch: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the shards of the current run, the next run, and so on, like DataOrder.upcoming."""
        draw = self.settle(slot, epoch, offset)[0] // self._num_slots
        for run in count(draw // self._run):
            place, left = self._start(slot, run), self._run
            while left > 0:
                shard = self._find_shard(place)
                yield max(0, run * self._run - draw), shard
                end = int(self._starts[shard + 1])
                left -= end - place
                # Runs wrap around: the first shard follows the last shard.
                place = end % self._num_samples

    def _start(self, slot: int, run: int) -> int:
        """Return the first entry of a slot's run, counted across all shards."""
        return keyed_int(self._seed, _RUN, slot, run) % self._num_samples

    def _find_shard(self, place: int) -> int:
        return int(np.searchsorted(self._starts, place, side="right")) - 1


Order = DataOrder | Draws | WholeShards
"""The order of one source, in each of the slots."""


class Mixture:
    """The combined order of one or more sources, which are numbered.

    Args:
        orders: The order of each source.
        sizes: For each source, the number of sample ids of each of its shards. The ids count the samples of all sources
            in order.
        weights: Weight of each source. Only the ratios of the weights matter.
        num_slots: Number of slots, S.
        seed: Seed of the mixture.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        sizes: Sequence[Sequence[int]],
        weights: Sequence[float],
        num_slots: int,
        seed: int,
    ) -> None:
        self.orders = orders
        self._num_slots = num_slots
        self._seed = seed
        # The bounds between sources are 64-bit integers, so that which source a sample comes from does not depend on
        # how a processor rounds.
        total = math.fsum(weights)
        bounds = [int(end / total * _ONE) for end in accumulate(weights)]
        self._bounds = [0, *bounds[:-1], _ONE]
        self._first_shard = [0, *accumulate(map(len, sizes))]
        # An array, because it is sent to every worker.
        self._first_id = np.cumsum([0, *(size for part in sizes for size in part)])

    def streams(self, slot: int) -> list[int]:
        """Return the numbers of a slot's streams, one for each source."""
        return [source * self._num_slots + slot for source in range(len(self.orders))]

    def stream(self, slot: int, number: int) -> int:
        """Return the stream that supplies sample `number` of a slot, counted from the start of training."""
        # These are fixed-point numbers in which 2**64 represents 1, so the remainder is the fractional part.
        point = (keyed_int(self._seed, _PHASE, slot) + number * GOLDEN) % _ONE
        source = bisect_right(self._bounds, point) - 1
        return source * self._num_slots + slot

    def split(self, stream: int) -> tuple[int, int]:
        """Return the source and the slot of a stream."""
        return divmod(stream, self._num_slots)

    def upcoming(self, stream: int, epoch: int, offset: int) -> Iterator[tuple[float, int]]:
        """Yield the shards of the stream's source that the stream reads next, endlessly.

        Yields:
            A pair (samples, shard). The stream may need the shard once its slot has read this many more samples.
        """
        source, slot = self.split(stream)
        share = (self._bounds[source + 1] - self._bounds[source]) / _ONE
        # Only this share of the slot's samples comes from the source, so the slot reads more samples before the stream
        # needs a shard.
        for away, shard in self.orders[source].upcoming(slot, epoch, offset):
            yield away / share, shard

    def sample_id(self, source: int, shard: int, entry: int) -> int:
        """Return the id of a sample."""
        return int(self._first_id[self._first_shard[source] + shard]) + entry


def mix_sources(
    sizes: Sequence[Sequence[int]],
    weights: Sequence[float],
    replacement: Sequence[bool],
    num_slots: int,
    seed: int,
    windows: Sequence[int],
) -> Mixture:
    """Return the combined order of sources whose samples are counted.

    Args:
        sizes: For each source, the number of samples in each of its shards.
        weights: Weight of each source.
        replacement: For each source, whether it is drawn with replacement.
        num_slots: Number of slots.
        seed: Seed of the order.
        windows: For each source, how many consecutive entries a slot shuffles together or, with replacement, draws
            from.
    """
    orders: list[Order] = []
    for number, part in enumerate(sizes):
        # Each source has a different seed, so that sources of equal size are not shuffled alike. The first source keeps
        # `seed` itself, so that its order is the same as if it were the only source.
        source_seed = keyed_int(seed, _SEED, number) if number else seed
        kind = Draws if replacement[number] else DataOrder
        orders.append(kind(part, num_slots, source_seed, windows[number]))
    return Mixture(orders, sizes, weights, num_slots, seed)
