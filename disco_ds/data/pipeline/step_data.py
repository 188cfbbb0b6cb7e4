"""One rank's data for one training step: the micro-batches, and a record of what was read and skipped."""

# Symbols in shapes: m samples in a micro-batch; H x W pixels; L tokens per text; D is the width of stored embeddings.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from disco_ds.data.order.mixture import Cursor


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass, with their ids and epochs."""

    image: Tensor
    """[m, 3, H, W] uint8."""
    text: Tensor
    """[m, L] int64 tokens."""
    index: Tensor
    """[m] int64 sample ids."""
    epoch: Tensor
    """[m] int64, the epoch of each sample."""
    group_id: Tensor
    """[m] int64, the group of each sample; zeros if data.group_by is null."""
    lengths: np.ndarray | None = None
    """[m], how many tokens of each text the model needs; None if they are not counted. The array is on the host, so
    reading it does not wait for the device."""
    teacher_text: Tensor | None = None
    """[m, L'] int64, the tokens of a teacher whose tokenizer differs from the model's; None if there is none."""
    stored: Tensor | None = None
    """[m, 2 + D] int64, the packed embeddings of a teacher (see stored.unpack); None if there are none."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that every micro-batch has, by name."""
        others = ("lengths", "teacher_text", "stored")
        return {name: value for name, value in vars(self).items() if name not in others}

    def copy_(self, source: MicroBatch) -> None:
        """Copy the tensors of `source`, which has the same shapes. The copies are asynchronous where possible."""
        for name, value in self.tensors.items():
            value.copy_(getattr(source, name), non_blocking=True)

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Apply a function to each tensor, and return the results as a micro-batch."""
        return MicroBatch(*map(change, self.tensors.values()))  # type: ignore[arg-type]


@dataclass
class StepData:
    """A record of one rank's data for one step: ids, errors, waiting time and positions, but not the micro-batches.

    Loader.first_pass fills it.
    """

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
    text: list[Tensor] | None = None
    """Tokens of each micro-batch, [m, L] int64 on the CPU; None if they are not kept."""
    cursor: Cursor = field(default_factory=dict)
    """The position from which to continue reading each stream that this step read from."""
