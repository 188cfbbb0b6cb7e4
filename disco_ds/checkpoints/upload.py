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
"""How often to look whether an upload has ended."""
logger = logging.getLogger(__name__)


class Uploads:
    """A queue of at most two checkpoints: the one that is being uploaded and the newest of the others.

    An upload survives if rank 0 is killed. It holds a lock on the log file, which its processes inherit
    as their output, so the resumed run starts no upload before it has ended. Nobody knows whether it
    succeeded, so the resumed run uploads that checkpoint again.

    Args:
        command: With {path} and {name}, split as a shell would split it, but run without a shell.
        log: A file that receives the output of the command. A file next to it, with the ending .json,
            lists the uploads that are not finished.
    """

    def __init__(self, command: str, log: Path):
        self.command = shlex.split(command)
        self.log = log
        self._list_file = log.with_suffix(".json")
        self._listed: list[str] = []
        """The content of that file."""
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
        """Uploads the first of the queue; None while an upload of an earlier run has not ended."""

    def add(self, path: Path) -> None:
        """Upload this checkpoint as soon as no other upload is running."""
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
            # In a new session, because signals that end the run go to process groups.
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
        """Checkpoints that must not be removed, because they are being uploaded or will be."""
        self.poll()
        return list(self._queue)

    def wait_until(self, end: float) -> bool:
        """Wait for all uploads, but not longer than until this time.monotonic().

        Returns:
            True if some are still pending.
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
    """Prepare to upload checkpoints, on rank 0 and if there is a checkpoint.copy_command.

    Args:
        config: Settings of the run.
        folder: The run folder.
        stack: Ends the uploads when it is closed.
    """
    if not config.checkpoint.copy_command or comm.rank() != 0:
        return None
    uploads = Uploads(config.checkpoint.copy_command, folder / "copies.log")
    stack.callback(uploads.close)
    return uploads
