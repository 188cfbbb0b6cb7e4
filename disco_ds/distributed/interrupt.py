"""Requests to save or to stop a run between two steps.

A request comes from SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) sent to any rank, or from a timer. A signal
only sets a flag. An all_reduce in every step (`agree` in training/step.py) shares the flags, so that
all ranks save or stop after the same step. A second Ctrl-C ends the process immediately.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

from disco_ds.distributed.comm import rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ONE_INTERRUPT_S = 2.0
"""Several SIGINTs within this time count as one Ctrl-C.

A terminal sends SIGINT to all processes of a job, and torchrun then sends it to the ranks again.
"""
_ANSWER = b"\nCtrl-C: saving after this step; press again to end at once without saving\n"


class Interrupts:
    """The requests that this rank has received, and the requests that all ranks have agreed on.

    Args:
        save_every_s: A save is requested when this many seconds have passed since the last save began; 0 disables
            these requests.
    """

    def __init__(self, save_every_s: float = 0.0) -> None:
        self.save_every_s = save_every_s
        self.since = time.monotonic()
        """When the last save began; before the first save, when the timer was started."""
        self.asked: str | None = None
        """Name of the last signal that this rank has received, or None."""
        self.save = False
        """Agreed by all ranks: save after this step."""
        self.stop = False
        """Agreed by all ranks: stop after this step."""
        self._first_interrupt: float | None = None
        """Time of the first Ctrl-C; None if there was none."""

    def listen(self) -> None:
        """Start handling signals, which from now on do not end the process. Start the timer of periodic saves."""
        self.since = time.monotonic()
        for number in SIGNALS:
            # A shell starts the background jobs of a script with SIGINT ignored. Keep it ignored.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    @property
    def is_save_due(self) -> bool:
        """Whether a periodic save is due by this rank's clock."""
        return 0 < self.save_every_s <= time.monotonic() - self.since

    def agree(self, save: bool, stop: bool) -> None:
        """Store what all ranks have agreed on. A run that stops also saves."""
        self.save = save or stop
        self.stop = stop

    def saved(self) -> None:
        """Restart the timer of periodic saves. Called when a save begins, whether or not it succeeds."""
        self.since = time.monotonic()

    def _handle(self, number: int, frame: Any) -> None:
        self.asked = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            # Not print(), because the handler may run inside another print(). Writing fails
            # if the same Ctrl-C has ended a `tee` that reads our output.
            with suppress(OSError):
                os.write(2, _ANSWER if rank() == 0 else b"")
        elif now - self._first_interrupt > ONE_INTERRUPT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
