"""What a rank trains on in one step: its micro-batches, read while the step goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    image: Tensor
    """[m, 3, H, W] uint8."""
    text: Tensor
    """[m, L] int64."""
    index: Tensor
    """[m] int64 sample ids."""
    epoch: Tensor
    """[m] int64."""

    def copy_(self, source: MicroBatch) -> None:
        """Copy from one of the same shape, without waiting where the hardware can."""
        for name, value in vars(self).items():
            value.copy_(getattr(source, name), non_blocking=True)

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        return MicroBatch(change(self.image), change(self.text), change(self.index), change(self.epoch))


class MicroBatches(Sequence[MicroBatch]):
    """A step's micro-batches: each is read when it is first asked for, in order, and may then be asked for again.

    Args:    read: gives the next one; again: gives micro-batch k once more; None: they are kept.
    Raises:  RuntimeError when one is asked for before those that precede it.
    """

    def __init__(self, num: int, read: Callable[[], MicroBatch], again: Callable[[int], MicroBatch] | None) -> None:
        self._num, self._read, self._again = num, read, again
        self._kept: list[MicroBatch] = []
        self.num_read = 0

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, k: Any) -> Any:
        if k not in range(self._num):
            raise IndexError(k)
        if k < self.num_read:
            return self._again(k) if self._again else self._kept[k]
        if k > self.num_read:
            raise RuntimeError(f"micro-batch {k} is asked for, {self.num_read} is due: they are read in order")
        batch = self._read()
        self.num_read += 1
        if self._again is None:
            self._kept.append(batch)
        return batch


@dataclass
class StepData:
    """A rank's part of one step; its figures are complete when the micro-batches have been read."""

    micro_batches: Sequence[MicroBatch] = ()
    error: str | None = None
    """Not None: the micro-batches are placeholders from that one on, for the collectives only."""
    wait_s: float = 0.0
    """Time the trainer waited for data."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of the samples skipped on the way to this step."""
    index: list[Tensor] = field(default_factory=list)
    """[m] int64 sample ids of each micro-batch, on the CPU."""
    cursor: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(epoch, offset) that follows, of the streams that moved."""
