"""Delivery of micro-batches from the workers' buffers on the host to the device.

While a micro-batch is in use, the next one is copied.

A buffer on the host goes through this cycle. It is granted to all producers, which means that each producer may fill
its rows of the buffer. Once all producers have reported, the buffer is received, and copied to the device. The loader
releases it, and it is granted again once the copy is complete.

Copies run on a separate CUDA stream, into device buffers that are used in rotation. The streams wait for each other on
the device, so the host waits only for samples that are not decoded yet. No thread is needed: every request for a
micro-batch also starts the next copy, and with GradAccum the requests are spread over the whole step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from disco_ds.data.batches import MicroBatch, SharedBatches
from disco_ds.data.worker import InProcess, RowReport, Worker

Producer = Worker | InProcess
"""A worker process or, without workers, the trainer's own process. Each producer fills some rows of every buffer."""


@dataclass
class DeviceCopy:
    """A micro-batch that is being copied to the device."""

    number: int
    """Number of the buffer on the host."""
    batch: MicroBatch
    event: Any
    """Device event that marks the end of the copy."""
    reports: Sequence[RowReport]
    """Each producer's report on the rows that it wrote into the buffer. Empty for a repeated copy."""


class Feed:
    """Delivers micro-batches to the device in the order of the data.

    Args:
        batches: Buffers on the host.
        producers: The processes that fill the buffers. Each fills them in the order in which they are granted.
        device: Device to which micro-batches are copied.
        on_device: Number of micro-batches that the device holds at a time, including the one being copied.
    """

    def __init__(
        self,
        batches: SharedBatches,
        producers: Sequence[Producer],
        device: torch.device,
        on_device: int,
    ) -> None:
        self._batches, self._producers = batches, producers
        # On a CPU, streams do nothing.
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._on_device = deque(
            {name: torch.empty_like(array, device=device) for name, array in batches[0].items()}
            for _ in range(on_device)
        )
        """Buffers on the device. The first one is overwritten next."""
        if device.type == "cuda":
            batches.pin()
        self._granted: deque[int] = deque()
        """Numbers of the granted buffers, in the order in which they are filled."""
        self._next: DeviceCopy | Exception | None = None
        """The copy or error that look_ahead has received, to be returned or raised by the next call of `take`."""
        self._copied_at: dict[int, Any] = {}
        """For each buffer, the event that marks the end of its latest copy."""
        self._released: list[int] = []
        """Numbers of released buffers that have not been granted again. Their copies may still be running."""
        for number in range(len(batches)):
            self._grant(number)

    def take(self) -> DeviceCopy:
        """Wait until all producers have filled the next buffer, and return its copy to the device.

        The buffer on the host does not change until `release` is called.

        Raises:
            Exception: Any exception that `Producer.receive` raises.
        """
        # An error that occurred in look_ahead is raised here, where the trainer expects it.
        copy, self._next = self._next or self._receive(), None
        if isinstance(copy, Exception):
            raise copy
        return copy

    def look_ahead(self) -> None:
        """Grant released buffers whose copies are done, and start to copy the next decoded micro-batch. Never waits."""
        self._grant_copied()
        if self._next is None and self._is_ready():
            self._next = self._receive()

    def start_copy(self, number: int, reports: Sequence[RowReport] = ()) -> DeviceCopy:
        """Start copying a buffer to the device, where it overwrites the oldest micro-batch there."""
        batch = self._on_device[0]
        self._on_device.rotate(-1)
        # The current stream may still be reading the micro-batch that is overwritten.
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            for name, array in self._batches[number].items():
                batch[name].copy_(array, non_blocking=True)
            event = self._streams.Event()
            event.record()
        self._copied_at[number] = event
        return DeviceCopy(number, batch, event, reports)

    def arrive(self, copy: DeviceCopy) -> MicroBatch:
        """Return the copied micro-batch. The current stream waits for the copy; the host does not."""
        self._streams.current_stream().wait_event(copy.event)
        return copy.batch

    def release(self, number: int) -> None:
        """Allow a host buffer to be filled again once it has been copied."""
        self._released.append(number)
        self._grant_copied()

    def close(self) -> None:
        """Wait until all copies are complete, so that the host buffers can be freed."""
        # A RuntimeError means that the device has failed, so there is nothing to wait for.
        with suppress(RuntimeError):
            for event in self._copied_at.values():
                event.synchronize()

    def _is_ready(self) -> bool:
        return all(producer.is_ready() for producer in self._producers)

    def _receive(self) -> DeviceCopy | Exception:
        """Wait for the next buffer, and return its copy or the exception that was raised meanwhile."""
        try:
            if not self._is_ready():
                # The producers may be waiting for a free buffer.
                self._grant_copied(wait=True)
            number = self._granted.popleft()
            return self.start_copy(number, [producer.receive() for producer in self._producers])
        except Exception as error:
            return error

    def _grant_copied(self, wait: bool = False) -> None:
        """Grant the released buffers whose copies are complete. A buffer is still read while its copy is running.

        Args:
            wait: Wait for the copies of all released buffers.
        """
        for number in list(self._released):
            if wait:
                self._copied_at[number].synchronize()
            if self._copied_at[number].query():
                self._released.remove(number)
                self._grant(number)

    def _grant(self, number: int) -> None:
        self._granted.append(number)
        for producer in self._producers:
            producer.grant(number)
