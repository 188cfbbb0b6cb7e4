"""What a rank trains on in one step: its micro-batches, at hand or decoded whenever they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatch:
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        return MicroBatch(change(self.image), change(self.text), change(self.index), change(self.epoch))


class DecodedTwice(Sequence[MicroBatch]):
    """Micro-batches that nobody holds, for GradAccum: each once in order, then all but the last once more in order.

    Args:    first, again: what gives the next one in each of the two passes.
    Raises:  RuntimeError when they are asked for in another order.
    """

    def __init__(self, num: int, first: Callable[[], MicroBatch], again: Callable[[], MicroBatch]) -> None:
        self._num = num
        self._due = deque([(k, first) for k in range(num)] + [(k, again) for k in range(num - 1)])

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, k: Any) -> Any:
        if k not in range(self._num):
            raise IndexError(k)
        due, read = self._due.popleft() if self._due else (None, None)
        if read is None or due != k:
            raise RuntimeError(f"micro-batch {k} is asked for, {due} is due: each is read in order, once per pass")
        return read()

    def skip(self) -> None:
        """Read what a step that was given up has left. Raises: what `again` does."""
        while self._due:
            self._due.popleft()[1]()


@dataclass
class StepData:
    """A rank's part of one step; its figures are complete when the micro-batches have been read."""

    micro_batches: list[MicroBatch] | DecodedTwice = field(default_factory=list)
    error: str | None = None
    """Not None: the micro-batches are placeholders from that one on, for the collectives only."""
    wait_s: float = 0.0
    """Time the trainer waited for data."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of the samples skipped on the way to this step."""
    index: list[Tensor] = field(default_factory=list)
    """[m] int64 sample ids of each micro-batch."""
    cursor: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(epoch, offset) that follows, of the streams that moved."""
