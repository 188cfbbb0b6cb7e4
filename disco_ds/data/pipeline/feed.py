"""Copies of micro-batches from the workers' buffers to the device, one ahead of its use.

The life of a buffer on the host: it is granted to all producers, each of which fills its rows; received; copied to the
device; released by the loader; and granted again once the copy is complete.

Copies run on a separate stream into device buffers that are used in turn. The streams wait for each other, so the host
waits only for samples that are not decoded yet. No thread is needed: every request for a micro-batch also starts the
next copy, and under GradAccum the requests are spread over the whole step.
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
    """A process that fills some rows of every buffer: a worker, or the trainer itself."""

    def grant(self, number: int) -> None:
        """Allow it to fill this buffer, after those that were granted before."""

    def is_ready(self) -> bool:
        """Return whether `receive` would return at once."""

    def receive(self) -> Part:
        """Wait until it has filled its rows of the next buffer. Raise what reading the samples raised."""


@dataclass
class Upload:
    """A micro-batch that is being copied to the device."""

    batch: MicroBatch
    event: Any
    """Recorded after the copy."""


@dataclass
class Delivery:
    """A buffer that all producers have filled, and its copy to the device."""

    number: int
    parts: list[Part]
    upload: Upload


class Feed:
    """Micro-batches in the order in which they are produced.

    Args:
        batches: Buffers on the host.
        producers: They fill the buffers in the order in which these are granted.
        device: Where micro-batches are delivered.
        on_device: Number of micro-batches that the device holds, including the one being copied.
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
        """Device buffers, the next one to be overwritten first."""
        if device.type == "cuda":
            batches.pin()
        self._granted: deque[int] = deque()
        """Granted buffers, in order."""
        self._next: Delivery | Exception | None = None
        """What look_ahead has received for the next call of `take`."""
        self._copied_at: dict[int, Any] = {}
        """The event recorded after the last copy of each buffer."""
        self._released: list[int] = []
        """Released buffers that may still be copied."""
        for number in range(len(batches)):
            self._grant(number)

    def take(self) -> Delivery:
        """Wait for the next micro-batch. Its buffer does not change until it is released.

        Raises what `Producer.receive` raises.
        """
        # An error that look_ahead has met is raised here, where the trainer expects it.
        delivery, self._next = self._next or self._receive(), None
        if isinstance(delivery, Exception):
            raise delivery
        return delivery

    def look_ahead(self) -> None:
        """Start copying the next micro-batch if it is decoded, and grant copied buffers. Never wait."""
        self._grant_copied()
        if self._next is None and self._is_ready():
            self._next = self._receive()

    def upload(self, number: int) -> Upload:
        """Start copying a buffer to the device, over the micro-batch that was uploaded longest ago."""
        batch = self._on_device[0]
        self._on_device.rotate(-1)
        # The current stream may still be reading the old micro-batch.
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            batch.copy_(self._batches[number])
            event = self._streams.Event()
            event.record()
        self._copied_at[number] = event
        return Upload(batch, event)

    def arrive(self, upload: Upload) -> MicroBatch:
        """Return the uploaded micro-batch. The current stream waits for the copy; the host does not."""
        self._streams.current_stream().wait_event(upload.event)
        return upload.batch

    def release(self, number: int) -> None:
        """Allow the buffer to be filled again once it has been copied."""
        self._released.append(number)
        self._grant_copied()

    def close(self) -> None:
        """Wait for running copies, because their memory will be freed."""
        # RuntimeError: the device has failed.
        with suppress(RuntimeError):
            for event in self._copied_at.values():
                event.synchronize()

    def _is_ready(self) -> bool:
        return all(producer.is_ready() for producer in self._producers)

    def _receive(self) -> Delivery | Exception:
        try:
            if not self._is_ready():
                # The producers may be waiting for a buffer.
                self._grant_copied(wait=True)
            number = self._granted.popleft()
            parts = [producer.receive() for producer in self._producers]
            return Delivery(number, parts, self.upload(number))
        except Exception as error:
            return error

    def _grant_copied(self, wait: bool = False) -> None:
        """Grant released buffers whose copy is complete, since a running copy still reads its buffer."""
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
