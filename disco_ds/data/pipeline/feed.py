"""Copies micro-batches from the workers' buffers to the device, one ahead of its use.

Copies run on a stream of their own into device buffers that are used in turn. The streams wait for each other, so the
host waits only for samples that are not decoded yet. No thread is needed: the next copy is started whenever a
micro-batch is requested, which under GradAccum happens throughout the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from disco_ds.data.pipeline.shared_batches import SharedBatches
from disco_ds.data.pipeline.step_data import MicroBatch
from disco_ds.data.pipeline.worker import Part


class Producer(Protocol):
    """One of the processes that together fill the buffers: a worker, or the trainer itself."""

    def grant(self, number: int) -> None:
        """Allow it to fill this buffer, after those granted before."""

    def is_ready(self) -> bool:
        """Whether `receive` would return at once."""

    def receive(self) -> Part:
        """Wait until it has filled its rows of the next buffer. Raises: DataError, OSError, whatever reading raises."""


@dataclass
class Upload:
    """A micro-batch on its way to the device."""

    batch: MicroBatch
    event: Any
    """Recorded after the copy."""


@dataclass
class Delivery:
    """A buffer that all producers have filled, and its copy under way."""

    number: int
    parts: list[Part]
    upload: Upload


class Feed:
    """Micro-batches in the order they are produced.

    Args:    producers: fill the buffers of `batches` in the order they are granted; on_device: number of micro-batches
             that the device holds, including the one being copied.
    """

    def __init__(
        self,
        batches: SharedBatches,
        producers: Sequence[Producer],
        device: torch.device,
        on_device: int,
    ) -> None:
        self._batches, self._producers = batches, producers
        self._streams = torch.get_device_module(device)  # on a CPU, streams do nothing
        self._stream = self._streams.Stream()
        on_device_batches = (
            batches[0].map(partial(torch.empty_like, device=device)) for _ in range(on_device)
        )
        self._on_device = deque(on_device_batches)
        """Device buffers, the next to be overwritten first."""
        if device.type == "cuda":
            batches.pin()
        self._granted: deque[int] = deque()
        """Buffers that the producers have filled or are to fill, in order."""
        self._next: Delivery | Exception | None = None
        self._copied_at: dict[int, Any] = {}
        """The event recorded after the last copy of each buffer."""
        self._leaving: list[int] = []
        """Released buffers, to be granted again as soon as they are copied."""
        for number in range(len(batches)):
            self._grant(number)

    def take(self) -> Delivery:
        """The next micro-batch, once it is decoded; its buffer is unchanged until `release`. Raises: as `receive`."""
        # An error met by look_ahead is raised here, where the trainer expects one.
        delivery = self._receive() if self._next is None else self._next
        self._next = None
        if isinstance(delivery, Exception):
            raise delivery
        return delivery

    def look_ahead(self) -> None:
        """Start copying the next micro-batch if it is decoded, and grant buffers that have been copied. Never waits."""
        self._grant_copied()
        if self._next is None and all(producer.is_ready() for producer in self._producers):
            self._next = self._receive()

    def upload(self, number: int) -> Upload:
        """Start copying a buffer to the device, where it replaces the micro-batch uploaded longest ago."""
        batch = self._on_device[0]
        self._on_device.rotate(-1)
        self._stream.wait_stream(self._streams.current_stream())  # which may still be reading it
        with self._streams.stream(self._stream):
            batch.copy_(self._batches[number])
            event = self._streams.Event()
            event.record()
        self._copied_at[number] = event
        return Upload(batch, event)

    def arrive(self, upload: Upload) -> MicroBatch:
        """The uploaded micro-batch, ready on the current stream; the host does not wait for the copy."""
        self._streams.current_stream().wait_event(upload.event)
        return upload.batch

    def release(self, number: int) -> None:
        """Allow the buffer to be filled again once it is copied."""
        self._leaving.append(number)
        self._grant_copied()

    def close(self) -> None:
        """Wait for copies under way, before their memory is freed."""
        with suppress(RuntimeError):  # the device has failed
            for event in self._copied_at.values():
                event.synchronize()

    def _receive(self) -> Delivery | Exception:
        try:
            if not all(producer.is_ready() for producer in self._producers):
                self._grant_copied(wait=True)  # the producers may have no buffer left to fill
            number = self._granted.popleft()
            parts = [producer.receive() for producer in self._producers]
            return Delivery(number, parts, self.upload(number))
        except Exception as error:
            return error

    def _grant_copied(self, wait: bool = False) -> None:
        # A copy under way still reads its buffer, which therefore must not be filled yet.
        for number in list(self._leaving):
            if wait:
                self._copied_at[number].synchronize()
            if self._copied_at[number].query():
                self._leaving.remove(number)
                self._grant(number)

    def _grant(self, number: int) -> None:
        self._granted.append(number)
        for producer in self._producers:
            producer.grant(number)
