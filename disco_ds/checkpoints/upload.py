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

POLL_S = 0.5
"""How often to try the lock that a copy of an earlier run may hold."""
logger = logging.getLogger(__name__)


class Copies:
    """Copies one checkpoint at a time; of those that wait, only the newest is kept.

    A copy survives if rank 0 is killed. It holds a lock on the log file, which its processes inherit as
    their output, so the resumed run starts no copy before it has ended. Nobody knows whether it
    succeeded, so the resumed run copies that checkpoint again.

    Args:
        command: With {path} and {name}, split as a shell would split it, but run without a shell.
        log: A file that receives the output of the command. A file next to it, with the ending .json,
            lists the copies that are not finished.
    """

    def __init__(self, command: str, log: Path):
        self.command = shlex.split(command)
        self.log = log
        self._list_file = log.with_suffix(".json")
        self._listed = self._read_list()
        """The content of the file."""
        unfinished = [path for path in map(Path, self._listed) if path.exists()]
        self._current: Path | None = unfinished[0] if unfinished else None
        """The checkpoint that is being copied, or will be next."""
        self._next: Path | None = unfinished[1] if len(unfinished) > 1 else None
        """The checkpoint to copy afterwards."""
        self._process: subprocess.Popen[bytes] | None = None
        """Copies the current checkpoint; None while a copy of an earlier run has not ended."""

    def start(self, path: Path) -> None:
        """Copy this checkpoint as soon as no other copy is running."""
        if len(self.busy) == 2:
            logger.warning(
                "%s is not copied: the copy before it takes longer than a save", self._next
            )
        self._next = path
        self.poll()

    def poll(self) -> None:
        """Start the waiting copy if no other one is running. The training loop calls this in every step."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            if code and self._current is not None:
                problem = f"exit code {code} of {shlex.join(self._fill(self._current))}"
                logger.warning("%s was not copied: %s; see %s", self._current, problem, self.log)
            self._current = self._process = None
        if self._current is None:
            self._current, self._next = self._next, None
        self._write_list()
        if self._current is not None and self._process is None:
            self._launch(self._current)

    def _launch(self, path: Path) -> None:
        try:
            with self.log.open("ab") as log:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    warn_once(
                        f"{path} is not copied yet: a process of an earlier copy is still running, see {self.log}"
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
        except OSError as error:
            logger.warning("%s was not copied: %s", path, error)
            self._current = None

    def _read_list(self) -> list[str]:
        try:
            return [str(path) for path in json.loads(self._list_file.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, TypeError, ValueError) as error:
            logger.warning(
                "%s cannot be read, so no copy of an earlier run is repeated: %s",
                self._list_file,
                error,
            )
            return []

    def _write_list(self) -> None:
        paths = [str(path) for path in (self._current, self._next) if path is not None]
        if paths == self._listed:
            return
        self._listed = paths
        try:
            write_text(self._list_file, json.dumps(paths))
        except OSError as error:
            logger.warning("copies that this run does not finish may not be repeated: %s", error)

    def _fill(self, path: Path) -> list[str]:
        return [
            part.replace("{path}", str(path)).replace("{name}", path.name) for part in self.command
        ]

    @property
    def busy(self) -> list[Path]:
        """Checkpoints that must not be removed: the one that is being copied, and the one that waits."""
        self.poll()
        return [path for path in (self._current, self._next) if path is not None]

    def wait(self, seconds: float) -> bool:
        """Wait for all copies, but at most this long.

        Returns:
            True if some are still pending.
        """
        end = time.monotonic() + seconds
        while self.busy and (left := end - time.monotonic()) > 0:
            if self._process is None:
                time.sleep(min(left, POLL_S))
                continue
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(left)
        return bool(self.busy)

    def close(self) -> None:
        """Kill the running copy. It and the waiting one are made when the run is resumed."""
        for path in self.busy:
            logger.warning("%s was not copied in time", path)
        if self._process is not None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5)
        self._current = self._process = self._next = None


def start_copies(config: Config, folder: Path, stack: ExitStack) -> Copies | None:
    """Start to copy checkpoints by the user's command, on rank 0 and if there is a command.

    Args:
        config: Settings of the run.
        folder: The run folder.
        stack: Ends the copies when it is closed.
    """
    if not config.checkpoint.copy_command or comm.rank() != 0:
        return None
    copies = Copies(config.checkpoint.copy_command, folder / "copies.log")
    stack.callback(copies.close)
    return copies
