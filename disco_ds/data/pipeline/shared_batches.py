"""Buffers for micro-batches, in memory shared by a rank's trainer and its data workers.

Every worker writes its samples directly to their rows, so no parts have to be joined or copied. The memory is a memfd:
unlike /dev/shm it has no size limit of its own, and the kernel frees it when the last process that maps it ends.
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


class SharedBatches:
    """`num` buffers of one MicroBatch each, initially zero; pickled to a process being started, they are shared."""

    def __init__(
        self, num: int, micro_batch: int, image_size: tuple[int, int], context_length: int
    ) -> None:
        self._shapes = _shapes(num, micro_batch, image_size, context_length)
        self._pinned = False
        self._fd = os.memfd_create("disco_ds")
        os.ftruncate(self._fd, sum(_sizes(self._shapes)))
        self._map()

    def __getitem__(self, number: int) -> MicroBatch:
        return self._buffers[number]

    def __len__(self) -> int:
        return len(self._buffers)

    def __getstate__(self) -> tuple[dict[str, tuple[int, ...]], Any]:
        # DupFd hands the descriptor to the process being started.
        return self._shapes, DupFd(self._fd)

    def __setstate__(self, state: tuple[dict[str, tuple[int, ...]], Any]) -> None:
        self._shapes, descriptor = state
        self._pinned, self._fd = False, descriptor.detach()
        self._map()

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the CUDA device are asynchronous; without that they are slower."""
        self._pinned = pin(self._memory, "the data's buffers")

    def close(self) -> None:
        """Unpin the memory; it is freed with the last tensor that uses it."""
        if self._pinned:
            unpin(self._memory)
            self._pinned = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _map(self) -> None:
        sizes = _sizes(self._shapes)
        self._memory = torch.frombuffer(mmap.mmap(self._fd, sum(sizes)), dtype=torch.uint8)
        fields = {
            name: part.view(_type(name)).view(shape)
            for part, (name, shape) in zip(
                self._memory.split(sizes), self._shapes.items(), strict=True
            )
        }
        num = self._shapes["index"][0]
        self._buffers = [
            MicroBatch(**{name: field[k] for name, field in fields.items()}) for k in range(num)
        ]


def pin(memory: Tensor, what: str) -> bool:
    """Page-lock host memory for CUDA. Returns: whether it could be; else `what` is named in a warning."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[attr-defined]
    if error:
        with suppress(
            RuntimeError
        ):  # clears the error, which CUDA would otherwise report for the next kernel
            torch.zeros(1, device="cuda")
        logger.warning(
            "%s could not be pinned (CUDA error %d): copies to and from the device wait",
            what,
            error,
        )
    return error == 0


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[attr-defined]


def batch_bytes(micro_batch: int, image_size: tuple[int, int], context_length: int) -> int:
    """Size of one buffer in bytes."""
    return sum(_sizes(_shapes(1, micro_batch, image_size, context_length)))


def _shapes(
    num: int, micro_batch: int, image_size: tuple[int, int], context_length: int
) -> dict[str, tuple[int, ...]]:
    return {
        "index": (num, micro_batch),
        "epoch": (num, micro_batch),
        "text": (num, micro_batch, context_length),
        "image": (num, micro_batch, 3, *image_size),  # last: the others need their 8 bytes aligned
    }


def _sizes(shapes: dict[str, tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) * _type(name).itemsize for name, shape in shapes.items()]


def _type(name: str) -> torch.dtype:
    return torch.uint8 if name == "image" else torch.int64
