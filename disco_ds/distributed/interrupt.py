"""Requests to save or to stop a run between two steps: SIGTERM or SIGUSR1 to any rank, and the clock.

A signal only sets a flag. The flags are part of the all_reduce of every step (agree in training/loop.py), so that all
ranks act after the same step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """This rank's requests, and those that all ranks have agreed on.

    Args: save_every_s: time between two requests to save, by this rank's clock; 0: none.
    """

    def __init__(self, save_every_s: float = 0.0):
        self.save_every_s = save_every_s
        self.since = time.monotonic()
        self.asked: str | None = None
        """The signal that was received."""
        self.save = self.stop = False
        """Agreed by all ranks for the step at hand."""
        self.writing: Callable[[], bool] = lambda: False
        """Whether this rank still writes a checkpoint beside the training."""
        self.written = True
        """Agreed: no rank does."""
        for number in SIGNALS:
            signal.signal(number, self._ask)

    @property
    def requests(self) -> tuple[float, float, float]:
        """(save, stop, still writing), 0 or 1 each, to take the maximum of over ranks."""
        late = 0 < self.save_every_s <= time.monotonic() - self.since
        return float(late), float(self.asked is not None), float(self.writing())

    def agree(self, save: bool, stop: bool, writing: bool) -> None:
        """Set what all ranks have agreed on; a run that stops saves first."""
        self.save, self.stop, self.written = save or stop, stop, not writing

    def saved(self) -> None:
        """Start the clock of the next save, as this one begins, whether it succeeds or not."""
        self.since = time.monotonic()

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = signal.Signals(number).name
