"""The progress of a rank: the last mark that its host process has passed, and the last that its device has passed.

Collectives on an accelerator are asynchronous. If the device of one rank hangs, the hosts of all ranks
continue until they next read from their devices. The hosts therefore do not show which rank hangs;
only the devices do. So each mark also records an event on the device's stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A place in the training."""

    number: int
    """Number of the mark, counted from 1 and the same on all ranks; 0 means before the first mark."""
    step: int
    """Number of completed steps."""
    doing: str
    """The phase that begins here, such as "forward"."""

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}"


class Progress:
    """Host and device progress of this rank.

    The training thread calls `mark`, and the heartbeat thread calls `poll_device`.

    Args:
        make_event: Creates a device event, such as torch.cuda.Event. None means that there is no device
            and the host does all the work.
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
        # Set the time before the place. The heartbeat thread reads the place before the time, so it
        # never sees a new place with an old time.
        self.last_change = time.monotonic()
        self.host = place

    def poll_device(self) -> None:
        """Update the device's progress without waiting. If the device is broken, its place does not change."""
        if self._make_event is None:
            self.device = self.host
            return
        try:
            while self._pending and self._pending[0][1].query():
                self.device = self._pending.popleft()[0]
                self.last_change = time.monotonic()
        except RuntimeError:  # the training thread gets this error too when it next uses the device
            pass
