"""Buffers for micro-batches, in memory that a rank's trainer shares with its data workers.

Each worker writes its samples directly into the right rows of a buffer, so nothing has to be concatenated or copied
between processes. The memory is a memfd. Unlike /dev/shm, a memfd has no separate size limit, and the kernel frees it
when the last process that maps it ends.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from disco_ds.data.pipeline.step_data import MicroBatch

logger = logging.getLogger(__name__)


Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The type and shape of each tensor of a micro-batch, by name."""


class SharedBatches:
    """A list of buffers that each contain one MicroBatch. Initially, they are filled with zeros.

    If this object is pickled for a process that is being started, both processes share the same memory.

    Args:
        num: Number of buffers.
        layout: The layout of each buffer, as lay_out returns it.
    """

    def __init__(self, num: int, layout: Layout) -> None:
        self._num, self._layout = num, layout
        self._fd = os.memfd_create("disco_ds")
        os.ftruncate(self._fd, num * count_bytes(layout))
        self._map()

    def __getitem__(self, number: int) -> MicroBatch:
        return self._buffers[number]

    def __len__(self) -> int:
        return len(self._buffers)

    def __getstate__(self) -> tuple[int, Layout, Any]:
        # DupFd passes the file descriptor to the process that is being started.
        return self._num, self._layout, DupFd(self._fd)

    def __setstate__(self, state: tuple[int, Layout, Any]) -> None:
        self._num, self._layout, descriptor = state
        self._fd = descriptor.detach()
        self._map()

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the CUDA device can be asynchronous."""
        self._pinned = pin(self._memory, "the data buffers")

    def close(self) -> None:
        """Unpin the memory and close its file descriptor. The memory is freed with the last tensor that uses it."""
        if self._pinned:
            unpin(self._memory)
        os.close(self._fd)

    def _map(self) -> None:
        self._pinned = False
        memory = mmap.mmap(self._fd, self._num * count_bytes(self._layout))
        self._memory: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        rows, start = {}, 0
        for name, (dtype, shape) in self._layout.items():
            stop = start + self._num * math.prod(shape) * dtype.itemsize
            rows[name] = self._memory[start:stop].view(dtype).view(self._num, *shape)
            start = stop
        self._buffers = [
            MicroBatch(**{name: field[number] for name, field in rows.items()})  # type: ignore[arg-type]
            for number in range(self._num)
        ]


def lay_out(micro_batch: int, image_size: tuple[int, int], context_length: int) -> Layout:
    """Return the layout of a micro-batch."""
    ids = torch.int64, (micro_batch,)
    return {
        "index": ids,
        "epoch": ids,
        "group_id": ids,
        "text": (torch.int64, (micro_batch, context_length)),
        # The images come last, because the other tensors must be aligned to 8 bytes.
        "image": (torch.uint8, (micro_batch, 3, *image_size)),
    }


def count_bytes(layout: Layout) -> int:
    """Return the size of a micro-batch in bytes."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())


def pin(memory: Tensor, what: str) -> bool:
    """Page-lock host memory for CUDA. If this fails, log a warning that copies will be slower.

    Args:
        memory: The memory to pin.
        what: What the memory contains, for the warning.

    Returns:
        Whether the memory was pinned.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[attr-defined]
    if error:
        # CUDA reports the error once more at the next kernel launch. Launch a kernel here to clear the error.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        logger.warning(
            "%s could not be pinned (CUDA error %d), so copies to and from the device are slower",
            what,
            error,
        )
    return error == 0


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[attr-defined]
