"""The folders of a run's checkpoints: which are complete, which is older, which are removed or set aside.

Their contents are checkpoint.py's. This file imports no torch, so that `disco-ds launch` can use it.
checkpoints/step-00000100/            complete: given this name when all its files were written
checkpoints/.step-00000200.partial/   being written, or left behind by a crash
checkpoints/.step-00000050.removed/   being removed, or files of it that could not be removed
checkpoints/set-aside-step-00000300/  newer than the one a run was resumed from: never resumed, counted or removed
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from disco_ds.metrics.run_folder import CHECKPOINTS, STEP

FORMAT = 5
READABLE = (4, 5)
"""Format 4 has NumPy arrays in the ranks' files, and no seal."""
META = "checkpoint.json"
ENGINE = "engine"
logger = logging.getLogger(__name__)


class DamagedError(ValueError):
    """A checkpoint whose files are missing or changed. An older one may be whole."""


def seal(meta: dict[str, Any]) -> str:
    """SHA-256 of the content of checkpoint.json, without the seal itself."""
    content = {key: value for key, value in json.loads(json.dumps(meta)).items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(path: Path) -> dict[str, Any]:
    """The content of checkpoint.json, after the names and sizes of the files it lists are checked.

    Raises: DamagedError for a folder that is no checkpoint of disco_ds, or incomplete; ValueError for another format.
    """
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        version, *_ = meta["format"], meta["step"], meta["num_steps"], meta["identity"], meta["shape"]["stage"]
        sizes = {name: (entry["bytes"], entry["sha256"])[0] for name, entry in meta["files"].items()}
        sealed = meta["seal"] if "seal" in meta or version != 4 else seal(meta)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{path} is not a complete disco_ds checkpoint: it has no {META}") from None
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise DamagedError(f"{path / META} is not a disco_ds checkpoint description: {error!r}") from None
    if sealed != seal(meta):
        raise DamagedError(f"{path} is damaged: {META} is not what was written")
    if version not in READABLE:
        raise ValueError(f"{path} has format {version}, this version of disco_ds reads {READABLE[0]} to {READABLE[-1]}")
    for name, size in sizes.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{path} is incomplete: {name} is missing ({error.strerror})") from None
        if found != size:
            raise DamagedError(f"{path} is damaged: {name} has {found} bytes, expected {size}")
    # DeepSpeed reads every file whose name fits, so one that was added would be taken for a rank's.
    foreign = {f"{ENGINE}/{file.name}" for file in (path / ENGINE).glob("*.pt")} - sizes.keys()
    if foreign:
        raise DamagedError(f"{path} is damaged: {', '.join(sorted(foreign))} was not written with it")
    return meta


def step_of(path: Path) -> int:
    """The step N of a folder called step-N."""
    return int(path.name.removeprefix("step-"))


def list_complete(folder: Path) -> list[Path]:
    """A run's complete checkpoints by step. A user's copy, such as step-00000100-best, is not among them."""
    named = [path for path in (folder / CHECKPOINTS).glob("step-*") if STEP.fullmatch(path.name)]
    return sorted((path for path in named if (path / META).is_file()), key=step_of)


def find_latest(folder: Path) -> Path:
    """The last complete checkpoint of a run folder.

    Raises: ValueError if there is none.
    """
    complete = list_complete(folder)
    if not complete:
        raise ValueError(f"{folder} has no complete checkpoint; start the run anew without --resume")
    return complete[-1]


def find_older(path: Path) -> Path | None:
    """The last complete checkpoint of the same run before this one."""
    if not STEP.fullmatch(path.name):
        return None
    older = [other for other in list_complete(path.parents[1]) if step_of(other) < step_of(path)]
    return older[-1] if older else None


def set_newer_aside(path: Path) -> None:
    """Set every complete checkpoint aside that is newer than this one. Rank 0 only."""
    for other in reversed(list_complete(path.parents[1])):
        if step_of(other) > step_of(path):
            set_aside(other)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is never resumed, counted or removed. Returns: the new path. Rank 0 only."""
    first = path.with_name(f"set-aside-{path.name}")
    names = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    aside = path.rename(next(name for name in names if not os.path.lexists(name)))
    logger.warning("%s is set aside as %s", path, aside.name)
    return aside


def remove_old(folder: Path, keep_last: int | None, keep_every_steps: int = 0, busy: Collection[Path] = ()) -> int:
    """Remove checkpoints older than the last `keep_last` whole ones (None: none), and those that were left unfinished.

    Rank 0 only.

    Checkpoints of steps that keep_every_steps divides (0: none) and folders in `busy` stay. A damaged checkpoint is not
    counted, so that the last whole one always stays. What cannot be removed is logged once.

    Returns: how many were removed.
    """
    kept = removed = 0
    try:
        for path in reversed(list_complete(folder)):  # the newest first
            if keep_last is None or kept < keep_last:
                kept += _is_whole(path)
            elif path not in busy and not (keep_every_steps and step_of(path) % keep_every_steps == 0):
                removed += _remove(path)
        for left in [*(folder / CHECKPOINTS).glob(".step-*.partial"), *(folder / CHECKPOINTS).glob(".step-*.removed")]:
            if left not in busy:
                _clear(left)
    except OSError as error:
        _warn_once(f"old checkpoints of {folder} are not removed: {error}")
    return removed


def _is_whole(path: Path) -> bool:
    try:
        read_meta(path)
    except ValueError:
        return False
    return True


def _remove(path: Path) -> bool:
    """Remove a checkpoint. Returns: True if it is none any more, even if some of its files could not be removed."""
    if path.is_symlink():
        _warn_once(f"{path} is a symbolic link, so it is not removed; remove it by hand")
        return False
    try:
        # Renamed first, so that a crash leaves no checkpoint with files missing.
        gone = path.rename(path.with_name(f".{path.name}.removed"))
    except OSError as error:
        _warn_once(f"{path} is not removed: {error.strerror}; remove it by hand")
        return False
    _clear(gone)
    return True


def _clear(path: Path) -> None:
    """Remove a folder as far as possible; on NFS a file that another host has open stays."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        _warn_once(f"{path} is not wholly removed; what is left is tried again after the next save")


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)
