"""One rank's data for one training step. Its micro-batches are read while the step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass, with their ids and epochs."""

    image: Tensor
    """[m, 3, H, W] uint8."""
    text: Tensor
    """[m, L] int64."""
    index: Tensor
    """[m] int64 sample ids."""
    epoch: Tensor
    """[m] int64, the epoch of each sample."""
    group_id: Tensor
    """[m] int64, the group of each sample; zeros if data.group_by is null."""
    lengths: np.ndarray | None = None
    """[m], how many tokens of each text the model needs. None: not counted. It is on the host, so reading it does not
    wait for the device."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if name != "lengths"}

    def copy_(self, source: MicroBatch) -> None:
        """Copy the tensors of `source`, which has the same shapes. The copies are asynchronous where possible."""
        for name, value in self.tensors.items():
            value.copy_(getattr(source, name), non_blocking=True)

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Apply a function to each tensor, and return the results as a micro-batch."""
        return MicroBatch(*map(change, self.tensors.values()))  # type: ignore[arg-type]


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a step. Each is read when it is first requested, and may be requested again later.

    They must be requested in order the first time.

    Args:
        num: Number of micro-batches.
        read: Function that reads the next micro-batch.
        again: Function that returns micro-batch k a second time. If it is None, this object keeps the micro-batches.
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
    """A rank's data for one step. The fields are complete once all micro-batches have been read."""

    micro_batches: Sequence[MicroBatch] = ()
    error: str | None = None
    """Description of the error, or None. All micro-batches after an error are placeholders, so that this rank still
    takes part in all collectives."""
    wait_s: float = 0.0
    """Time in seconds that the trainer waited for data."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of each broken sample that was skipped in this step."""
    dropped: int = 0
    """Number of samples that were dropped or lost in this step (see DroppedSample and LostSample)."""
    damaged: list[str] = field(default_factory=list)
    """`shard: reason` of each damaged shard that a worker found in this step."""
    num_tokens: int = 0
    """Number of tokens of all texts, as in MicroBatch.lengths; 0 if they are not counted."""
    index: list[Tensor] = field(default_factory=list)
    """Sample ids of each micro-batch, [m] int64 on the CPU."""
    cursor: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The next (epoch, offset) of every stream that this step read from, keyed by stream number."""
