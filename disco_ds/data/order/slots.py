"""The order of the training samples as a pure function of (seed, shard sizes, number of slots, window).

The order does not depend on the numbers of ranks and workers or on the size of micro-batches. This module neither reads
nor decodes any data.

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
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from disco_ds.data.order.counter_rng import keyed_permutation

SLOTS = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Candidates for the default number of slots, chosen to be divisible by common world sizes."""

# Keys that make the random permutations of shards and of windows independent of each other.
_SHARDS, _WINDOW = 1, 2
_EPOCHS_KEPT = 4
"""Number of epochs whose shard permutations are cached. A few suffice, because slots are in different epochs only
near the end of an epoch."""


def estimate_open_shards(num_shards: int, num_samples: int, window: int) -> int:
    """Estimate how many shards a slot reads at a time.

    This is the window divided by the mean number of samples per shard, rounded up, plus one, because a window may start
    in the middle of a shard.
    """
    return math.ceil(window * num_shards / num_samples) + 1


class DataOrder:
    """The order of a single source: the shard and entry of every sample of every slot.

    Args:
        sizes: Number of samples in each shard.
        num_slots: Number of slots, S.
        seed: Seed of all permutations.
        window: Number of consecutive entries that are shuffled together.
    """

    searched_epochs = 3
    """A reader gives up when it has searched both this many epochs and `searched_samples` samples without finding a
    usable sample. Both limits are needed: a slot reads different samples in every epoch, and in a small data set it
    reads only a few samples per epoch."""

    def __init__(self, sizes: Sequence[int], num_slots: int, seed: int, window: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._num_samples = int(self._sizes.sum())
        self.searched_samples = min(10 * self._num_samples, 10_000)
        self._num_slots = num_slots
        self._seed = seed
        self._window = window
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._windows: dict[int, tuple[tuple[int, int], np.ndarray]] = {}

    def length(self, slot: int, epoch: int) -> int:
        """Return the number of samples that a slot reads in an epoch."""
        start, stop = self._interval(slot, epoch)
        return stop - start

    def settle(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return the cursor of the slot's next sample.

        At the end of an epoch, this is the start of the next epoch in which the slot has samples.
        """
        # This is a loop because in a very small data set a slot may have no samples in an epoch.
        while offset >= self.length(slot, epoch):
            epoch, offset = epoch + 1, 0
        return epoch, offset

    def locate(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """Return the (shard, entry) of the sample that a slot reads at the cursor (epoch, offset)."""
        start, stop = self._interval(slot, epoch)
        number = offset // self._window
        base = start + number * self._window
        # The last window of an interval may be shorter.
        shuffled = self._shuffle(slot, epoch, number, min(self._window, stop - base))
        place = base + int(shuffled[offset % self._window])
        # Find the shard that covers this place in the epoch's sequence.
        shards, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, place, side="right"))
        shard = int(shards[at])
        return shard, place - int(ends[at]) + int(self._sizes[shard])

    def epoch(self, slot: int, epoch: int) -> int:
        """Return the epoch of a cursor."""
        return epoch

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
                shards, ends = self._epoch(epoch)
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

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's permutation of the shards, and where each shard ends in the epoch's sequence."""
        if epoch not in self._epochs:
            shards = keyed_permutation(len(self._sizes), self._seed, _SHARDS, epoch)
            self._epochs[epoch] = (shards, np.cumsum(self._sizes[shards]))
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _shuffle(self, slot: int, epoch: int, number: int, size: int) -> np.ndarray:
        # Cache only the permutation of each slot's current window, because a slot reads its windows in order.
        kept = self._windows.get(slot)
        if kept is None or kept[0] != (epoch, number):
            order = keyed_permutation(size, self._seed, _WINDOW, epoch, slot, number)
            self._windows[slot] = kept = ((epoch, number), order)
        return kept[1]


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


@dataclass(frozen=True)
class Share:
    """A rank's share of every global batch. It must be a whole number of micro-batches."""

    rank: int
    size: int
    """Number of ranks."""
    global_batch: int
    micro_batch: int

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per rank in each step."""
        return self.global_batch // self.size // self.micro_batch
