"""Micro-batches: their buffers in memory that a rank's trainer shares with its data workers, and a step's record.

Each worker writes its samples directly into the right rows of a buffer, so nothing has to be concatenated or copied
between processes. The memory is a memfd. Unlike /dev/shm, a memfd has no separate size limit, and the kernel frees it
when the last process that maps it ends.
"""

# Symbols in shapes: m samples in a micro-batch; L tokens per text.

import logging
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disco_ds.config.data import Pixels
from disco_ds.data.order import Cursor

logger = logging.getLogger(__name__)

MicroBatch = dict[str, Any]
"""The samples of one forward pass: the arrays of samples.declare_arrays by name, as tensors with m rows.

If tokens are counted, the loader adds `lengths`, a numpy array [m]: how many tokens of each text the model needs. It is
on the host, so reading it does not wait for the device."""
LEAST_AHEAD = 4
"""Minimum for the default number of micro-batches to prefetch. It applies if a step has fewer micro-batches."""


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


@dataclass(frozen=True)
class Staging:
    """Resources that a rank's data loading may use, and the device to which micro-batches are delivered."""

    kept_on: Pixels = "device"
    """Where a step's images are kept between GradAccum's two passes: in the memory of the device or of the host."""
    device: torch.device | str = "cpu"
    """Device to which micro-batches are delivered."""
    ranks_here: int | None = None
    """Number of ranks on this host. They share the host's cache of remote shards. None means that all ranks of the run
    are on this host."""
    cores: int = 2
    """Number of CPU cores available to this rank. It determines the default number of workers."""
    most_bytes: float = 2**40
    """Maximum total size in bytes of the prefetch buffers. Ignored if data.prefetch sets the number of buffers."""


@dataclass
class Report:
    """A record of reading: of a worker's rows of a micro-batch, or of all rows of a rank in a step."""

    cursor: Cursor = field(default_factory=dict)
    """The position from which to continue reading each stream whose samples were read."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of each broken sample that was skipped in the first epoch of its source."""
    dropped: int = 0
    """Number of samples that were dropped or lost (see DroppedSample and LostSample)."""
    damaged: list[str] = field(default_factory=list)
    """`shard: reason` of each shard that turned out to be damaged."""


@dataclass
class StepData(Report):
    """A record of one rank's data for one step, without the micro-batches. Loader.first_pass fills it."""

    error: str | None = None
    """Description of the error, or None. All micro-batches after an error are placeholders, so that this rank still
    takes part in all collectives."""
    wait_s: float = 0.0
    """Time in seconds that the trainer waited for data."""
    num_tokens: int = 0
    """Number of tokens of all texts, as in `lengths` of a micro-batch; 0 if they are not counted."""
    index: list[Tensor] = field(default_factory=list)
    """Sample ids of each micro-batch, [m] int64 on the CPU."""
    text: list[Tensor] | None = None
    """Tokens of each micro-batch, [m, L] int64 on the CPU; None if they are not kept."""


class SharedBatches:
    """A list of buffers that each contain one micro-batch. Initially, they are filled with zeros.

    If this object is pickled for a process that is being started, both processes share the same memory.

    Args:
        num: Number of buffers.
        rows: Number of samples in each buffer.
        sample: The arrays of each sample.
        shared: The file of another process's buffers. None: create the file.
    """

    def __init__(self, num: int, rows: int, sample: np.dtype, shared: Any = None) -> None:
        self._given = num, rows, sample
        self._fd = shared.detach() if shared else os.memfd_create("disco_ds")
        self._pinned = False
        names = sample.names or ()
        # Each buffer is a record whose fields are the arrays of a micro-batch.
        record = np.dtype([(name, sample[name], (rows,)) for name in names], align=True)
        num_bytes = num * record.itemsize
        os.ftruncate(self._fd, num_bytes)
        self._memory = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
        self.buffers: list[MicroBatch] = [
            {name: torch.from_numpy(buffer[name]) for name in names}
            for buffer in self._memory.numpy().view(record)
        ]
        for buffer in self.buffers:
            buffer["image"] = buffer["image"].movedim(-1, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        # DupFd passes the file descriptor to the process that is being started.
        return SharedBatches, (*self._given, DupFd(self._fd))

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the CUDA device can be asynchronous."""
        memory = self._memory
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[attr-defined]
        self._pinned = error == 0
        if error:
            # CUDA reports the error once more at the next kernel launch. Launch a kernel here to clear the error.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            logger.warning(
                "the data buffers could not be pinned (CUDA error %d), so copies to the device are slower",
                error,
            )

    def close(self) -> None:
        """Unpin the memory and close its file descriptor. The memory is freed with the last tensor that uses it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[attr-defined]
        os.close(self._fd)


def count_buffers(
    prefetch: int | None, num_micro_batches: int, kept_on: Pixels, num_workers: int, most: int
) -> int:
    """Return the number of micro-batch buffers that a rank needs on the host.

    These are the buffers in use (all micro-batches of a step if images are kept on the host, otherwise one) plus the
    buffers for prefetched micro-batches.

    Args:
        prefetch: Number of micro-batches to prefetch. None selects the number of micro-batches in a step, so that the
            workers are not idle during GradAccum's second pass, but at least LEAST_AHEAD and at most `most`.
        num_micro_batches: Number of micro-batches per rank in each step.
        kept_on: Where images are kept between GradAccum's two passes (see Staging).
        num_workers: Number of data workers. If it is 0, nothing is prefetched.
        most: Maximum number of micro-batches to prefetch if `prefetch` is None.
    """
    held = num_micro_batches if kept_on == "host" else 1
    if not num_workers:
        return held
    if prefetch is None:
        prefetch = max(1, min(max(num_micro_batches, LEAST_AHEAD), most))
    return held + prefetch


def count_on_device(num_micro_batches: int, kept_on: Pixels) -> int:
    """Return the number of micro-batch buffers that a rank needs on its device.

    These are the buffers in use (all micro-batches of a step if images are kept on the device, otherwise one) plus one
    buffer for the micro-batch being copied.
    """
    return 1 + (num_micro_batches if kept_on == "device" else 1)
