"""Requests to save or to stop a run between two steps: SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) to any rank, and the clock.

A signal only sets a flag. The flags are part of the all_reduce of every step (agree in training/loop.py), so that all
ranks act after the same step. Who presses Ctrl-C once more wants the process to end at once, and it does.
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
"""A terminal sends Ctrl-C to all of a job's processes, and torchrun sends it to the ranks again: within this time it
counts once."""
_ANSWER = b"\nCtrl-C: saving after this step; once more ends at once, unsaved\n"


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
        self._interrupted: float | None = None
        """When the first Ctrl-C came."""
        for number in SIGNALS:
            # A shell starts a script's background jobs so that the Ctrl-C for others is ignored.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
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
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
                # Not print: a handler may run inside another print. A `tee` has been ended by the same Ctrl-C.
                with suppress(OSError):
                    os.write(2, _ANSWER if rank() == 0 else b"")
            elif now - self._interrupted > ONE_INTERRUPT_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
