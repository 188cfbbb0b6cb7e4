"""The order of samples that have not been counted (data.index=none). Each slot reads one whole shard at a time.

The shards are permuted in each epoch. The permutations, one after another, form an infinite sequence of visits to
shards. Slot s of S makes the visits s, s + S, s + 2 S, ... In a visit, it reads all samples of the shard in random
order. Its cursor is (visit, offset). The number of samples in a shard is known only once the shard is open, so only a
process that reads the shards can follow this order. The order depends only on the seed, the shards and S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from disco_ds.data.errors import DataError
from disco_ds.data.order.counter_rng import keyed_permutation

_SHARDS, _SAMPLES = 1, 2
IDS_PER_SHARD = 2**24
"""Number of sample ids that are reserved for each shard, because its number of samples is unknown."""
_NOMINAL_SAMPLES = 10_000
"""Assumed number of samples in a shard. It is used only to decide which shard to prefetch first."""


class WholeShards:
    """The order of uncounted shards. It has the interface of slots.DataOrder, with visits in place of epochs.

    Args:
        num_shards: Number of shards, at least one per slot.
        num_slots: Number of slots, S.
        seed: Seed of the order.
    """

    count: Callable[[int], int]
    """Function that opens a shard and returns its number of samples. The process that reads the shards sets it."""

    def __init__(self, num_shards: int, num_slots: int, seed: int) -> None:
        self._num_shards, self._num_slots, self._seed = num_shards, num_slots, seed
        # Search many visits, because the samples of a shard are often similar, so a filter may drop many whole shards.
        self.searched_epochs = min(2 * num_shards, 1000)
        self.searched_samples = 0

    def length(self, slot: int, visit: int) -> int:
        """Return the number of samples that a slot reads in a visit to a shard."""
        return self.count(self._shard(slot, visit))

    def settle(self, slot: int, visit: int, offset: int) -> tuple[int, int]:
        """Return the cursor (visit, offset) of the slot's next sample, which may be in a later visit.

        Raises:
            DataError: If many shards in a row contain no sample.
        """
        last = visit + self.searched_epochs
        while offset >= self.length(slot, visit):
            visit, offset = visit + 1, 0
            if visit > last:
                raise DataError(
                    f"slot {slot} has found no complete sample in {self.searched_epochs} shards: are they tar files?"
                )
        return visit, offset

    def locate(self, slot: int, visit: int, offset: int) -> tuple[int, int]:
        """Return the (shard, entry) of the sample that a slot reads at the cursor (visit, offset)."""
        shard = self._shard(slot, visit)
        number = visit * self._num_slots + slot
        return shard, int(_permute(self.count(shard), self._seed, _SAMPLES, number)[offset])

    def epoch(self, slot: int, visit: int) -> int:
        """Return the epoch to which a visit belongs. In each epoch, every shard is visited at most once."""
        return (visit * self._num_slots + slot) // self._num_shards

    def upcoming(self, slot: int, visit: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the shards that the slot will read, starting with that of its current visit, forever.

        Yields:
            A pair (samples, shard). The slot does not need the shard until it has read about `samples` more samples.
            The number is an estimate, because the sizes of the shards are unknown.
        """
        away = 0
        while True:
            yield away, self._shard(slot, visit)
            visit, away = visit + 1, away + _NOMINAL_SAMPLES

    def _shard(self, slot: int, visit: int) -> int:
        epoch, place = divmod(visit * self._num_slots + slot, self._num_shards)
        return int(_permute(self._num_shards, self._seed, _SHARDS, epoch)[place])


_permute = lru_cache(1024)(keyed_permutation)
