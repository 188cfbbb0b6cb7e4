"""Requests to save or to stop a run between two steps.

They come from SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) to any rank, and from the clock. A signal only
sets a flag. The flags are part of the all_reduce of every step (`agree` in training/loop.py), so
that all ranks act after the same step. A second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from disco_ds.distributed.comm import rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ONE_INTERRUPT_S = 2.0
"""Several SIGINTs within this time count as one Ctrl-C.

A terminal sends it to all processes of a job, and torchrun then sends it to the ranks again.
"""
_ANSWER = b"\nCtrl-C: saving after this step; press again to end at once without saving\n"


class Interrupts:
    """The requests that this rank has received, and those that all ranks have agreed on.

    Args:
        save_every_s: Time between two requests to save, by this rank's clock; 0 for none.
        is_writing: Returns whether this rank still writes a checkpoint in the background.
    """

    def __init__(
        self, save_every_s: float = 0.0, is_writing: Callable[[], bool] = lambda: False
    ) -> None:
        self.save_every_s = save_every_s
        self.is_writing = is_writing
        self.since = time.monotonic()
        """When the last save began."""
        self.asked: str | None = None
        """Name of the signal that was received."""
        self.save = False
        """Agreed by all ranks: save after this step."""
        self.stop = False
        """Agreed by all ranks: stop after this step."""
        self.written = True
        """Agreed by all ranks: no rank is still writing a checkpoint."""
        self._first_interrupt: float | None = None
        """Time of the first Ctrl-C."""
        for number in SIGNALS:
            # A shell starts the background jobs of a script with SIGINT ignored.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    @property
    def requests(self) -> tuple[float, float, float]:
        """(save, stop, still writing), 0 or 1 each, to be max-reduced over ranks."""
        late = 0 < self.save_every_s <= time.monotonic() - self.since
        return float(late), float(self.asked is not None), float(self.is_writing())

    def agree(self, save: bool, stop: bool, writing: bool) -> None:
        """Set what all ranks have agreed on. A run that stops also saves."""
        self.save = save or stop
        self.stop = stop
        self.written = not writing

    def saved(self) -> None:
        """Restart the clock as a save begins, whether it will succeed or not."""
        self.since = time.monotonic()

    def _handle(self, number: int, frame: Any) -> None:
        self.asked = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            # Not print(), because the handler may run inside another print(). Writing may fail
            # because the same Ctrl-C has ended a `tee` that reads our output.
            with suppress(OSError):
                os.write(2, _ANSWER if rank() == 0 else b"")
        elif now - self._first_interrupt > ONE_INTERRUPT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
