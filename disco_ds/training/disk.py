"""Writing the files of a checkpoint: a full disk is called by its name, and no rank raises while others wait for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

PROBE_BYTES = 2**20


def write_tensors(value: Any, path: Path) -> None:
    """torch.save. Raises: OSError naming the folder, where the disk is full or whatever else stood in the way."""
    _attempt(partial(torch.save, value, path), path)


class Writer(TorchCheckpointEngine):
    """What writes DeepSpeed's files; the first error waits in `error` until all ranks can hear of it.

    Raised at once it would leave the other ranks in one of DeepSpeed's barriers.
    """

    error: OSError | None = None

    def save(self, state_dict: Any, path: str) -> None:
        self.attempt(partial(super().save, state_dict, path), Path(path))

    def attempt(self, write: Callable[[], None], path: Path) -> None:
        if self.error is None:  # what follows would be thrown away
            try:
                _attempt(write, path)
            except OSError as error:
                self.error = error

    def raise_error(self) -> None:
        """Raises: the OSError of this rank's part, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def install_writer(engine: Any) -> None:
    """Let this writer write what engine.save_checkpoint writes."""
    writer = Writer(engine._config)
    copy_scripts = engine._copy_recovery_script
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda folder: writer.attempt(
        partial(copy_scripts, folder), Path(folder, "zero_to_fp32.py")
    )


def _attempt(write: Callable[[], None], path: Path) -> None:
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch: "inline_container ... unexpected pos", without a word of why
        why = _probe(path.parent) or f"{type(error).__name__}: {error}"
        raise OSError(f"{path.name} could not be written: {why}") from error


def _probe(folder: Path) -> str | None:
    """What the system says to a little file in this folder; None if it can be written, quotas and all."""
    path = folder / f".probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        usage = shutil.disk_usage(folder)
        room = f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free"
        return f"{error.strerror} in {folder} ({room}); make room there"
    finally:
        path.unlink(missing_ok=True)
    return None
