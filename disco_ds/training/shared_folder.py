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
from disco_ds.metrics.run_folder import CONFIG, FINISHED, RunFolder, find_run_folder, make_run_folder, make_token
from disco_ds.metrics.run_log import write_log


def open_folder(config: Config, resume: str | None, stack: ExitStack) -> Path:
    """The run's folder, which rank 0 makes or finds and locks, and every rank must see. Collective."""
    opened: RunFolder | None = None
    token: Path | None = None
    with comm.all_or_none("run folder"):
        if comm.rank() == 0:
            runs, name = config.runs, config.name
            opened = find_run_folder(runs, name, resume) if resume else make_run_folder(runs, name)
            stack.callback(opened.close)
            refuse_finished(opened.path, config.num_steps)
            stack.enter_context(write_log(opened.path))
            token = make_token(opened.path)
    token = comm.broadcast(token)
    try:
        check_shared(token)
    except ValueError:
        if opened and not resume:
            shutil.rmtree(opened.path, ignore_errors=True)
        raise
    return token.parent


def refuse_finished(folder: Path, num_steps: int) -> None:
    """Raises: ValueError for a run that has done all its steps, if it is to have no more than those now."""
    if (path := folder / FINISHED).exists():
        try:
            done = int(json.loads(path.read_text(encoding="utf-8"))["steps"])
        except (ValueError, KeyError, TypeError):  # cut off by a full disk, or of an unknown version
            raise ValueError(f"{path} cannot be read; remove it if the run is to go on") from None
        if num_steps <= done:
            raise ValueError(
                f"{folder} has done all its steps, {done:,}: give it more to extend it (steps=, samples= or epochs=), "
                "or start a new run without --resume"
            )


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
