"""Write the files of a checkpoint.

DeepSpeed's own save function does not write them: if a write failed on one rank, the other ranks would
wait forever in its barriers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch


class _HashedFile:
    """A file for torch.save that hashes the bytes written to it.

    It stores the first write error instead of raising it, because torch.save would hide the cause.
    """

    def __init__(self, file: BinaryIO):
        self.file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            self.digest.update(data)
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing. torch.save calls this method, but write_tensors flushes the file."""


def write_tensors(value: Any, path: Path) -> dict[str, Any]:
    """Write a file with torch.save and flush it to the disk.

    The checksum is computed from the bytes that were passed to the operating system. The file is
    flushed through the descriptor that wrote it, because NFS reports a failed write only there.

    Returns:
        The file's size (`bytes`) and `sha256`.

    Raises:
        OSError: If the file cannot be written. The message names the folder and the cause, such as a full disk.
    """
    try:
        with path.open("wb") as file:
            hashed = _HashedFile(file)
            torch.save(value, hashed)  # type: ignore[arg-type]
            if hashed.error is not None:
                raise hashed.error
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except OSError as error:
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(
            f"{path.name} could not be written: {error.strerror} in {path.parent} "
            f"({free:,.0f} MiB free); make room there"
        ) from error
    return {"bytes": size, "sha256": hashed.digest.hexdigest()}
