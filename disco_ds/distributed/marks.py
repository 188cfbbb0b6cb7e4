"""The progress of a rank's training: the last mark that its host has passed, and the last that its device has passed.

Collectives of an accelerator are asynchronous. If the device of one rank hangs, its host continues to the next read of
the device, as the hosts of all other ranks do, so that only the devices show which rank hangs. Therefore an event on
the stream follows each mark. A mark costs two assignments and that event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

NUM_EVENTS = 16
"""Events that are used in turn. The host waits for the device in every step, so it is never as many marks ahead."""


class Event(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None:
        """Record the event on the current stream."""

    def query(self) -> bool:
        """Return True if the device has reached the last record; raise RuntimeError if the device is broken."""


class Place(NamedTuple):
    """A place in the training, as a mark names it."""

    number: int
    """Counts marks from 1, the same on all ranks; 0: before the first mark."""
    step: int
    doing: str

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}"


class _Slot:
    def __init__(self, event: Event):
        self.event = event
        self.place: Place | None = None


class Marks:
    """The marks of this rank. The training sets them, and the heartbeat's thread looks at the device.

    Args: make_event: makes an event of the accelerator; None: there is none, and the host does the work itself.
    """

    def __init__(self, make_event: Callable[[], Event] | None = None):
        self.host = self.device = Place(0, 0, "building")
        self._slots = [_Slot(make_event()) for _ in range(NUM_EVENTS)] if make_event else []
        self._moved = time.monotonic()

    def set(self, step: int, doing: str) -> None:
        """The host has reached this place."""
        place = Place(self.host.number + 1, step, doing)
        if self._slots:
            slot = self._slots[place.number % NUM_EVENTS]
            slot.event.record()
            slot.place = place  # last, because an old place with a new event only understates the progress
        self._moved = time.monotonic()
        self.host = place

    def look(self) -> None:
        """Look how far the device has come, without waiting. A broken device stays where it was last seen."""
        if not self._slots:
            self.device = self.host
            return
        for slot in self._slots:
            place = slot.place
            if place is None or place.number <= self.device.number:
                continue
            try:
                passed = slot.event.query()
            except RuntimeError:  # the training raises it too, at its next use of the device
                return
            if passed:
                self.device = place
                self._moved = time.monotonic()

    def forgive(self) -> None:
        """Restart the clock, after this process was stopped for a while."""
        self._moved = time.monotonic()

    def still_s(self, now: float) -> float:
        """Seconds since the host or the device has passed a mark."""
        return now - self._moved
