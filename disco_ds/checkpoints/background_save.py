"""A save in the background: copy the state to host memory, then write, hash and flush it while training continues.

A training step waits only for the copy. The writer is a thread and not a process: it ends with its
rank, it needs no shared memory, and torch.save and hashlib release Python's global lock for everything
but the small pickles. The writer never communicates with other ranks. The ranks learn from the flags
that they exchange at every step (`agree` in training/loop.py) that all writers are done. Then the main
threads exchange sizes and checksums, and a thread of rank 0 renames the folder and removes old
checkpoints. Checksums are exchanged by a collective and not through files, because on NFS a new file
may become visible to other hosts late.

Alternatives considered: DeepSpeed's decoupled checkpoint engine sends the live tensors to a child
process through /dev/shm, and hangs or silently loses saves if that fails. DeepSpeed's fast checkpoint
engine returns only after it has written. torch's StateDictStager keeps one buffer per live storage, so
it allocates and pins memory again for every tensor that DeepSpeed re-creates.

All tensors are copied into one block, because torch's pinned allocator would round the size of each
tensor up to a power of two.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from disco_ds.checkpoints.retention import ENGINE, META, seal, set_aside
from disco_ds.config.text_file import write_text
from disco_ds.data.pipeline.shared_batches import pin, unpin
from disco_ds.distributed import comm, jobs

ALIGNMENT = 64
"""In the block of host memory, each tensor starts at a multiple of this many bytes."""


class HostCopy:
    """A block of host memory that holds a copy of a state. It is pinned if the device is a CUDA GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, state: Any) -> Any:
        """Return a copy of a tree of dicts, lists and tuples. The next call overwrites the copied tensors.

        Leaves that are not tensors are copied by copy.deepcopy.

        Raises:
            RuntimeError: If there is not enough memory.
        """
        # tree_flatten would otherwise descend into a torch.Size, which would be rebuilt as a plain tuple.
        leaves, structure = tree_flatten(state, is_leaf=lambda node: isinstance(node, torch.Size))
        sizes = [leaf.nbytes if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        padded = (math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes)
        *starts, total = accumulate(padded, initial=0)
        self._reserve(total)
        # torch.save writes the whole storage of a tensor, even if the tensor is a slice. A tensor made
        # from a slice of a NumPy array has a storage of only that slice.
        memory = self._memory.numpy()
        copies = []
        for leaf, start, size in zip(leaves, starts, sizes, strict=True):
            if isinstance(leaf, Tensor):
                place = torch.from_numpy(memory[start : start + size])
                place = place.view(leaf.dtype).view(leaf.shape)
                copies.append(place.copy_(leaf.detach(), non_blocking=True))
            else:
                copies.append(deepcopy(leaf))
        get_accelerator().synchronize()
        return tree_unflatten(copies, structure)

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            unpin(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def _reserve(self, size: int) -> None:
        if self._memory.numel() >= size:
            return
        self.close()  # before the new memory is allocated, so that the host never holds both blocks
        self._memory = torch.empty(size, dtype=torch.uint8)
        if get_accelerator().device_name() == "cuda":
            self._pinned = pin(self._memory, "a checkpoint's copy")


@dataclass
class Save:
    """A save in progress. Every rank must create one.

    Each rank writes its files in a thread. When all ranks have written theirs, they exchange the
    checksums. Then a thread of rank 0 completes the checkpoint. Training never waits for the disk.
    """

    final: Path
    """The folder of the complete checkpoint."""
    partial: Path
    """The folder to write into, which is renamed to `final` at the end."""
    meta: dict[str, Any]
    """Content of checkpoint.json, without the list of files and the seal."""
    states: dict[Path, Any]
    """Content of each file that this rank writes, keyed by path. It must not change until the files are written."""
    copied: Sequence[Path] = ()
    """Files of this rank that are in the partial folder already."""
    _job: Future[Any] = field(default_factory=Future)
    """What this rank's thread is doing."""
    _completing: bool = False
    """Whether rank 0's thread is completing the checkpoint. False while the ranks write their files."""

    @property
    def step(self) -> int:
        """The training step whose state is saved."""
        return self.meta["step"]

    @property
    def working(self) -> bool:
        """Whether this rank's thread is still working."""
        return not self._job.done()

    def start(self) -> None:
        """Start writing this rank's files, or start again after a failure."""
        self._completing = False
        self._job = jobs.start(self._write)

    def wait(self, seconds: float) -> None:
        """Wait for this rank's thread, but at most this many seconds."""
        futures.wait([self._job], seconds)

    def wait_for_all(self) -> None:
        """Wait until the threads of all ranks are done. Collective."""
        what = f"completing {self.final}" if self._completing else f"writing {self.partial}"
        jobs.wait_for_all(self._job, what)

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
                self._job.result()
            return True
        files: dict[str, Any] = {}
        with comm.all_or_none(f"writing {self.partial}"):
            files = self._job.result()
        for part in comm.gather_objects(files):
            files |= part
        self._completing = True
        if comm.rank() == 0:
            self._job = jobs.start(partial(self._complete, files, tidy))
        return False

    def finish(self) -> Path:
        """Wait until the checkpoint is complete and return its folder. Collective.

        Raises:
            AgreedError: See `advance`.
        """
        complete = False
        while not complete:
            self.wait_for_all()
            complete = self.advance(tidy=lambda: None)
        return self.final

    def _write(self) -> dict[str, dict[str, Any]]:
        """Write this rank's files. Return the size and checksum of each file, keyed by name."""
        (self.partial / ENGINE).mkdir(parents=True, exist_ok=True)
        files = {}
        for path, state in self.states.items():
            files[str(path.relative_to(self.partial))] = write_tensors(state, path)
        for path in self.copied:
            sync(path)
            entry = {"bytes": path.stat().st_size, "sha256": checksum(path)}
            files[str(path.relative_to(self.partial))] = entry
        return files

    def _complete(self, files: dict[str, dict[str, Any]], tidy: Callable[[], object]) -> None:
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
