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

Shapes = dict[str, tuple[int, ...]]


class SharedBatches:
    """A list of buffers that each contain one MicroBatch, initially zero.

    When this object is pickled to a process that is being started, both processes share the same memory.

    Args:
        num: Number of buffers.
        micro_batch: Number of samples in each buffer.
        image_size: (height, width).
        context_length: Number of tokens in each text.
    """

    def __init__(
        self, num: int, micro_batch: int, image_size: tuple[int, int], context_length: int
    ) -> None:
        self._shapes = _shapes(num, micro_batch, image_size, context_length)
        self._fd = os.memfd_create("disco_ds")
        os.ftruncate(self._fd, sum(_sizes(self._shapes)))
        self._map()

    def __getitem__(self, number: int) -> MicroBatch:
        return self._buffers[number]

    def __len__(self) -> int:
        return len(self._buffers)

    def __getstate__(self) -> tuple[Shapes, Any]:
        # DupFd passes the file descriptor to the process that is being started.
        return self._shapes, DupFd(self._fd)

    def __setstate__(self, state: tuple[Shapes, Any]) -> None:
        self._shapes, descriptor = state
        self._fd = descriptor.detach()
        self._map()

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the CUDA device can be asynchronous."""
        self._pinned = pin(self._memory, "the data's buffers")

    def close(self) -> None:
        """Unpin the memory and close its file descriptor. The memory is freed with the last tensor that uses it."""
        if self._pinned:
            unpin(self._memory)
        os.close(self._fd)

    def _map(self) -> None:
        self._pinned = False
        sizes = _sizes(self._shapes)
        self._memory: Tensor = torch.frombuffer(mmap.mmap(self._fd, sum(sizes)), dtype=torch.uint8)
        fields = {}
        for part, (name, shape) in zip(
            self._memory.split(sizes), self._shapes.items(), strict=True
        ):
            fields[name] = part.view(_dtype(name)).view(shape)
        self._buffers = [
            MicroBatch(**{name: values[k] for name, values in fields.items()})
            for k in range(len(fields["index"]))
        ]


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


def batch_bytes(micro_batch: int, image_size: tuple[int, int], context_length: int) -> int:
    """Return the size of one buffer in bytes."""
    return sum(_sizes(_shapes(1, micro_batch, image_size, context_length)))


def _shapes(num: int, micro_batch: int, image_size: tuple[int, int], context_length: int) -> Shapes:
    # The images come last, because the other fields must be aligned to 8 bytes.
    return {
        "index": (num, micro_batch),
        "epoch": (num, micro_batch),
        "group_id": (num, micro_batch),
        "text": (num, micro_batch, context_length),
        "image": (num, micro_batch, 3, *image_size),
    }


def _sizes(shapes: Shapes) -> list[int]:
    return [math.prod(shape) * _dtype(name).itemsize for name, shape in shapes.items()]


def _dtype(name: str) -> torch.dtype:
    return torch.uint8 if name == "image" else torch.int64
