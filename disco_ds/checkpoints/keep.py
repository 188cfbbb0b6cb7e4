"""The folder with a run's checkpoints: find the complete ones, remove old ones, and copy new ones elsewhere.

This module does not import torch, so that `disco-ds launch` can use it. checkpoint.py describes the content
of a checkpoint.

    checkpoints/step-00000100/            complete; it was given this name after all files had been written
    checkpoints/.step-00000200.partial/   is being written or removed, or was left behind by a crash
    checkpoints/set-aside-step-00000300/  replaced: the run was resumed from an earlier checkpoint, or saved this
                                          step again. It is never resumed, counted or removed
"""

import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

from disco_ds.config import Tree
from disco_ds.runs.run_folder import CHECKPOINTS, META, STEP, list_complete, step_of

FORMAT = 8
"""Version of the checkpoint format. Only checkpoints of this version can be read."""
ENGINE = "engine"
"""Subfolder of a checkpoint with DeepSpeed's files; also the tag that DeepSpeed saves them under."""
LOG = "copies.log"
"""File in the run folder that receives the output of checkpoint.copy_command."""
HANDLED = "copied"
"""Empty file in a checkpoint whose upload has succeeded, failed or been skipped.

A resumed run uploads checkpoints that lack this file.
"""
POLL_S = 0.1
"""Seconds between two checks of whether an upload has ended, while waiting for uploads."""
logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)
"""Log a warning, unless this function has already logged the same message."""


class DamagedError(ValueError):
    """A checkpoint has missing or changed files. An older checkpoint may be intact."""


def seal(meta: Tree) -> str:
    """Return the SHA-256 of the content of checkpoint.json, excluding its `seal` entry."""
    content = json.loads(json.dumps(meta))
    content.pop("seal", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(path: Path) -> Tree:
    """Read checkpoint.json, and check that the files that it lists exist and have the recorded sizes.

    Raises:
        DamagedError: If the folder is not a disco_ds checkpoint, is incomplete or damaged.
    """
    try:
        meta = json.loads((path / META).read_bytes())
        intact = meta["seal"] == seal(meta)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} is not a complete disco_ds checkpoint: {META}: {error!r}"
        ) from None
    if not intact:
        raise DamagedError(f"{path} is damaged: {META} is not what was written")
    for name, entry in meta["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise DamagedError(
                f"{path} is incomplete: {name} is missing ({error.strerror})"
            ) from None
        if size != entry["bytes"]:
            raise DamagedError(
                f"{path} is damaged: {name} has {size} bytes, expected {entry['bytes']}"
            )
    return meta


def check_format(path: Path, meta: Tree) -> None:
    """Check that this version of disco_ds can read a checkpoint with this checkpoint.json.

    Raises:
        ValueError: If it cannot. This is not a DamagedError, because older checkpoints of the run have the same
            format, so there is no point in trying them.
    """
    if meta["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {meta['format']}, but this version of disco_ds reads format {FORMAT}"
        )


def find_latest(folder: Path) -> Path:
    """Return the latest complete checkpoint of a run folder.

    Raises:
        ValueError: If there is no complete checkpoint.
    """
    if complete := list_complete(folder):
        return complete[-1]
    raise ValueError(f"{folder} has no complete checkpoint; start the run again without --resume")


def find_older(path: Path) -> Path | None:
    """Return the latest complete checkpoint of the same run that is older than this one, or None."""
    if not STEP.fullmatch(path.name):  # a copy that a user made under another name
        return None
    older = [other for other in list_complete(path.parents[1]) if step_of(other) < step_of(path)]
    return older[-1] if older else None


def set_aside(path: Path) -> None:
    """Rename a checkpoint so that disco_ds never resumes, counts or removes it. Rank 0 only."""
    aside = path.with_name(f"set-aside-{path.name}")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"set-aside-{path.name}-{number}")
    path.rename(aside)
    logger.warning("%s is set aside as %s", path, aside.name)


def remove_checkpoints(
    folder: Path, keep_last: int | None, keep_every_steps: int = 0, busy: Collection[Path] = ()
) -> int:
    """Remove old checkpoints and what unfinished saves have left behind. Rank 0 only.

    If something cannot be removed, a warning is logged once.

    Args:
        folder: The run folder.
        keep_last: How many of the newest intact checkpoints to keep; None means all. Damaged
            checkpoints are not counted, so the last intact one always stays.
        keep_every_steps: Also keep checkpoints whose step is a multiple of this number; 0 means no
            additional ones.
        busy: Folders that must not be removed because they are being written or uploaded.

    Returns:
        The number of checkpoints that were removed.
    """
    kept = removed = 0
    for path in reversed(list_complete(folder)):  # the newest first
        if keep_last is None:
            break  # without reading the checkpoints, which would take long on a network disk
        if kept < keep_last:
            with suppress(DamagedError):
                read_meta(path)
                kept += 1
            continue
        if path in busy or (keep_every_steps and step_of(path) % keep_every_steps == 0):
            continue
        try:
            # Rename first, so that a crash cannot leave an incomplete step-N.
            path.rename(path.with_name(f".{path.name}.partial"))
            removed += 1
        except OSError as error:
            warn_once(f"{path} is not removed: {error}")
    for remains in (folder / CHECKPOINTS).glob(".step-*.partial"):
        if remains not in busy:
            _remove(remains)
    return removed


def _remove(path: Path) -> None:
    """Remove as much of a folder as possible. If it is a symbolic link, remove only the link."""
    if path.is_symlink():
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # On NFS, a file that is still open on another host cannot be removed.
        warn_once(f"{path} is not completely removed; the next save tries again to remove the rest")


class Mirror:
    """Runs the user's command (checkpoint.copy_command) on each new checkpoint, in the background. Rank 0 only.

    Checkpoints are uploaded one at a time. If several wait for the current upload, only the newest of them is uploaded.

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
