"""The folder of a run, runs/<name>, which is found or made, and locked so that no two runs write to it.

Used by rank 0 only; runs/shared_folder.py broadcasts the result.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from disco_ds.config.recipe_yaml import parse
from disco_ds.config.text_file import write_text

CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step-\d{8,}")
"""Name of a complete checkpoint."""
CONFIG = "config.yaml"
CHANGES = "changes.jsonl"
"""Settings that a resume has changed: {"step", "setting", "old", "new"}, a line for each."""
FINISHED = "finished.json"
"""Written when a run has done all its steps. This file means success, not the launcher's exit code."""
LAUNCHED = "launch.json"
"""Names the launch that has used the folder last, and the exit code that its ranks have agreed on."""
AUTO = "auto"
"""Value of --resume: continue the newest run of this name if it has a complete checkpoint, else start a new one."""


class RunFolder:
    """A run folder, locked until it is closed."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: IO[str] | None = _take_lock(path)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def make_run_folder(runs: Path, name: str) -> RunFolder:
    """Make a new folder: runs/name, or name-2, name-3, ... An existing folder is never written to."""
    if not re.fullmatch(r"[\w.+=@ -]+", name):
        raise ValueError(f"name {name!r} is not a plain folder name")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100_000):
            path = runs / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return RunFolder(path)
    except OSError as error:
        raise ValueError(
            f"runs: no folder can be made in {runs}: {error.strerror}; set runs=FOLDER"
        ) from None
    raise ValueError(f"{runs} holds 100,000 runs called {name}; remove some")


def find_run_folder(runs: Path, name: str, resume: str) -> RunFolder:
    """Find the folder to resume in.

    Args:   resume: "latest" for the newest of runs/name, name-2, ...; else the path of a run folder, or of one of its
            checkpoints.
    Raises: ValueError when there is none, or another run holds it.
    """
    if resume != "latest":
        path, named = split_resume(resume)
        if not (path / CHECKPOINTS).is_dir():
            raise ValueError(
                f"--resume {resume}: not a run folder (it has no {CHECKPOINTS}/), nor RUN/{CHECKPOINTS}/step-N"
            )
        if named and not named.is_dir():
            raise ValueError(f"--resume {resume}: there is no such checkpoint")
        return RunFolder(path)
    newest = find_newest(runs, name)
    if newest is None:
        raise ValueError(
            f"--resume latest: no run called {name} in {runs}; start one without --resume"
        )
    return RunFolder(newest)


def find_newest(runs: Path, name: str) -> Path | None:
    """Find the folder with the highest number of runs/name, name-2, ..."""
    numbered = re.compile(re.escape(name) + r"(?:-(\d+))?")
    found = [
        (int(match.group(1) or 1), path)
        for path in (runs.iterdir() if runs.is_dir() else ())
        if (match := numbered.fullmatch(path.name)) and path.is_dir() and _may_be_called(path, name)
    ]
    return max(found)[1] if found else None


def split_resume(resume: str) -> tuple[Path, Path | None]:
    """(run folder, checkpoint): what --resume RUN, or RUN/checkpoints/step-N, names."""
    path = Path(os.path.abspath(resume))
    if path.parent.name == CHECKPOINTS and STEP.fullmatch(path.name):
        return path.parents[1], path
    return Path(resume), None


def _may_be_called(path: Path, name: str) -> bool:
    """Folder a-2 is the second run of recipe a, or the first of one that is called a-2: its config.yaml knows."""
    with suppress(OSError, ValueError, AttributeError):
        return parse((path / CONFIG).read_text(encoding="utf-8"), CONFIG).get("name") == name
    return True


def make_token(path: Path) -> Path:
    """Make an empty file for every rank to look for. Its name is new, so that no network file system has it cached."""
    token = path / f".shared-{secrets.token_hex(8)}"
    token.touch()
    return token


def mark_finished(path: Path, record: dict[str, object]) -> None:
    """Raises: OSError."""
    write_text(path / FINISHED, json.dumps(record, indent=1) + "\n")


def mark_launch(path: Path, word: str | None, code: int | None = None) -> None:
    """For launch.py, if it has started the run: where it is, and what came of it. A full disk is no reason to fail."""
    if word is not None:
        with suppress(OSError):
            write_text(path / LAUNCHED, json.dumps({"launch": word, "code": code}) + "\n")


def _take_lock(path: Path) -> IO[str]:
    # Opened to append: the name of a run that holds the lock must stay readable for the message below.
    handle = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115  (held as long as the run)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            handle.close()
            raise ValueError(
                f"run folder {path} cannot be locked: {error}; use a file system with locks"
            ) from None
        handle.seek(0)
        owner = handle.read().strip() or "another process"
        handle.close()
        raise ValueError(
            f"run folder {path} is in use by {owner}; wait for it, or choose another name"
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {socket.gethostname()}")
    handle.flush()
    return handle
