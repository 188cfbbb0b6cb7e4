"""The folder of a run: made or found by rank 0, seen by every rank, with the settings that the run really uses."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from disco_ds.config import Config, render_ds_config
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.runs.run_folder import (
    CONFIG,
    FINISHED,
    RunFolder,
    find_run_folder,
    make_run_folder,
    make_token,
)
from disco_ds.runs.run_log import write_log


class FinishedError(ValueError):
    """A run to resume that has done all its steps, and is to have no more than those now."""

    def __init__(self, folder: Path, num_steps: int):
        super().__init__(
            f"{folder} has done all its steps, {num_steps:,}: give it more to extend it (steps=, samples= or epochs=), "
            "or start a new run without --resume"
        )
        self.folder = folder


def open_folder(config: Config, resume: str | None, stack: ExitStack) -> Path:
    """The run's folder, which rank 0 makes or finds and locks, and every rank must see. Collective.

    Raises: ValueError on every rank alike; FinishedError, one of them, if all steps are done already.
    """
    opened: RunFolder | None = None
    token: Path | None = None
    finished: tuple[Path, int] | None = None
    with comm.all_or_none("run folder"):
        if comm.rank() == 0:
            runs, name = config.runs, config.name
            opened = find_run_folder(runs, name, resume) if resume else make_run_folder(runs, name)
            stack.callback(opened.close)
            num_done = count_finished(opened.path)
            if config.num_steps <= num_done:
                finished = opened.path, num_done
            else:
                stack.enter_context(write_log(opened.path))
                token = make_token(opened.path)
    finished, token = comm.broadcast((finished, token))
    if finished is not None:
        raise FinishedError(*finished)
    try:
        check_shared(token)
    except ValueError:
        if opened and not resume:
            shutil.rmtree(opened.path, ignore_errors=True)
        raise
    return token.parent


def count_finished(folder: Path) -> int:
    """Return the number of steps of a run that has done them all; 0 for another. Raises: ValueError."""
    path = folder / FINISHED
    if not path.exists():
        return 0
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["steps"])
    except (ValueError, KeyError, TypeError):  # cut off by a full disk, or of an unknown version
        raise ValueError(f"{path} cannot be read; remove it if the run is to go on") from None


@contextmanager
def removed_if_refused(folder: Path, new: bool) -> Iterator[None]:
    """Remove a new folder again where the start is refused in the block."""
    try:
        yield
    except ValueError:
        if new and comm.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_shared(token: Path) -> None:
    """Check that every rank sees rank 0's file and may write beside it; rank 0 then removes it. Collective.

    Raises: ValueError on every rank alike, naming the hosts and ranks that cannot.
    """
    sees = os.path.exists(token) and os.access(token.parent, os.W_OK)
    reports = comm.gather_objects((socket.gethostname(), sees))
    if comm.rank() == 0:
        with suppress(OSError):
            token.unlink()
    blind: dict[str, list[str]] = {}
    for rank, (host, fine) in enumerate(reports):
        if not fine:
            blind.setdefault(host, []).append(str(rank))
    if blind:
        where = "; ".join(f"{host} (rank {', '.join(ranks)})" for host, ranks in blind.items())
        raise ValueError(
            f"run folder {token.parent} of {reports[0][0]} is not seen, or not writable, on {where}: every host writes "
            "its part of a checkpoint there; name a folder on a file system that all hosts share (runs=/shared/runs)"
        )


def write_settings(config: Config, folder: Path) -> dict[str, Any]:
    """Write config.yaml and ds_config.json, the settings that this run really uses. Returns: the latter. Collective."""
    ds_config = render_ds_config(config, comm.size(), folder)
    with comm.all_or_none(f"writing the settings into {folder}"):
        if comm.rank() == 0:
            (folder / FINISHED).unlink(missing_ok=True)  # of a run that is being extended
            write_text(folder / CONFIG, config.to_yaml())
            write_text(folder / "ds_config.json", json.dumps(ds_config, indent=2) + "\n")
    return ds_config
