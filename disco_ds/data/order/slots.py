"""The order of the training samples: a pure function of (seed, shard sizes, slots, window).

It does not depend on ranks, workers or micro-batches. Nothing is read or decoded here.

- An epoch permutes the shards and lays their entries end to end: a sequence of n samples.
- S logical slots cut that sequence: slot s owns [k n / S, (k + 1) n / S) with k = (s + epoch) % S. So every sample
  comes once per epoch, no slot needs shards of its own (any number of shards will do), slots differ by at most one
  sample, and since k moves on, no slot runs ahead of the others over the epochs. Inside its interval a slot shuffles
  the entries of one window at a time.
- A slot's stream goes through the epochs one after another; its cursor is (epoch, offset), from which (shard, entry)
  follows. A broken sample is skipped inside its slot: the slot's next entry takes its place.
- Position p of the endless global sequence belongs to slot p % S. Global batch t is the positions [t B, (t + 1) B);
  rank r of N takes those with p % N == r, in ascending order. N divides S, so each slot has one rank at a time, and
  any N that divides S sees the same global batches.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from disco_ds.data.order.counter_rng import keyed_permutation

SLOTS = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Default numbers of slots: divisible by most world sizes."""

_SHARDS, _WINDOW = 1, 2
_EPOCHS_KEPT = 4


def count_at_hand(num_shards: int, num_samples: int, window: int) -> int:
    """Number of shards that a slot reads at a time: those of a window, and one more where it begins inside a shard."""
    return math.ceil(window * num_shards / num_samples) + 1


class DataOrder:
    """The places of the samples of every slot.

    Args:    sizes: samples per shard; num_slots S; seed; window: entries shuffled together.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int, seed: int, window: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.num_samples = int(self.sizes.sum())
        self.num_slots = num_slots
        self.seed = seed
        self.window = window
        self.first_index = np.concatenate([[0], np.cumsum(self.sizes)])
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._windows: dict[int, tuple[tuple[int, int], np.ndarray]] = {}

    def length(self, slot: int, epoch: int) -> int:
        """Number of samples of a slot in an epoch."""
        start, stop = self._interval(slot, epoch)
        return stop - start

    def settle(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """The place itself or, past the end of the slot's epoch, the beginning of its next epoch that has samples."""
        # A loop, because in a data set of few samples a slot may have none in an epoch.
        while offset >= self.length(slot, epoch):
            epoch, offset = epoch + 1, 0
        return epoch, offset

    def locate(self, slot: int, epoch: int, offset: int) -> tuple[int, int]:
        """(shard, entry) of a slot's sample number `offset` in an epoch."""
        start, stop = self._interval(slot, epoch)
        if not 0 <= offset < stop - start:
            raise IndexError(
                f"slot {slot} has {stop - start} samples in epoch {epoch}, got offset {offset}"
            )
        number = offset // self.window
        base = start + number * self.window
        # The last window of an interval is shorter.
        place = base + int(
            self._shuffle(slot, epoch, number, min(self.window, stop - base))[offset % self.window]
        )
        # From the place in the epoch's sequence to the shard that covers it.
        shards, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, place, side="right"))
        shard = int(shards[at])
        return shard, place - int(ends[at]) + int(self.sizes[shard])

    def index(self, shard: int, entry: int) -> int:
        """The sample's id: contiguous, in the manifest's order."""
        return int(self.first_index[shard]) + entry

    def upcoming(self, slot: int, epoch: int, offset: int) -> Iterator[tuple[int, int]]:
        """(number of samples after which the slot may need it, shard) for every shard that it reads from the window of
        this place on, without an end."""
        first, base = offset // self.window * self.window, -offset
        while True:
            start, stop = self._interval(slot, epoch)
            if start < stop:  # else the epoch's permutation, of a small source, is of no use
                shards, ends = self._epoch(epoch)
                at = int(np.searchsorted(ends, start + first, side="right"))
                while start + first < stop:
                    yield max(0, base + first // self.window * self.window), int(shards[at])
                    first, at = int(ends[at]) - start, at + 1
            first, base, epoch = 0, base + stop - start, epoch + 1

    def _interval(self, slot: int, epoch: int) -> tuple[int, int]:
        # Integers throughout: the ends of neighboring slots meet exactly, whatever the number of samples.
        k = (slot + epoch) % self.num_slots
        return k * self.num_samples // self.num_slots, (k + 1) * self.num_samples // self.num_slots

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of the shards, and where each ends in the epoch's sequence."""
        if epoch not in self._epochs:
            # Slots are in different epochs only near an epoch's end, so that a few permutations suffice.
            shards = keyed_permutation(len(self.sizes), self.seed, _SHARDS, epoch).numpy()
            self._epochs[epoch] = (shards, np.cumsum(self.sizes[shards]))
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _shuffle(self, slot: int, epoch: int, number: int, size: int) -> np.ndarray:
        # Only the current window of each slot is kept, since a slot reads its windows in order.
        kept = self._windows.get(slot)
        if kept is None or kept[0] != (epoch, number):
            order = keyed_permutation(size, self.seed, _WINDOW, epoch, slot, number).numpy()
            self._windows[slot] = kept = ((epoch, number), order)
        return kept[1]


def divide(num_samples: int) -> list[int]:
    """Sizes of nominal shards for samples that are not in shards: enough for the largest default number of slots."""
    num_shards = min(SLOTS[0], num_samples)
    return [
        (i + 1) * num_samples // num_shards - i * num_samples // num_shards
        for i in range(num_shards)
    ]


@dataclass(frozen=True)
class Share:
    """A rank's share of every global batch. Raises: ValueError unless it consists of whole micro-batches."""

    rank: int
    size: int
    """Number of ranks."""
    global_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.global_batch % (self.size * self.micro_batch):
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of ranks x micro_batch "
                f"({self.size} x {self.micro_batch})"
            )

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch // self.size // self.micro_batch


def choose_slots(
    num_shards: int, num_samples: int, requested: int | None, ranks: int, default: int | None = None
) -> int:
    """The number of slots of a data set. It does not depend on the number of ranks, which only has to divide it.

    Args:    requested: data.slots; None: the default; default: None: the largest of SLOTS that does not exceed the
             number of shards.
    Raises:  ValueError naming the numbers of slots that work.
    """
    default = default or next(slots for slots in SLOTS if slots <= num_shards)
    slots = default if requested is None else requested
    if slots > num_samples:
        raise ValueError(
            f"data.slots is {slots} and the data set has {num_samples} samples; "
            f"every slot needs one: set data.slots to at most {num_samples}"
        )
    if slots % ranks == 0:
        return slots
    known = "set by data.slots" if requested is not None else f"the default for {num_shards} shards"
    below = slots // ranks * ranks
    nearest = [count for count in (below, below + ranks) if 0 < count <= num_samples]
    if not nearest:
        raise ValueError(
            f"{ranks} ranks cannot share {num_samples} samples: use at most {num_samples} ranks"
        )
    raise ValueError(
        f"the data order has {slots} slots ({known}), not a multiple of {ranks} ranks; "
        f"set data.slots={' or data.slots='.join(map(str, nearest))}"
        + ("" if requested is not None else ", or cut the data into more shards")
    )
