"""Writing the files of a checkpoint: errors name the full disk, and no rank raises while the others wait for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

PROBE_BYTES = 2**20


def write_tensors(value: Any, path: Path) -> None:
    """Save with torch.save. Raises: OSError naming the folder and the cause, such as a full disk."""
    _attempt(partial(torch.save, value, path), path)


class Writer(TorchCheckpointEngine):
    """Writes DeepSpeed's files, and keeps the first error until `raise_error`.

    Raised at once, it would leave the other ranks waiting in one of DeepSpeed's barriers.
    """

    error: OSError | None = None
    _held: dict[Path, Any] | None = None

    def save(self, state_dict: Any, path: str) -> None:
        if self._held is not None:
            self._held[Path(path)] = state_dict
            return
        self.attempt(partial(super().save, state_dict, path), Path(path))

    @contextmanager
    def held(self) -> Iterator[dict[Path, Any]]:
        """Keep what DeepSpeed would write, by its path, instead of writing it."""
        states: dict[Path, Any] = {}
        self._held = states
        try:
            yield states
        finally:
            self._held = None

    def attempt(self, write: Callable[[], None], path: Path) -> None:
        if self.error is None:  # else the checkpoint is lost already
            try:
                _attempt(write, path)
            except OSError as error:
                self.error = error

    def raise_error(self) -> None:
        """Raise the error of this rank's files, if there was one, and forget it. Raises: OSError."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def install_writer(engine: Any) -> None:
    """Make engine.save_checkpoint write by a Writer."""
    writer = Writer(engine._config)
    copy_scripts = engine._copy_recovery_script
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda folder: writer.attempt(
        partial(copy_scripts, folder), Path(folder, "zero_to_fp32.py")
    )


def _attempt(write: Callable[[], None], path: Path) -> None:
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's is "inline_container ... unexpected pos", without the reason
        why = _probe(path.parent) or f"{type(error).__name__}: {error}"
        raise OSError(f"{path.name} could not be written: {why}") from error


def _probe(folder: Path) -> str | None:
    """Try to write a small file into this folder, which meets quotas too. Returns: the system's error, or None."""
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
