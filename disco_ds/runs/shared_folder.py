"""Agree on the run folder: rank 0 makes or finds it, and every rank checks that it can see it and write to it."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from disco_ds.config import Config, render_ds_config
from disco_ds.config.text_file import write_json, write_text
from disco_ds.distributed import comm
from disco_ds.runs.messages import write_log
from disco_ds.runs.run_folder import CONFIG, FINISHED, find_run_folder, lock_folder, make_run_folder


class FinishedError(ValueError):
    """The run to resume has already completed all of its steps."""

    def __init__(self, folder: Path, num_steps: int):
        super().__init__(
            f"{folder} has done all its steps ({num_steps:,}): extend it with a larger steps=, samples= or epochs=, "
            "or start a new run without --resume"
        )
        self.folder = folder


def open_folder(config: Config, resume: str | None, stack: ExitStack) -> Path:
    """Make or find the run folder, lock it, and check that every rank sees it. Collective.

    Args:
        config: Settings of the run.
        resume: Value of --resume; None makes a new folder.
        stack: When it is closed, the lock is released and the log is closed.

    Raises:
        FinishedError: On every rank, if the run to resume has already completed all steps.
        ValueError: On every rank, if the folder cannot be found, made or locked, or a rank cannot write to it.
    """

    def find() -> tuple[Path, int, int]:
        runs, name = config.runs, config.name
        path = find_run_folder(runs, name, resume) if resume else make_run_folder(runs, name)
        stack.enter_context(lock_folder(path))
        reached = {"steps": 0, "samples": 0}
        if (path / FINISHED).exists():
            reached = json.loads((path / FINISHED).read_bytes())
        return path, reached["steps"], reached["samples"]

    folder, steps, samples = comm.from_rank_0("run folder", find)
    if config.find_end(steps, samples)[0] <= steps:
        raise FinishedError(folder, steps)
    with removed_if_refused(folder, new=not resume):
        check_shared(folder)
    if comm.rank() == 0:
        stack.enter_context(write_log(folder))
    return folder


@contextmanager
def removed_if_refused(folder: Path, new: bool) -> Iterator[None]:
    """Remove the run folder if the block fails and the folder is new."""
    try:
        yield
    except Exception:
        if new and comm.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_shared(folder: Path) -> None:
    """Check that every rank sees the same folder and can write to it. Collective.

    Raises:
        ValueError: On every rank, if any rank does not see the folder or cannot write to it. The message names
            these ranks and their hosts.
    """
    what = f"run folder {folder}"
    # The name is random, because NFS may have cached that a fixed name does not exist.
    made = comm.from_rank_0(what, lambda: tempfile.mkdtemp(prefix=".shared-", dir=folder))
    token = folder / os.path.basename(made)
    try:
        with comm.all_or_none(what):
            if not (token.exists() and os.access(folder, os.W_OK)):
                raise ValueError(
                    "not visible or not writable, but every host writes its part of a checkpoint there; choose a "
                    "folder on a file system that all hosts share (runs=/shared/runs)"
                )
    finally:
        if comm.rank() == 0:
            with suppress(OSError):
                token.rmdir()


def write_settings(config: Config, stage: Config, folder: Path) -> dict[str, Any]:
    """Write the settings of this run into the run folder, as config.yaml and ds_config.json. Collective.

    Args:
        config: Settings of the whole run, for config.yaml.
        stage: Settings of the current stage, for ds_config.json.
        folder: The run folder.

    Returns:
        The content of ds_config.json.
    """
    ds_config = render_ds_config(stage, comm.size(), folder)
    with comm.all_or_none(f"writing the settings into {folder}"):
        if comm.rank() == 0:
            (folder / FINISHED).unlink(missing_ok=True)  # exists if a finished run is extended
            write_text(folder / CONFIG, config.to_yaml())
            write_json(folder / "ds_config.json", ds_config)
    return ds_config
