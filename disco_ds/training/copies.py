"""Checkpoints copied elsewhere by a command of the user's, in the background. Used by rank 0 only."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


class Copies:
    """Runs the command for one checkpoint at a time; the newest of those that wait is next.

    Args: command: with {path} and {name}, split as a shell would but run without one; log: takes what it prints.
    """

    def __init__(self, command: str, log: Path):
        self.words, self.log = shlex.split(command), log
        self._process: subprocess.Popen[bytes] | None = None
        self._now: Path | None = None
        self._next: Path | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="copies", daemon=True).start()

    def start(self, path: Path) -> None:
        """Copy this checkpoint, when it is its turn."""
        with self._changed:
            if self._next is not None:
                logger.warning("%s is not copied: the copy before it takes longer than a save", self._next)
            self._next = path
            self._changed.notify_all()

    @property
    def busy(self) -> list[Path]:
        """Checkpoints that must stay where they are."""
        with self._changed:
            return [path for path in (self._now, self._next) if path is not None]

    def wait(self, seconds: float) -> bool:
        """Whether copies are still to be made after so long."""
        with self._changed:
            return not self._changed.wait_for(lambda: not (self._now or self._next), seconds)

    def close(self) -> None:
        """End what is under way."""
        for path in self.busy:
            logger.warning("%s was not copied in time", path)
        with self._changed:
            self._next = None
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._next is None:
                    self._changed.wait()
                self._now, self._next = self._next, None
            problem = self._copy(self._now)
            if problem:
                logger.warning("%s was not copied: %s; see %s", self._now, problem, self.log)
            with self._changed:
                self._now = self._process = None
                self._changed.notify_all()

    def _copy(self, path: Path) -> str | None:
        """What went wrong, or None."""
        words = [word.replace("{path}", str(path)).replace("{name}", path.name) for word in self.words]
        try:
            with self.log.open("ab") as log:
                # A session of its own: signals that end the run go to process groups.
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
                with self._changed:
                    self._process = process
                code = process.wait()
        except OSError as error:
            return str(error)
        return f"exit code {code} of {shlex.join(words)}" if code else None
