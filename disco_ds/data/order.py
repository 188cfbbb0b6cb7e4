"""The order of the training samples as a pure function of the seed, the sources and the settings.

The order does not depend on the numbers of ranks and workers or on the size of micro-batches. This module neither reads
nor decodes any data.

A source whose samples are counted (DataOrder):

- In each epoch, the shards are randomly permuted. Their entries, concatenated in that order, form a sequence of n
  samples.
- The sequence is cut into S intervals, one for each of S slots. In an epoch, slot s owns [k n / S, (k + 1) n / S) with
  k = (s + epoch) % S. For any number of shards, every sample is therefore read once per epoch, and the lengths of the
  intervals differ by at most one sample. Because k rotates with the epoch, no slot gets ahead of the others. Within its
  interval, a slot shuffles one window of consecutive entries at a time.
- A slot reads its epochs one after another. Its cursor (epoch, offset) determines the next (shard, entry). If a sample
  is broken, the slot's next entry takes its place.
- Position p of the infinite global sequence belongs to slot p % S. After A samples have been read, a global batch of
  B samples consists of the positions [A, A + B). Of these, rank r of N takes the positions with p % N == r, in
  ascending order. N must divide S, so that every slot belongs to exactly one rank. Every such N produces the same
  global batches.

A source whose samples are not counted (WholeShards, data.index=none): the shards are permuted in each epoch. The
permutations, one after another, form an infinite sequence of visits to shards. Slot s makes the visits s, s + S,
s + 2 S, ... In a visit, it reads all samples of the shard in random order. Its cursor is (visit, offset).

Several sources (Mixture): the part of a source that belongs to one slot is called a stream. The number of a stream is
source * S + slot. A slot takes each of its samples from one of the sources. To choose the source, the interval [0, 1)
is divided into one section per source, with lengths in proportion to the weights. Sample number k of slot s comes from
the source whose section contains the number

    frac(phase(seed, s) + k * golden ratio)

The choice depends only on the weights, the seed, s and k. Multiples of the golden ratio are spread more evenly than
random numbers, so all slots advance through a source at nearly the same rate.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from disco_ds.data.counter_rng import GOLDEN, keyed_int, keyed_permutation
from disco_ds.data.errors import DataError

SLOTS = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Candidates for the default number of slots, chosen to be divisible by common world sizes."""
_IDS_PER_SHARD = 2**24
"""Number of sample ids that are reserved for each uncounted shard, because its number of samples is unknown."""

# Keys that keep different uses of random numbers independent.
_SHARDS, _WINDOW, _SEED, _PHASE = 1, 2, 3, 4
_ONE = 2**64
"""The number 1 in the fixed-point format of Mixture."""
_NOMINAL_SAMPLES = 10_000
"""Assumed number of samples in an uncounted shard. It is used only to decide which shard to prefetch first."""

Cursor = dict[int, tuple[int, int]]
"""The position from which to continue reading each stream: stream number -> (epoch, offset)."""
CountSamples = Callable[[int], int]
"""Opens a shard and returns its number of samples."""


class Entry(NamedTuple):
    """A sample of a slot."""

    cursor: tuple[int, int]
    """The slot's cursor after this sample."""
    epoch: int
    shard: int
    entry: int
    """Position of the sample in the shard."""


def divide(num_samples: int) -> list[int]:
    """Divide samples that are not stored in shards into nominal shards.

    The number of nominal shards is at most the largest default number of slots.

    Returns:
        The number of samples in each nominal shard.
    """
    num_shards = min(SLOTS[0], num_samples)
    return [
        (i + 1) * num_samples // num_shards - i * num_samples // num_shards
        for i in range(num_shards)
    ]


class DataOrder:
    """The order of a single source: the shard and entry of every sample of every slot.

    Args:
        sizes: Number of samples in each shard.
        num_slots: Number of slots, S.
        seed: Seed of all permutations.
        window: Number of consecutive entries that are shuffled together.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int, seed: int, window: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._num_samples = int(self._sizes.sum())
        enough = min(10 * self._num_samples, 10_000)
        self.searched_epochs = max(3, enough * num_slots // self._num_samples)
        """A reader gives up when it has searched more epochs than this without finding a usable sample. In a small data
        set, a slot reads only a few samples per epoch, and other ones in every epoch."""
        self._num_slots = num_slots
        self._seed = seed
        self._window = window

    def entries(self, slot: int, cursor: tuple[int, int], count: CountSamples) -> Iterator[Entry]:
        """Yield the samples of a slot from a cursor on, forever. The samples are counted, so `count` is not used."""
        epoch, offset = cursor
        while True:
            start, stop = self._interval(slot, epoch)
            while offset < stop - start:
                number, skipped = divmod(offset, self._window)
                base = start + number * self._window
                # The last window of an interval may be shorter.
                size = min(self._window, stop - base)
                order = keyed_permutation(size, self._seed, _WINDOW, epoch, slot, number)
                shards, ends = self._arrange(epoch)
                for position in base + order[skipped:]:
                    # Find the shard that covers this position in the epoch's sequence.
                    at = np.searchsorted(ends, position, side="right")
                    shard, end = int(shards[at]), int(ends[at])
                    offset += 1
                    entry = int(position) - end + int(self._sizes[shard])
                    yield Entry((epoch, offset), epoch, shard, entry)
            epoch, offset = epoch + 1, 0

    def upcoming(self, slot: int, epoch: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the shards that the slot will read, starting with its current window, forever.

        Yields:
            A pair (samples, shard). The slot does not need the shard until it has read `samples` more samples.
        """
        reached = offset // self._window * self._window
        before = -offset
        while True:
            start, stop = self._interval(slot, epoch)
            # For an empty interval, do not compute the permutation of its epoch.
            if start < stop:
                shards, ends = self._arrange(epoch)
                at = int(np.searchsorted(ends, start + reached, side="right"))
                while start + reached < stop:
                    window_start = reached // self._window * self._window
                    if self._sizes[shards[at]]:  # a missing shard has no samples
                        yield max(0, before + window_start), int(shards[at])
                    reached = int(ends[at]) - start
                    at += 1
            reached, before, epoch = 0, before + stop - start, epoch + 1

    def _interval(self, slot: int, epoch: int) -> tuple[int, int]:
        # Integer arithmetic ensures that adjacent intervals have no gap or overlap.
        k = (slot + epoch) % self._num_slots
        n, num_slots = self._num_samples, self._num_slots
        return k * n // num_slots, (k + 1) * n // num_slots

    # Slots are in different epochs only near the end of an epoch, so few results are in use at a time. Threads may
    # share this cache.
    @lru_cache(64)  # noqa: B019 - a process has few orders
    def _arrange(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's permutation of the shards, and where each shard ends in the epoch's sequence."""
        shards = keyed_permutation(len(self._sizes), self._seed, _SHARDS, epoch)
        return shards, np.cumsum(self._sizes[shards])


class WholeShards:
    """The order of uncounted shards. It has the interface of DataOrder, with visits in place of epochs.

    Args:
        num_shards: Number of shards, at least one per slot.
        num_slots: Number of slots, S.
        seed: Seed of the order.
    """

    def __init__(self, num_shards: int, num_slots: int, seed: int) -> None:
        self._num_shards, self._num_slots, self._seed = num_shards, num_slots, seed
        # Search many visits, because the samples of a shard are often similar, so a filter may drop many whole shards.
        self.searched_epochs = min(2 * num_shards, 1000)

    def entries(self, slot: int, cursor: tuple[int, int], count: CountSamples) -> Iterator[Entry]:
        """Yield the samples of a slot from a cursor on, forever.

        Raises:
            DataError: If many shards in a row contain no sample.
        """
        visit, offset = cursor
        last_used = visit
        while True:
            epoch, shard = self._find_shard(slot, visit)
            size = count(shard)
            if offset < size:
                last_used = visit
                number = visit * self._num_slots + slot
                order = keyed_permutation(size, self._seed, _WINDOW, number)
                for entry in order[offset:]:
                    offset += 1
                    yield Entry((visit, offset), epoch, shard, int(entry))
            visit, offset = visit + 1, 0
            if visit > last_used + self.searched_epochs:
                raise DataError(
                    f"slot {slot} has no complete sample in {self.searched_epochs} shards: are they tar files?"
                )

    def upcoming(self, slot: int, visit: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the shards that the slot will read, starting with that of its current visit, forever.

        Yields:
            A pair (samples, shard). The slot does not need the shard until it has read about `samples` more samples.
            The number is an estimate, because the sizes of the shards are unknown.
        """
        away = 0
        while True:
            yield away, self._find_shard(slot, visit)[1]
            visit, away = visit + 1, away + _NOMINAL_SAMPLES

    def _find_shard(self, slot: int, visit: int) -> tuple[int, int]:
        """Return the epoch and the shard of a visit. In each epoch, every shard is visited at most once."""
        epoch, position = divmod(visit * self._num_slots + slot, self._num_shards)
        return epoch, int(_permute_shards(self._num_shards, self._seed, _SHARDS, epoch)[position])


_permute_shards = lru_cache(64)(keyed_permutation)


class Mixture:
    """The combined order of one or more sources. The methods refer to a source by its index in `orders`.

    Args:
        sizes: For each source, the number of samples in each of its shards. The sample ids of each source follow those
            of the previous source.
        weights: Weight of each source. Only the ratios of the weights matter.
        num_slots: Number of slots.
        seed: Seed of the order.
        window: Number of consecutive entries that a slot shuffles together. None: the samples are not counted, and
            every slot reads whole shards.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        weights: Sequence[float],
        num_slots: int,
        seed: int,
        window: int | None,
    ) -> None:
        # Each source has a different seed, so that sources of equal size are not shuffled identically. The first source
        # keeps `seed` itself, so that its order is the same as if it were the only source.
        seeds = [seed, *(keyed_int(seed, _SEED, number) for number in range(1, len(sizes)))]
        self.orders: list[DataOrder | WholeShards]
        if window is None:
            self.orders = [
                WholeShards(len(part), num_slots, source_seed)
                for part, source_seed in zip(sizes, seeds, strict=True)
            ]
            sizes = [[_IDS_PER_SHARD] * len(part) for part in sizes]
        else:
            self.orders = [
                DataOrder(part, num_slots, source_seed, window)
                for part, source_seed in zip(sizes, seeds, strict=True)
            ]
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

    def streams(self, slots: Iterable[int]) -> list[int]:
        """Return the numbers of the streams of some slots, one for each slot and source."""
        num_sources = len(self.orders)
        return [source * self._num_slots + slot for slot in slots for source in range(num_sources)]

    def stream(self, slot: int, number: int) -> int:
        """Return the stream that supplies the slot's sample with index `number`, counted from the start of training."""
        # These are fixed-point numbers in which 2**64 represents 1, so the remainder is the fractional part.
        point = (keyed_int(self._seed, _PHASE, slot) + number * GOLDEN) % _ONE
        source = bisect_right(self._bounds, point) - 1
        return source * self._num_slots + slot

    def split(self, stream: int) -> tuple[int, int]:
        """Return the source and the slot of a stream."""
        return divmod(stream, self._num_slots)

    def upcoming(
        self, stream: int, epoch: int, offset: int
    ) -> Iterator[tuple[float, tuple[int, int]]]:
        """Yield the shards that a stream reads next if its cursor is (epoch, offset). The iterator never ends.

        Yields:
            A pair (samples, (source, shard)). The shard is needed only after the stream's slot has read about `samples`
            more samples, from all sources together.
        """
        source, slot = self.split(stream)
        share = (self._bounds[source + 1] - self._bounds[source]) / _ONE
        # Only this share of the slot's samples comes from the source. While the stream reads `away` samples, the slot
        # reads away / share samples.
        for away, shard in self.orders[source].upcoming(slot, epoch, offset):
            yield away / share, (source, shard)

    def sample_id(self, source: int, shard: int, entry: int) -> int:
        """Return the id of a sample."""
        return int(self._first_id[self._first_shard[source] + shard]) + entry
