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
from functools import partial
from typing import Any

import torch

from disco_ds.data.pipeline.shared_batches import SharedBatches
from disco_ds.data.pipeline.step_data import MicroBatch
from disco_ds.data.pipeline.worker import Part
from disco_ds.data.pipeline.worker_process import InProcess, Worker

Producer = Worker | InProcess
"""A worker process or, without workers, the trainer's own process. Each producer fills some rows of every buffer."""


@dataclass
class Upload:
    """A micro-batch that is being copied to the device."""

    number: int
    """Number of the buffer on the host."""
    batch: MicroBatch
    event: Any
    """Device event that marks the end of the copy."""
    parts: Sequence[Part]
    """Each producer's report on the rows that it has written into the buffer. Empty if the buffer is copied again."""


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
        allocate = partial(torch.empty_like, device=device)
        self._on_device = deque(batches[0].map(allocate) for _ in range(on_device))
        """Buffers on the device. The first one is overwritten next."""
        if device.type == "cuda":
            batches.pin()
        self._granted: deque[int] = deque()
        """Numbers of the granted buffers, in the order in which they are filled."""
        self._next: Upload | Exception | None = None
        """The upload or error that look_ahead has received, to be returned or raised by the next call of `take`."""
        self._copied_at: dict[int, Any] = {}
        """For each buffer, the event that marks the end of its latest copy."""
        self._released: list[int] = []
        """Numbers of released buffers that have not been granted again. Their copies may still be running."""
        for number in range(len(batches)):
            self._grant(number)

    def take(self) -> Upload:
        """Wait until all producers have filled the next buffer, and return its upload to the device.

        The buffer on the host does not change until `release` is called.

        Raises:
            Exception: Any exception that `Producer.receive` raises.
        """
        # An error that occurred in look_ahead is raised here, where the trainer expects it.
        upload, self._next = self._next or self._receive(), None
        if isinstance(upload, Exception):
            raise upload
        return upload

    def look_ahead(self) -> None:
        """Grant released buffers whose copies are done, and start to copy the next decoded micro-batch. Never waits."""
        self._grant_copied()
        if self._next is None and self._is_ready():
            self._next = self._receive()

    def upload(self, number: int, parts: Sequence[Part] = ()) -> Upload:
        """Start copying a buffer to the device, where it overwrites the micro-batch that was uploaded longest ago."""
        batch = self._on_device[0]
        self._on_device.rotate(-1)
        # The current stream may still be reading the micro-batch that is overwritten.
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            batch.copy_(self._batches[number])
            event = self._streams.Event()
            event.record()
        self._copied_at[number] = event
        return Upload(number, batch, event, parts)

    def arrive(self, upload: Upload) -> MicroBatch:
        """Return the uploaded micro-batch. The current stream waits for the copy; the host does not."""
        self._streams.current_stream().wait_event(upload.event)
        return upload.batch

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

    def _receive(self) -> Upload | Exception:
        """Wait for the next buffer, and return its upload or the exception that was raised meanwhile."""
        try:
            if not self._is_ready():
                # The producers may be waiting for a free buffer.
                self._grant_copied(wait=True)
            number = self._granted.popleft()
            return self.upload(number, [producer.receive() for producer in self._producers])
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
