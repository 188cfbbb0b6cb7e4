"""Checkpoints copied elsewhere by the user's command, in the background. Used by rank 0 only."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from disco_ds.config import Config
from disco_ds.distributed import comm

logger = logging.getLogger(__name__)


class Copies:
    """Runs the command for one checkpoint at a time; of those that wait, only the newest is kept.

    Args: command: with {path} and {name}, split as a shell would split it, but run without a shell; log: a file that
          receives what the command prints.
    """

    def __init__(self, command: str, log: Path):
        self.command, self.log = shlex.split(command), log
        self._running: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._next: Path | None = None

    def start(self, path: Path) -> None:
        """Copy this checkpoint as soon as no other copy runs."""
        if len(self.busy) == 2:
            logger.warning("%s is not copied: the copy before it takes longer than a save", self._next)
        self._next = path
        self.poll()

    def poll(self) -> None:
        """If no copy runs any more, start the one that waits. The training loop calls this in every step."""
        if self._running is not None:
            path, process = self._running
            code = process.poll()
            if code is None:
                return
            if code:
                problem = f"exit code {code} of {shlex.join(self._fill(path))}"
                logger.warning("%s was not copied: %s; see %s", path, problem, self.log)
            self._running = None
        if self._next is not None:
            path, self._next = self._next, None
            try:
                with self.log.open("ab") as log:
                    # In a session of its own, because signals that end the run go to process groups.
                    process = subprocess.Popen(
                        self._fill(path), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                self._running = path, process
            except OSError as error:
                logger.warning("%s was not copied: %s", path, error)

    def _fill(self, path: Path) -> list[str]:
        return [part.replace("{path}", str(path)).replace("{name}", path.name) for part in self.command]

    @property
    def busy(self) -> list[Path]:
        """Checkpoints that must stay where they are: the one that is copied, and the one that waits."""
        self.poll()
        return [path for path in (self._running and self._running[0], self._next) if path is not None]

    def wait(self, seconds: float) -> bool:
        """Wait for all copies. Returns: whether some are still to be made after so long."""
        end = time.monotonic() + seconds
        while self.busy and self._running and (left := end - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                self._running[1].wait(left)
        return bool(self.busy)

    def close(self) -> None:
        """Kill the copy that runs, and forget the one that waits."""
        for path in self.busy:
            logger.warning("%s was not copied in time", path)
        if self._running is not None:
            process = self._running[1]
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)
        self._running = self._next = None


def start_copies(config: Config, folder: Path, stack: ExitStack) -> Copies | None:
    """Start the copying of checkpoints by the user's command; on rank 0, and if there is a command."""
    if not config.checkpoint.copy_command or comm.rank() != 0:
        return None
    copies = Copies(config.checkpoint.copy_command, folder / "copies.log")
    stack.callback(copies.close)
    return copies
