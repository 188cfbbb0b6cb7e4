"""How far a rank's training has come: the last mark that its host has passed, and the last that its device has.

Collectives of an accelerator are asynchronous. Where the device of one rank hangs, its host goes on to the next read of
the device, as the hosts of all others do, and only the devices tell the ranks apart: an event on the stream follows
each mark. A mark costs two assignments and that event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

NUM_EVENTS = 16
"""Kept and used in turn. The host reads the device in every step, so that it is never as many marks ahead."""


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None:
        """Onto the current stream."""

    def query(self) -> bool:
        """Whether the device has come to where it was recorded last; raises RuntimeError where the device is broken."""


class Place(NamedTuple):
    """A mark."""

    number: int
    """Counted from 1, and the same on all ranks; 0: before the first."""
    step: int
    doing: str

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}"


class _Slot:
    def __init__(self, event: Event):
        self.event = event
        self.place: Place | None = None


class Marks:
    """The marks of this rank. One thread sets them, another looks at the device.

    Args: make_event: of an accelerator; None: there is none, and the host does the work itself.
    """

    def __init__(self, make_event: Callable[[], Event] | None = None):
        self.host = self.device = Place(0, 0, "building")
        self._slots = [_Slot(make_event()) for _ in range(NUM_EVENTS)] if make_event else []
        self._moved = time.monotonic()

    def set(self, step: int, doing: str) -> None:
        """The host has come here."""
        place = Place(self.host.number + 1, step, doing)
        if self._slots:
            slot = self._slots[place.number % NUM_EVENTS]
            slot.event.record()
            slot.place = place  # afterwards: until then the event is of a later mark than it is taken for
        self._moved = time.monotonic()
        self.host = place

    def look(self) -> None:
        """See how far the device has come. Waits for nothing; a device that is broken stays where it was last seen."""
        if not self._slots:
            self.device = self.host
            return
        for slot in self._slots:
            place = slot.place
            if place is None or place.number <= self.device.number:
                continue
            try:
                passed = slot.event.query()
            except RuntimeError:  # the training's thread raises it too, at its next use of the device
                return
            if passed:
                self.device = place
                self._moved = time.monotonic()

    def forgive(self) -> None:
        """Count anew: this process was stopped for a while."""
        self._moved = time.monotonic()

    def still_s(self, now: float) -> float:
        """Seconds since host or device have passed a mark."""
        return now - self._moved
