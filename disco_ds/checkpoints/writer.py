"""Write the files of a checkpoint.

They are written outside of DeepSpeed's own save, because no rank may fail inside of its barriers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.runtime.engine import dp_index_to_str

from disco_ds.distributed import comm

PROBE_BYTES = 2**20
"""Size of the file that is written to find out why a write failed."""
OFFLOADED_FOLDER = "offloaded_tensors"
"""Folder next to DeepSpeed's files, with the optimizer states that it keeps on NVMe."""


class _HashedFile:
    """Passes what is written on to a file, and hashes it on the way.

    It keeps the first error until `raise_error`, because torch.save would hide the cause.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._error: OSError | None = None
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._error is None:
            self.digest.update(data)
            self.num_bytes += size
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Do nothing: torch.save calls this, and write_tensors flushes."""

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def write_tensors(value: Any, path: Path) -> dict[str, Any]:
    """Write a file with torch.save and flush it to the disk.

    The checksum is that of the bytes that were handed to the system. The descriptor that wrote them is
    the one that is flushed, because only there does NFS report a failed write.

    Returns:
        The file's size (`bytes`) and `sha256`.

    Raises:
        OSError: Naming the folder and the cause, such as a full disk.
    """
    try:
        with path.open("wb") as file:
            hashed = _HashedFile(file)
            torch.save(value, hashed)  # type: ignore[arg-type]
            hashed.raise_error()
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        why = _probe(path.parent) or f"{type(error).__name__}: {error}"
        raise OSError(f"{path.name} could not be written: {why}") from error
    return {"bytes": hashed.num_bytes, "sha256": hashed.digest.hexdigest()}


def copy_files(engine: Engine, folder: Path, tag: str) -> list[Path]:
    """Copy the files that engine.save_checkpoint would copy: scripts on rank 0, and this rank's states on NVMe.

    Args:
        engine: The engine.
        folder: The folder to copy into.
        tag: Name of the folder inside it that has DeepSpeed's files.

    Returns:
        The copies.

    Raises:
        OSError: If a file cannot be copied.
    """
    copies = []
    if comm.rank() == 0:
        if engine.save_zero_checkpoint:
            engine._copy_recovery_script(str(folder))
        copies = [path for path in folder.iterdir() if path.is_file()]
    if engine.zero_nvme_offload_optimizer():
        here = folder / tag / OFFLOADED_FOLDER / f"rank{dp_index_to_str(comm.rank())}"
        swapped = engine.optimizer.optimizer_swapper.swap_folder
        shutil.copytree(swapped, here, ignore=shutil.ignore_patterns("*gradient*"))
        copies += [path for path in here.rglob("*") if path.is_file()]
    return copies


def _probe(folder: Path) -> str | None:
    """Write a small file into this folder, to notice quotas too. Return the system's error, or None."""
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
