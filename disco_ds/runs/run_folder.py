"""Find, make and lock the folder of a run, runs/<name>.

In a run, only rank 0 calls these functions, and the results are broadcast.
"""

import fcntl
import itertools
import logging
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from disco_ds.config.recipe_yaml import parse
from disco_ds.config.text_file import read_text, write_json

logger = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step-\d{8,}")
"""Matches the folder name of a complete checkpoint."""
META = "checkpoint.json"
"""A file that every complete checkpoint contains."""
CONFIG = "config.yaml"
FINISHED = "finished.json"
"""File that marks a run whose last step is done. The run then succeeded, even if the launcher reported an error."""
LAUNCHED = "launch.json"
"""Contains the ID of the launch that used the folder last and the exit code that its ranks agreed on."""
AUTO = "auto"
"""Value of --resume: resume the newest run of this name that has a complete checkpoint. If there is none, start a new
run.

If the newest run has already done all steps of the recipe, nothing is started.
"""


def make_run_folder(runs: Path, name: str) -> Path:
    """Make a new folder: runs/name or, if that exists, runs/name-2, runs/name-3, ... Existing folders are not touched.

    Raises:
        OSError: If the folder cannot be made.
    """
    runs.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = runs / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def find_run_folder(runs: Path, name: str, resume: str) -> Path:
    """Find the folder of the run to resume.

    Args:
        runs: Folder of all runs.
        name: Name of the run.
        resume: "latest" for the folder that find_newest returns; otherwise the path of a run folder or of one of its
            checkpoints.

    Raises:
        ValueError: If the folder or checkpoint does not exist, or if the run has another name.
    """
    if resume == "latest":
        if newest := find_newest(runs, name):
            return newest
        raise ValueError(
            f"--resume latest: no run called {name} in {runs} is finished or has a complete checkpoint; start one "
            "without --resume"
        )
    path, checkpoint = split_resume(resume)
    if not ((path / CHECKPOINTS).is_dir() or (path / FINISHED).is_file()):
        raise ValueError(
            f"--resume {resume}: not a run folder (it has no {CHECKPOINTS}/) or a checkpoint "
            f"(RUN/{CHECKPOINTS}/step-N)"
        )
    if checkpoint and not checkpoint.is_dir():
        raise ValueError(f"--resume {resume}: there is no such checkpoint")
    refuse_other_name(path, name)
    return path


def refuse_other_name(folder: Path, name: str) -> None:
    """Refuse to resume a run under another name, because `--resume latest` would then find it under neither name.

    Raises:
        ValueError: If the run in this folder has another name.
    """
    config = folder / CONFIG
    if not config.is_file() or re.fullmatch(rf"{re.escape(name)}(-\d+)?", folder.resolve().name):
        return
    before = parse(read_text(config, "settings"), str(config))["name"]
    if before != name:
        raise ValueError(
            f"--resume {folder}: the run is called {before}, but this recipe has name={name}; set name={before}"
        )


def step_of(path: Path) -> int:
    """Return the step N of a folder called step-N."""
    return int(path.name.removeprefix("step-"))


def list_complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, ordered by step.

    Copies that a user made under another name, such as step-00000100-best, are not included.
    """
    complete = [
        path
        for path in (folder / CHECKPOINTS).glob("step-*")
        if STEP.fullmatch(path.name) and (path / META).is_file()
    ]
    return sorted(complete, key=step_of)


def find_newest(runs: Path, name: str) -> Path | None:
    """Return the newest folder among runs/name, runs/name-2, ... that is finished or has a complete checkpoint.

    Newer folders without a checkpoint are passed over with a warning. If no folder is left, the result is None.

    Only folders whose config.yaml contains this name are considered: the folder a-2 may belong to the second run named
    a, or to the first run named a-2.

    Raises:
        ValueError: If a config.yaml cannot be read.
    """
    numbered = re.compile(re.escape(name) + r"(?:-(\d+))?")
    folders: list[tuple[int, Path]] = []
    for config in runs.glob(f"*/{CONFIG}"):
        if match := numbered.fullmatch(config.parent.name):
            tree = parse(read_text(config, "settings"), str(config))
            if isinstance(tree, dict) and tree.get("name") == name:
                folders.append((int(match[1] or 1), config.parent))
    unfinished = list[str]()
    for _, folder in sorted(folders, reverse=True):
        if (folder / FINISHED).exists() or list_complete(folder):
            if unfinished:
                logger.warning(
                    "resuming %s; without a checkpoint: %s", folder, ", ".join(unfinished)
                )
            return folder
        unfinished.append(str(folder))
    return None


def split_resume(resume: str) -> tuple[Path, Path | None]:
    """Split a value of --resume into the run folder and the checkpoint.

    Args:
        resume: Path of a checkpoint (RUN/checkpoints/step-N) or of a run folder.

    Returns:
        The run folder and the checkpoint. The checkpoint is None if the path is that of a run folder.
    """
    path = Path(os.path.abspath(resume))
    if path.parent.name == CHECKPOINTS and STEP.fullmatch(path.name):
        return path.parents[1], path
    return Path(resume), None


def mark_finished(path: Path, record: dict[str, object]) -> None:
    """Write finished.json with the content `record`. It marks the run in this folder as complete.

    Raises:
        OSError: If the file cannot be written.
    """
    write_json(path / FINISHED, record)


def mark_launch(path: Path, launch_id: str | None, code: int | None = None) -> None:
    """If `disco-ds launch` has started the run, write launch.json for it. Write errors are ignored.

    Args:
        path: The run folder.
        launch_id: ID of the launch; None if `disco-ds launch` has not started the run.
        code: The run's exit code; None while it is running.
    """
    if launch_id is not None:
        with suppress(OSError):
            write_json(path / LAUNCHED, {"launch": launch_id, "code": code})


def lock_folder(path: Path) -> IO[str]:
    """Lock a run folder, so that no other run writes to it. Closing the returned file releases the lock.

    Raises:
        ValueError: If another run is using the folder.
        OSError: If the file system does not support file locking.
    """
    # Open in append mode, which keeps the content. If another process holds the lock, the message below quotes it.
    handle = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115  (stays open during the run)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        owner = handle.read()
        handle.close()
        raise ValueError(
            f"run folder {path} is in use by {owner}; wait until that run ends, or choose another name"
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {socket.gethostname()}")
    handle.flush()
    return handle
