"""Save in the background: copy the state to host memory, then write, hash and flush it while training continues.

Training waits only for the copy, and for the previous save if that is still in progress (saver.py). Each rank writes
its files in a thread. A thread is enough, because torch.save and hashlib release Python's global interpreter lock for
everything but the small pickles. Unlike a process, a thread ends with its rank and needs no shared memory.

The threads never communicate with other ranks. Flags that the ranks exchange at every step (`agree` in
training/step.py) show when all threads are done. Then the main threads exchange sizes and checksums, and a thread of
rank 0 renames the folder and removes old checkpoints. The checksums are exchanged by a collective and not through
files, because on NFS a new file may become visible to other hosts late.

Alternatives considered: DeepSpeed's decoupled checkpoint engine sends the live tensors to a child
process through /dev/shm, and hangs or silently loses saves if this transfer fails. DeepSpeed's fast checkpoint
engine returns only after it has written. torch's StateDictStager keeps one buffer per live storage, so
it allocates memory again for every tensor that DeepSpeed re-creates. Pinned memory would make the copy
from a GPU faster, but torch rounds the size of each pinned tensor up to a power of two.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from disco_ds.checkpoints.retention import ENGINE, seal, set_aside
from disco_ds.config import Tree
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm, jobs
from disco_ds.runs.run_folder import META


class HostCopy:
    """Host memory for a copy of the state. Every save reuses it, because the first write to new memory is slow."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def take(self, state: Any) -> Any:
        """Return a copy of a tree of dicts, lists and tuples. The next call overwrites the tensors of this copy.

        Leaves that are not tensors are copied by copy.deepcopy.

        Raises:
            RuntimeError: If there is not enough memory.
        """
        # tree_flatten would otherwise descend into a torch.Size, which would be rebuilt as a plain tuple.
        leaves, structure = tree_flatten(state, is_leaf=lambda node: isinstance(node, torch.Size))
        copies = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                copies.append(deepcopy(leaf))
                continue
            copy = self._tensors.get(number)
            if copy is None or copy.shape != leaf.shape or copy.dtype != leaf.dtype:
                # The copy needs a separate storage: torch.save writes a tensor's whole storage, even for a slice.
                copy = self._tensors[number] = torch.empty(leaf.shape, dtype=leaf.dtype)
            copies.append(copy.copy_(leaf.detach()))
        return tree_unflatten(copies, structure)


@dataclass
class Save:
    """A save in progress. Every rank must create one.

    Each rank writes its files in a thread. When all ranks have written theirs, they exchange the
    checksums. Then a thread of rank 0 completes the checkpoint. Training can continue meanwhile.
    """

    final: Path
    """The folder of the complete checkpoint."""
    partial: Path
    """The folder to write into, which is renamed to `final` at the end."""
    meta: Tree
    """Content of checkpoint.json, without its entries `files` and `seal`."""
    states: dict[Path, Any]
    """Content of each file that this rank writes, keyed by path. It must not change until the files are written."""
    job: Future[Any] = field(default_factory=Future)
    """The latest job of this rank's thread: to write the files or, on rank 0 after that, to complete the checkpoint."""
    _completing: bool = False
    """Whether rank 0's thread has started to complete the checkpoint. False while the ranks write their files."""

    def start(self) -> None:
        """Start writing this rank's files, or start again after a failure."""
        self._completing = False
        self.job = jobs.start(self._write)

    def advance(self, tidy: Callable[[], object]) -> bool:
        """Complete the checkpoint in rank 0's thread, or check that it is complete. Collective.

        Call this only when the threads of all ranks are done. The first call checks that all ranks have
        written their files, exchanges checksums and starts to complete the checkpoint. The second call
        checks that the checkpoint is complete.

        Args:
            tidy: Called in rank 0's thread as soon as the checkpoint is complete.

        Returns:
            True if the checkpoint is complete, False if rank 0's thread has started to complete it.

        Raises:
            AgreedError: If any rank could not write its files, or rank 0 could not complete the checkpoint.
        """
        if self._completing:
            with comm.all_or_none(f"completing {self.final}"):
                self.job.result()
            return True
        files: dict[str, Tree] = {}
        with comm.all_or_none(f"writing {self.partial}"):
            files = self.job.result()
        for part in comm.gather_objects(files):
            files |= part
        self._completing = True
        if comm.rank() == 0:
            self.job = jobs.start(partial(self._complete, files, tidy))
        return False

    def _write(self) -> dict[str, Tree]:
        """Write this rank's files. Return the size and checksum of each file, keyed by name."""
        (self.partial / ENGINE).mkdir(parents=True, exist_ok=True)
        return {
            str(path.relative_to(self.partial)): write_tensors(state, path)
            for path, state in self.states.items()
        }

    def _complete(self, files: dict[str, Tree], tidy: Callable[[], object]) -> None:
        """Write checkpoint.json and give the folder its final name."""
        meta = {**self.meta, "files": dict(sorted(files.items()))}
        meta["seal"] = seal(meta)
        write_text(self.partial / META, json.dumps(meta, indent=1) + "\n")
        # After a crash, a folder with the final name must not lack a file, so flush all folders first.
        for folder in {path.parent for path in self.partial.rglob("*")}:
            sync(folder)
        # If this step was saved before, keep the earlier checkpoint, so that a crash between the two
        # renames loses neither checkpoint.
        if os.path.lexists(self.final):
            set_aside(self.final)
        self.partial.rename(self.final)
        sync(self.final.parent)
        tidy()


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


def write_tensors(value: Any, path: Path) -> Tree:
    """Write a file with torch.save and flush it to the disk.

    The checksum is computed from the bytes that were passed to the operating system. The file is
    flushed through the descriptor that wrote it, because NFS reports a failed write only to that
    descriptor.

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
        raise OSError(
            f"{path.name} could not be written: {error.strerror} in {path.parent}; if the disk is full, free up space"
        ) from error
    return {"bytes": size, "sha256": hashed.digest.hexdigest()}


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
