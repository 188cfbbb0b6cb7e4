"""The data of one step of a rank: its micro-batches, which are read while the step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are forwarded together, and where they come from."""

    image: Tensor
    """[m, 3, H, W] uint8."""
    text: Tensor
    """[m, L] int64."""
    index: Tensor
    """[m] int64 sample ids."""
    epoch: Tensor
    """[m] int64."""

    def copy_(self, source: MicroBatch) -> None:
        """Copy from a micro-batch of the same shape, asynchronously if the hardware supports it."""
        for name, value in vars(self).items():
            value.copy_(getattr(source, name), non_blocking=True)

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a micro-batch of changed tensors."""
        return MicroBatch(
            change(self.image), change(self.text), change(self.index), change(self.epoch)
        )


class MicroBatches(Sequence[MicroBatch]):
    """A step's micro-batches. Each is read at its first request, which must be in order, and may be requested again.

    Args:
        num: Number of micro-batches.
        read: Returns the next micro-batch.
        again: Returns micro-batch k once more. None: micro-batches are kept.
    """

    def __init__(
        self, num: int, read: Callable[[], MicroBatch], again: Callable[[int], MicroBatch] | None
    ) -> None:
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
        assert k == self.num_read, (
            f"micro-batch {k} is requested before micro-batch {self.num_read}"
        )
        batch = self._read()
        self.num_read += 1
        if self._again is None:
            self._kept.append(batch)
        return batch


@dataclass
class StepData:
    """A rank's share of one step. The fields are complete once all micro-batches have been read."""

    micro_batches: Sequence[MicroBatch] = ()
    error: str | None = None
    """What failed. Micro-batches after a failure are placeholders, so that all collectives still take place."""
    wait_s: float = 0.0
    """Time that the trainer waited for data."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of each broken sample that was skipped in this step."""
    index: list[Tensor] = field(default_factory=list)
    """[m] int64 sample ids of each micro-batch, on the CPU."""
    cursor: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The next (epoch, offset) of every stream that was read from."""
