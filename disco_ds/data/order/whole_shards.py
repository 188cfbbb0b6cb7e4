"""The order of shards whose samples have not been counted (data.index=none): shard after shard, whole.

The epochs' permutations of the shards, one after another, are an endless sequence of visits. Slot s of S makes the
visits s, s + S, s + 2 S, ... In a visit, it reads all samples of the shard in random order. Its cursor is (visit,
offset). The number of samples in a shard is known once the shard is open, so this order can be followed only by a
process that reads the shards. Like order/slots.py, it depends on the seed and the shards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from disco_ds.data.order.counter_rng import keyed_permutation

_SHARDS, _SAMPLES = 1, 2
IDS_PER_SHARD = 2**24
"""Number of sample ids that are reserved for each shard, because its number of samples is unknown."""
_NOMINAL_SAMPLES = 10_000
"""Assumed number of samples in a shard. It serves only to rank the next shards of several slots by urgency."""


class WholeShards:
    """The order of uncounted shards. It has the interface of slots.DataOrder, with visits as epochs.

    Args:
        num_shards: Number of shards, at least one per slot.
        num_slots: Number of slots, S.
        seed: Seed of the order.
    """

    count: Callable[[int], int]
    """Returns the number of samples in a shard, which it opens. The process that reads the shards sets it."""

    def __init__(self, num_shards: int, num_slots: int, seed: int) -> None:
        self._num_shards, self._num_slots, self._seed = num_shards, num_slots, seed

    def length(self, slot: int, visit: int) -> int:
        """Return the number of samples in a visit."""
        return self.count(self._shard(slot, visit))

    def settle(self, slot: int, visit: int, offset: int) -> tuple[int, int]:
        """Return the cursor of the slot's next sample, which may be in a later visit."""
        while offset >= self.length(slot, visit):
            visit, offset = visit + 1, 0
        return visit, offset

    def locate(self, slot: int, visit: int, offset: int) -> tuple[int, int]:
        """Return the (shard, entry) at a cursor."""
        shard = self._shard(slot, visit)
        number = visit * self._num_slots + slot
        return shard, int(_permute(self.count(shard), self._seed, _SAMPLES, number)[offset])

    def upcoming(self, slot: int, visit: int, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the shards that the slot reads next, like DataOrder.upcoming, with assumed numbers of samples."""
        away = 0
        while True:
            yield away, self._shard(slot, visit)
            visit, away = visit + 1, away + _NOMINAL_SAMPLES

    def _shard(self, slot: int, visit: int) -> int:
        epoch, place = divmod(visit * self._num_slots + slot, self._num_shards)
        return int(_permute(self._num_shards, self._seed, _SHARDS, epoch)[place])


_permute = lru_cache(1024)(keyed_permutation)
