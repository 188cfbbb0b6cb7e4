"""The data order of several sources: which source each sample comes from, and its position in that source.

The order within each source is defined by slots.py, or by whole_shards.py if its samples have not been counted. Both
divide the samples of a source among S slots. The part of a source that belongs to one slot is called a stream. The
number of a stream is source * S + slot. Each stream has a cursor (epoch, offset).

A slot takes each of its samples from one of the sources. To choose the source, the interval [0, 1) is divided into one
section per source, with lengths in proportion to the weights. Sample number k of slot s comes from the source whose
section contains the number

    frac(phase(seed, s) + k * golden ratio)

The choice depends only on the weights, the seed, s and k. Multiples of the golden ratio are spread more evenly than
random numbers, so all slots advance through a source at nearly the same rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from disco_ds.data.order.counter_rng import GOLDEN, keyed_int
from disco_ds.data.order.slots import DataOrder
from disco_ds.data.order.whole_shards import WholeShards

# Keys that keep different uses of random numbers independent. slots.py uses the keys 1 and 2.
_SEED, _PHASE = 3, 4
_ONE = 2**64
"""The number 1 in the fixed-point format of this file."""


Order = DataOrder | WholeShards
"""The order in which each slot reads the samples of one source."""
Cursor = dict[int, tuple[int, int]]
"""The position from which to continue reading each stream: stream number -> (epoch, offset)."""


class Mixture:
    """The combined order of one or more sources. The methods refer to a source by its index in `orders`.

    Args:
        orders: The order of each source.
        sizes: For each source, the number of sample ids that are reserved for each of its shards. The ids of each
            source follow those of the previous source.
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
        # The bounds between sources are 64-bit integers, so that the choice of a sample's source does not depend on how
        # a processor rounds.
        total = math.fsum(weights)
        bounds = [int(end / total * _ONE) for end in accumulate(weights)]
        self._bounds = [0, *bounds[:-1], _ONE]
        # Here, the shards of all sources are numbered consecutively. The first shard of each source, and the first
        # sample id of each shard. The ids are an array, because a long list is slow to pickle for the workers.
        self._first_shard = [0, *accumulate(map(len, sizes))]
        self._first_id = np.cumsum([0, *(size for part in sizes for size in part)])

    def streams(self, slot: int) -> list[int]:
        """Return the numbers of a slot's streams, one for each source."""
        return [source * self._num_slots + slot for source in range(len(self.orders))]

    def stream(self, slot: int, number: int) -> int:
        """Return the stream that supplies the slot's sample with index `number`, counted from the start of training."""
        # These are fixed-point numbers in which 2**64 represents 1, so the remainder is the fractional part.
        point = (keyed_int(self._seed, _PHASE, slot) + number * GOLDEN) % _ONE
        source = bisect_right(self._bounds, point) - 1
        return source * self._num_slots + slot

    def split(self, stream: int) -> tuple[int, int]:
        """Return the source and the slot of a stream."""
        return divmod(stream, self._num_slots)

    def upcoming(self, stream: int, epoch: int, offset: int) -> Iterator[tuple[float, int]]:
        """Yield the shards that a stream reads next if its cursor is (epoch, offset). The iterator never ends.

        Yields:
            A pair (samples, shard). The shard is needed only after the stream's slot has read about `samples` more
            samples, from all sources together.
        """
        source, slot = self.split(stream)
        share = (self._bounds[source + 1] - self._bounds[source]) / _ONE
        # Only this share of the slot's samples comes from the source. While the stream reads `away` samples, the slot
        # reads away / share samples.
        for away, shard in self.orders[source].upcoming(slot, epoch, offset):
            yield away / share, shard

    def sample_id(self, source: int, shard: int, entry: int) -> int:
        """Return the id of a sample."""
        return int(self._first_id[self._first_shard[source] + shard]) + entry


def mix_sources(
    sizes: Sequence[Sequence[int]],
    weights: Sequence[float],
    num_slots: int,
    seed: int,
    window: int,
) -> Mixture:
    """Return the combined order of sources whose samples are counted.

    Args:
        sizes: For each source, the number of samples in each of its shards.
        weights: Weight of each source.
        num_slots: Number of slots.
        seed: Seed of the order.
        window: Number of consecutive entries that a slot shuffles together.
    """
    # Each source has a different seed, so that sources of equal size are not shuffled identically. The first source
    # keeps `seed` itself, so that its order is the same as if it were the only source.
    seeds = [seed, *(keyed_int(seed, _SEED, number) for number in range(1, len(sizes)))]
    orders = [
        DataOrder(part, num_slots, source_seed, window)
        for part, source_seed in zip(sizes, seeds, strict=True)
    ]
    return Mixture(orders, sizes, weights, num_slots, seed)
