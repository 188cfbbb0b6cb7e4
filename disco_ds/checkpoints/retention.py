"""The folder of a run's checkpoints: which are complete, and which are removed or set aside.

This module imports no torch, so that `disco-ds launch` can use it. checkpoint.py describes the content
of a checkpoint.

    checkpoints/step-00000100/            complete: renamed to this after all files were written
    checkpoints/.step-00000200.partial/   being written or removed, or left behind by a crash
    checkpoints/set-aside-step-00000300/  newer than the one that a run was resumed from: never resumed,
                                          counted or removed
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from disco_ds.runs.run_folder import CHECKPOINTS, STEP

FORMAT = 6
"""Version of the layout of a checkpoint."""
META = "checkpoint.json"
ENGINE = "engine"
"""Folder with DeepSpeed's files; also its tag for them."""
logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)
"""Log a warning, unless the same text has been logged before."""


class DamagedError(ValueError):
    """A checkpoint has missing or changed files. An older one may be intact."""


def seal(meta: dict[str, Any]) -> str:
    """Return the SHA-256 of the content of checkpoint.json, without the seal itself."""
    content = json.loads(json.dumps(meta))
    content.pop("seal", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(path: Path) -> dict[str, Any]:
    """Read checkpoint.json, and check the names and sizes of the files that it lists.

    Raises:
        DamagedError: If the folder is not a disco_ds checkpoint, or an incomplete one.
        ValueError: If it has another format.
    """
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        intact = meta["seal"] == seal(meta)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} is not a complete disco_ds checkpoint: {META}: {error!r}"
        ) from None
    if not intact:
        raise DamagedError(f"{path} is damaged: {META} is not what was written")
    if meta["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {meta['format']}, this version of disco_ds reads format {FORMAT}"
        )
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
    # DeepSpeed reads every file with a matching name, so it would take an added one for a rank's file.
    present = {f"{ENGINE}/{file.name}" for file in (path / ENGINE).glob("*.pt")}
    if added := sorted(present - meta["files"].keys()):
        raise DamagedError(f"{path} is damaged: {', '.join(added)} was not written with it")
    return meta


def step_of(path: Path) -> int:
    """Return the step N of a folder called step-N."""
    return int(path.name.removeprefix("step-"))


def list_complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder by step.

    A user's copy, such as step-00000100-best, is not among them.
    """
    named = [path for path in (folder / CHECKPOINTS).glob("step-*") if STEP.fullmatch(path.name)]
    return sorted((path for path in named if (path / META).is_file()), key=step_of)


def find_latest(folder: Path) -> Path:
    """Return the latest complete checkpoint of a run folder.

    Raises:
        ValueError: If there is none.
    """
    complete = list_complete(folder)
    if not complete:
        raise ValueError(
            f"{folder} has no complete checkpoint; start the run again without --resume"
        )
    return complete[-1]


def find_older(path: Path) -> Path | None:
    """Return the latest complete checkpoint of the same run before this one."""
    if not STEP.fullmatch(path.name):
        return None
    older = [other for other in list_complete(path.parents[1]) if step_of(other) < step_of(path)]
    return older[-1] if older else None


def set_aside(path: Path) -> None:
    """Rename a checkpoint so that it is never resumed, counted or removed. Rank 0 only."""
    first = aside = path.with_name(f"set-aside-{path.name}")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = first.with_name(f"{first.name}-{number}")
    path.rename(aside)
    logger.warning("%s is set aside as %s", path, aside.name)


def remove_checkpoints(
    folder: Path, keep_last: int | None, keep_every_steps: int = 0, busy: Collection[Path] = ()
) -> int:
    """Remove old checkpoints and the remains of unfinished ones. Rank 0 only.

    What cannot be removed is logged once.

    Args:
        folder: The run folder.
        keep_last: Number of intact checkpoints to keep, the newest ones; None: keep all. A damaged
            checkpoint is not counted, so that the last intact one always stays.
        keep_every_steps: Also keep checkpoints whose step is a multiple of this; 0: do not.
        busy: Folders to keep because they are in use.

    Returns:
        The number of checkpoints that were removed.
    """
    kept = removed = 0
    try:
        for path in reversed(list_complete(folder)):  # the newest first
            if keep_last is None or kept < keep_last:
                kept += _is_intact(path)
                continue
            milestone = keep_every_steps > 0 and step_of(path) % keep_every_steps == 0
            if path not in busy and not milestone:
                removed += _hide(path)
        for remains in (folder / CHECKPOINTS).glob(".step-*.partial"):
            if remains not in busy:
                _remove(remains)
    except OSError as error:
        warn_once(f"old checkpoints of {folder} are not removed: {error}")
    return removed


def _hide(path: Path) -> bool:
    """Rename a checkpoint before it is removed, so that a crash leaves no checkpoint with files missing."""
    try:
        path.rename(path.with_name(f".{path.name}.partial"))
    except OSError as error:
        warn_once(f"{path} is not removed: {error.strerror}")
        return False
    return True


def _is_intact(path: Path) -> bool:
    try:
        read_meta(path)
    except ValueError:
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a folder as far as possible, or a symbolic link without the folder it points to."""
    if path.is_symlink():
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # On NFS, a file that another host has open stays.
        warn_once(f"{path} is not wholly removed; the next save tries again to remove the rest")
