"""A save in the background: the state is copied to host memory, then written, hashed and flushed during training.

A step waits only for the copy. The writer is a thread: it ends with its rank in any case, it needs no
shared memory, and torch.save and hashlib release Python's lock for all but the small pickles. It never
communicates. The ranks learn from the flags of a step (`agree` in training/loop.py) that all writers
are done. Then the main threads exchange sizes and checksums, and a thread of rank 0 renames the folder
and removes old checkpoints. The checksums are exchanged by a collective and not through files, because
on NFS a host may see a new file of another host late.

Alternatives considered: DeepSpeed's decoupled engine sends the live tensors to a child process through
/dev/shm, and hangs or silently loses saves if that fails; its fast engine writes before it returns.
torch's StateDictStager keeps one buffer per living storage, which is allocated (and pinned) again for
every tensor that DeepSpeed creates again, and rebuilds objects by rules of its own. The pickler here
works like that of torch.save, so writing the copy gives exactly what torch.save would have written at
once. Copies are not taken storage by storage from torch's pinned allocator, which rounds the size of
each up to a power of two.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from disco_ds.checkpoints.retention import META, seal, set_aside
from disco_ds.checkpoints.writer import write_tensors
from disco_ds.config.text_file import write_text
from disco_ds.data.pipeline.shared_batches import pin, unpin
from disco_ds.distributed import comm, jobs

ALIGNMENT = 64
"""In host memory every storage starts at a multiple of this many bytes."""


class HostCopy:
    """A block of host memory, pinned if the device is CUDA, that holds a copy of a state. Each save overwrites it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, state: Any) -> Any:
        """Copy a tree of any objects that torch.save accepts. The copy is valid until the next call.

        Tensors that share a storage share its copy; dtypes, strides and offsets stay the same.

        Raises:
            RuntimeError: If there is not enough memory. Pickle's errors are raised too.
        """
        storages: dict[int, UntypedStorage] = {}
        structure = io.BytesIO()
        _Pickler(structure, storages).dump(state)
        sizes = [storage.nbytes() for storage in storages.values()]
        padded = (-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        *starts, total = accumulate(padded, initial=0)
        self._reserve(total)
        # A slice of a NumPy array becomes a separate storage. torch.save would write the whole storage
        # of a slice of a tensor.
        memory = self._memory.numpy()
        copies: dict[int, Tensor] = {}
        for (key, storage), start, size in zip(storages.items(), starts, sizes, strict=True):
            copies[key] = torch.from_numpy(memory[start : start + size])
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copies[key].copy_(source, non_blocking=True)
        get_accelerator().synchronize()
        structure.seek(0)
        return _Unpickler(structure, copies).load()

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            unpin(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def _reserve(self, size: int) -> None:
        if self._memory.numel() >= size:
            return
        self.close()  # before the new memory is allocated, so that the host never holds both
        self._memory = torch.empty(size, dtype=torch.uint8)
        if get_accelerator().device_name() == "cuda":
            self._pinned = pin(self._memory, "a checkpoint's copy")


class _Pickler(pickle.Pickler):
    """Pickles everything but the storages, as torch.save does."""

    def __init__(self, file: io.BytesIO, storages: dict[int, UntypedStorage]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages = storages

    def persistent_id(self, value: Any) -> Any:
        dtype = None
        if isinstance(value, TypedStorage):
            dtype = value.dtype
            value = value._untyped_storage
        if not isinstance(value, UntypedStorage):
            return None
        self.storages[value._cdata] = value
        return value._cdata, dtype


class _Unpickler(pickle.Unpickler):
    """Puts the copies in the place of the storages."""

    def __init__(self, file: io.BytesIO, copies: dict[int, Tensor]):
        super().__init__(file)
        self.copies = copies

    def persistent_load(self, key: Any) -> Any:
        number, dtype = key
        storage = self.copies[number].untyped_storage()
        if dtype is None:
            return storage
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class Save:
    """A save in progress. Every rank must create one.

    Each rank writes its files in a thread. When all ranks have done so, they exchange the checksums,
    and a thread of rank 0 completes the checkpoint, so that training never waits for the disk.

    Args:
        final: The checkpoint's folder.
        partial: The folder to write into.
        meta: Content of checkpoint.json.
        states: Path -> content of this rank's files. It must not change until they are written.
        present: Files of this rank that are in the folder already.
    """

    def __init__(
        self,
        final: Path,
        partial: Path,
        meta: dict[str, Any],
        states: dict[Path, Any],
        present: Sequence[Path] = (),
    ):
        self.final = final
        self.partial = partial
        self.meta = meta
        self.states = states
        self.present = present
        self._job: Future[Any] = Future()
        self._completing = False

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.meta["step"]

    @property
    def working(self) -> bool:
        """Whether this rank's thread is still working."""
        return not self._job.done()

    def start(self) -> None:
        """Start to write this rank's files, or write them again after a failure."""
        self._completing = False
        self._job = jobs.start(self._write)

    def wait(self, seconds: float) -> None:
        """Wait for this rank's thread, but at most this long."""
        futures.wait([self._job], seconds)

    def wait_for_all(self) -> None:
        """Wait until the threads of all ranks are done. Collective."""
        what = f"completing {self.final}" if self._completing else f"writing {self.partial}"
        jobs.wait_for_all(self._job, what)

    def advance(self, tidy: Callable[[], object]) -> bool:
        """Take the next step of the save, once the threads of all ranks are done. Collective.

        Args:
            tidy: Called by rank 0's thread when the checkpoint is complete.

        Returns:
            True if the checkpoint is complete, False if rank 0's thread has started to complete it.

        Raises:
            AgreedError: If any rank could not write its part, or rank 0 could not complete the checkpoint.
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
        """Wait until the checkpoint is complete, and return its folder. Collective.

        Raises:
            AgreedError: See advance.
        """
        complete = False
        while not complete:
            self.wait_for_all()
            complete = self.advance(tidy=lambda: None)
        return self.final

    def _write(self) -> dict[str, dict[str, Any]]:
        """Write this rank's files. Return size and checksum of each by name."""
        files = {}
        for path, state in self.states.items():
            files[str(path.relative_to(self.partial))] = write_tensors(state, path)
        for path in self.present:
            sync(path)
            entry = {"bytes": path.stat().st_size, "sha256": checksum(path)}
            files[str(path.relative_to(self.partial))] = entry
        return files

    def _complete(self, files: dict[str, dict[str, Any]], tidy: Callable[[], object]) -> None:
        """Write checkpoint.json and give the folder its final name."""
        meta = {**self.meta, "files": dict(sorted(files.items()))}
        meta["seal"] = seal(meta)
        write_text(self.partial / META, json.dumps(meta, indent=1) + "\n")
        # A crash must not leave a folder with the final name that lacks a file.
        for folder in {path.parent for path in self.partial.rglob("*")}:
            sync(folder)
        # An earlier save of this step is kept, so that a crash at this moment loses neither.
        if os.path.lexists(self.final):
            set_aside(self.final)
        self.partial.rename(self.final)
        sync(self.final.parent)
        tidy()


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: If it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
