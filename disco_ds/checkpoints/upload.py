"""Run the user's command (checkpoint.copy_command) on each new checkpoint, in the background. Rank 0 only."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from disco_ds.checkpoints.retention import list_complete, warn_once

LOG = "copies.log"
"""File in the run folder that receives the output of checkpoint.copy_command."""
HANDLED = "copied"
"""Empty file in a checkpoint whose upload has succeeded, failed or been skipped.

A resumed run uploads checkpoints that lack this file.
"""
POLL_S = 0.1
"""Seconds between two checks of whether an upload has ended, while waiting for uploads."""
logger = logging.getLogger(__name__)


class Uploads:
    """Uploads checkpoints one at a time. If several wait for the current upload, only the newest of them is uploaded.

    If rank 0 is killed, its upload keeps running. The upload's processes inherit the log file as their
    output and, with it, a lock on that file. The resumed run therefore does not start an upload before
    the old upload has ended. Because nothing records whether the old upload succeeded, the resumed run
    then uploads that checkpoint again.

    Args:
        command: The user's command, in which {path} and {name} stand for the path and name of the checkpoint.
            It is split into words as in a shell, but runs without a shell.
        folder: The run folder.
    """

    def __init__(self, command: str, folder: Path):
        self.command = shlex.split(command)
        self.log = folder / LOG
        self.pending: list[Path] = []
        """Checkpoints that must not be removed: the one being uploaded, and then at most one that is waiting."""
        self._process: subprocess.Popen[bytes] | None = None
        """Process that uploads pending[0]; None if no upload has been started."""
        for path in list_complete(folder):
            if not (path / HANDLED).exists():
                self.add(path)

    def add(self, path: Path) -> None:
        """Queue a checkpoint for upload. It replaces a checkpoint that is still waiting."""
        self.advance()
        if len(self.pending) > 1:
            self._finish(
                self.pending[1], f"{path.name} replaces it while another is being uploaded"
            )
        self.pending.append(path)
        self.advance()

    def advance(self) -> None:
        """Start the next upload unless one is still running. Called at every step."""
        try:
            if self._process is not None:
                code = self._process.poll()
                if code is None:
                    return
                self._process = None
                self._finish(self.pending[0], f"exit code {code}; see {self.log}" if code else "")
            if self.pending:
                self._start(self.pending[0])
        except OSError as error:
            self._finish(self.pending[0], str(error))

    def wait(self, seconds: float) -> bool:
        """Wait until all uploads have ended, but at most `seconds`. Return whether any are still pending."""
        end = time.monotonic() + seconds
        while self.pending and time.monotonic() < end:
            time.sleep(POLL_S)
            self.advance()
        return bool(self.pending)

    def close(self) -> None:
        """Kill the running upload. Unfinished uploads are repeated when the run is resumed."""
        for path in self.pending:
            logger.warning("%s was not uploaded in time", path)
        self.pending.clear()
        if self._process is not None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5)

    def _start(self, path: Path) -> None:
        words = [
            part.replace("{path}", str(path)).replace("{name}", path.name) for part in self.command
        ]
        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warn_once(
                    f"{path} is not uploaded yet: an upload of an earlier run is not finished, see {self.log}"
                )
                return
            # Use a new session, so that signals sent to the run's process group do not end the upload.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _finish(self, path: Path, problem: str) -> None:
        if problem:
            logger.warning("%s is not uploaded: %s", path, problem)
        with suppress(OSError):
            (path / HANDLED).touch()
        self.pending.remove(path)
