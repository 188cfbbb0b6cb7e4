"""Run the user's command (checkpoint.copy_command) on each new checkpoint, in the background. Rank 0 only."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Queue

from disco_ds.checkpoints.retention import list_complete

LOG = "copies.log"
"""File in the run folder that receives the output of the command."""
HANDLED = "copied"
"""Empty file in a checkpoint whose upload has ended. A resumed run uploads checkpoints that lack this file."""
POLL_S = 0.1
"""Seconds between two checks of whether an upload has ended, while waiting for uploads."""
logger = logging.getLogger(__name__)


class Uploads:
    """Uploads checkpoints one after another: the current one, then the newest of those that are waiting.

    If rank 0 is killed, its upload keeps running. The upload's processes inherit the log file as their
    output and, with it, a lock on that file. The resumed run therefore does not start an upload before
    the old upload has ended. Because nothing records whether the old upload succeeded, the resumed run
    then uploads that checkpoint again.

    Args:
        command: The user's command, in which {path} and {name} stand for the checkpoint. It is split into
            words as in a shell, but runs without a shell.
        folder: The run folder.
    """

    def __init__(self, command: str, folder: Path):
        self.command = shlex.split(command)
        self.log = folder / LOG
        self.pending: list[Path] = []
        """Checkpoints that must not be removed, because they are being uploaded or are waiting for it."""
        self._lock = threading.Lock()
        """Held while `pending` changes."""
        self._current: Path | None = None
        """The checkpoint that is being uploaded."""
        self._queue: Queue[Path | None] = Queue()
        self._process: subprocess.Popen[bytes] | None = None
        for path in list_complete(folder):
            if not (path / HANDLED).exists():
                self.add(path)
        threading.Thread(target=self._work, name="uploads", daemon=True).start()

    def add(self, path: Path) -> None:
        """Queue a checkpoint for upload, in place of one that is still waiting."""
        with self._lock:
            if len(self.pending) > 1 and self.pending[-1] != self._current:
                logger.warning(
                    "%s is not uploaded: the previous upload takes longer than the time between saves",
                    self.pending[-1],
                )
                self._finish(self.pending[-1])
            self.pending.append(path)
        self._queue.put(path)

    def wait(self, seconds: float) -> bool:
        """Wait at most this long until all uploads have ended. Return whether any are still pending."""
        end = time.monotonic() + seconds
        while self.pending and time.monotonic() < end:
            time.sleep(POLL_S)
        return bool(self.pending)

    def close(self) -> None:
        """Kill the running upload. Unfinished uploads are repeated when the run is resumed."""
        with self._lock:
            for path in self.pending:
                logger.warning("%s was not uploaded in time", path)
            self.pending.clear()
        self._queue.put(None)
        if process := self._process:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)

    def _work(self) -> None:
        for path in iter(self._queue.get, None):
            with self._lock:
                if path not in self.pending:  # a newer checkpoint has taken its place
                    continue
                self._current = path
            try:
                problem = self._upload(path)
            except OSError as error:
                problem = str(error)
            with self._lock:
                self._current = None
                if path in self.pending:  # otherwise `close` has killed the upload
                    if problem:
                        logger.warning("%s was not uploaded: %s", path, problem)
                    self._finish(path)

    def _upload(self, path: Path) -> str:
        """Run the command on a checkpoint. Return why it failed, or an empty string."""
        words = [
            part.replace("{path}", str(path)).replace("{name}", path.name) for part in self.command
        ]
        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning(
                    "%s is not uploaded yet: an upload of an earlier run is not finished, see %s",
                    path,
                    self.log,
                )
                fcntl.flock(log, fcntl.LOCK_EX)
            # Use a new session, because signals that end the run are sent to its whole process group.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        code = self._process.wait()
        self._process = None
        return f"exit code {code} of {shlex.join(words)}; see {self.log}" if code else ""

    def _finish(self, path: Path) -> None:
        with suppress(OSError):
            (path / HANDLED).touch()
        self.pending.remove(path)
