"""Run the user's command (checkpoint.copy_command) on each new checkpoint, in the background. Rank 0 only."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from disco_ds.checkpoints.retention import warn_once
from disco_ds.config import Config
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm

POLL_S = 0.1
"""Seconds between two checks of whether an upload has ended, while waiting for uploads."""
logger = logging.getLogger(__name__)


class Uploads:
    """A queue of at most two checkpoints: the one being uploaded and the newest of those waiting.

    If rank 0 is killed, its upload keeps running. The upload's processes inherit the log file as their
    output and, with it, a lock on that file. The resumed run therefore does not start an upload before
    the old upload has ended. Because nothing records whether the old upload succeeded, the resumed run
    then uploads that checkpoint again.

    Args:
        command: The user's command, in which {path} and {name} stand for the checkpoint. It is split into
            words as in a shell, but runs without a shell.
        log: The file that receives the command's output. A file of the same name with the suffix .json
            lists the unfinished uploads.
    """

    def __init__(self, command: str, log: Path):
        self.command = shlex.split(command)
        self.log = log
        self._list_file = log.with_suffix(".json")
        self._listed: list[str] = []
        """The content of `_list_file`: paths of the checkpoints whose upload is unfinished."""
        if self._list_file.exists():
            try:
                self._listed = [str(path) for path in json.loads(self._list_file.read_text())]
            except (OSError, ValueError, TypeError) as error:
                logger.warning(
                    "%s is unreadable (%s): check which uploads are complete",
                    self._list_file,
                    error,
                )
        self._queue = [Path(path) for path in self._listed if Path(path).exists()]
        self._process: subprocess.Popen[bytes] | None = None
        """The process that uploads the first checkpoint in the queue.

        None if the queue is empty, or while an upload that was started by an earlier run is still running.
        """

    def add(self, path: Path) -> None:
        """Queue a checkpoint for upload. It starts as soon as no other upload is running."""
        if len(self.busy) == 2:
            logger.warning(
                "%s is not uploaded: the previous upload takes longer than the time between saves",
                self._queue.pop(),
            )
        self._queue.append(path)
        self.poll()

    def poll(self) -> None:
        """Start the next upload if none is running. The training loop calls this at every step."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            path = self._queue.pop(0)
            self._process = None
            if code:
                command = shlex.join(self._fill(path))
                logger.warning(
                    "%s was not uploaded: exit code %d of %s; see %s", path, code, command, self.log
                )
        self._write_list()
        if self._queue and self._process is None:
            try:
                self._launch(self._queue[0])
            except OSError as error:
                logger.warning("%s was not uploaded: %s", self._queue.pop(0), error)

    def _write_list(self) -> None:
        paths = [str(path) for path in self._queue]
        if paths == self._listed:
            return
        self._listed = paths
        try:
            write_text(self._list_file, json.dumps(paths))
        except OSError as error:
            logger.warning("unfinished uploads may not be repeated on resume: %s", error)

    def _launch(self, path: Path) -> None:
        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warn_once(
                    f"{path} is not uploaded yet: an upload of an earlier run is not finished, see {self.log}"
                )
                return
            # Use a new session, because signals that end the run are sent to its whole process group.
            self._process = subprocess.Popen(
                self._fill(path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _fill(self, path: Path) -> list[str]:
        return [
            part.replace("{path}", str(path)).replace("{name}", path.name) for part in self.command
        ]

    @property
    def busy(self) -> list[Path]:
        """Checkpoints that must not be removed, because they are being uploaded or are waiting for it."""
        self.poll()
        return list(self._queue)

    def wait_until(self, end: float) -> bool:
        """Wait until all uploads have ended or time.monotonic() reaches `end`.

        Returns:
            True if any uploads are still pending.
        """
        while self.busy and time.monotonic() < end:
            time.sleep(POLL_S)
        return bool(self._queue)

    def close(self) -> None:
        """Kill the running upload. Unfinished uploads are repeated when the run is resumed."""
        for path in self.busy:
            logger.warning("%s was not uploaded in time", path)
        if self._process is not None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5)
        self._queue.clear()
        self._process = None


def start_uploads(config: Config, folder: Path, stack: ExitStack) -> Uploads | None:
    """Create the upload queue. Return None on other ranks than 0 or if checkpoint.copy_command is not set.

    Args:
        config: Settings of the run.
        folder: The run folder.
        stack: When it is closed, a running upload is killed.
    """
    if not config.checkpoint.copy_command or comm.rank() != 0:
        return None
    uploads = Uploads(config.checkpoint.copy_command, folder / "copies.log")
    stack.callback(uploads.close)
    return uploads
