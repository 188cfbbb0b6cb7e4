"""The progress of a rank: the last mark that its host has passed, and the last one of its device.

Collectives of an accelerator are asynchronous. If the device of one rank hangs, its host continues
until it next reads from the device, exactly like the hosts of all other ranks, so only the devices
show which rank hangs. Each mark is therefore followed by an event on the device's stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A place in the training."""

    number: int
    """Number of the mark, counted from 1 and equal on all ranks; 0: before the first mark."""
    step: int
    """Steps done."""
    doing: str
    """The phase that begins here, such as "forward"."""

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}"


class Progress:
    """Host and device progress of this rank.

    The training thread sets marks; the heartbeat thread asks how far the device has come.

    Args:
        make_event: Creates a device event, such as torch.cuda.Event. None: there is no device, and the
            host does all work.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None):
        self.host = Place(0, 0, "building")
        self.device = self.host
        self.last_change = time.monotonic()
        """When the host or the device last passed a mark."""
        self._make_event = make_event
        self._pending: deque[tuple[Place, Any]] = deque()

    def mark(self, step: int, doing: str) -> None:
        """Record that the host has reached this place."""
        place = Place(self.host.number + 1, step, doing)
        if self._make_event is not None:
            event = self._make_event()
            event.record()
            self._pending.append((place, event))
        # Set the time before the place: a reader that takes the place first then never combines a
        # new place with an old time.
        self.last_change = time.monotonic()
        self.host = place

    def poll_device(self) -> None:
        """Update the device's progress without waiting. A broken device stays at its last place."""
        if self._make_event is None:
            self.device = self.host
            return
        try:
            while self._pending and self._pending[0][1].query():
                self.device = self._pending.popleft()[0]
                self.last_change = time.monotonic()
        except RuntimeError:  # the training raises it too, at its next use of the device
            pass
