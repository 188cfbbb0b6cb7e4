"""A checkpoint on its way to the disk: copied to host memory, then written, flushed and hashed beside the training.

A step waits for the copy alone. The writer is a thread: it ends with its rank however that ends, it needs no shared
memory, and torch.save and hashlib give up Python's lock for all but the small pickles. It never communicates. The ranks
learn from the flags of a step (agree in loop.py) that all writers are done; then the main threads exchange sizes and
checksums, and rank 0 gives the folder its name. The checksums travel in that exchange and not in files, because on NFS
a host may see another host's new file late.

Not used, of what exists: DeepSpeed's decoupled engine sends the live tensors to a child process, by way of /dev/shm,
and hangs or loses saves quietly where that fails; its fast engine writes before it returns. torch's StateDictStager
keeps one buffer per living storage, which is allocated (and pinned) again for every tensor that DeepSpeed makes anew,
and rebuilds objects by rules of its own. The pickler here is torch.save's idea, so that what is written from the copy
is what torch.save would have written at once. Copies are not taken storage by storage from torch's pinned allocator,
which rounds each up to a power of two.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from disco_ds.data.shared_batches import pin, unpin
from disco_ds.distributed import comm
from disco_ds.training.disk import write_tensors
from disco_ds.training.retention import META, seal, set_aside

ALIGNMENT = 64
"""Bytes; where a storage begins in the host's memory."""


class HostCopy:
    """One piece of host memory, pinned for a CUDA device, that holds a copy of a state; each save overwrites it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, state: Any) -> Any:
        """Copy a tree of whatever torch.save takes; the copy is valid until the next one.

        Tensors that share a storage share its copy; dtypes, strides and offsets stay. Raises: RuntimeError without
        memory, and what pickle raises.
        """
        found: dict[int, UntypedStorage] = {}
        structure = io.BytesIO()
        _Pickler(structure, found).dump(state)
        sizes = [storage.nbytes() for storage in found.values()]
        begins = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self._reserve(begins[-1])
        # A slice of a NumPy array becomes a storage of its own, where torch.save would write all of a slice's storage.
        memory = self._memory.numpy()
        copies = [torch.from_numpy(memory[at : at + size]) for at, size in zip(begins, sizes, strict=False)]
        for copy, storage in zip(copies, found.values(), strict=True):
            bytes_of = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy.copy_(bytes_of, non_blocking=True)
        get_accelerator().synchronize()
        structure.seek(0)
        return _Unpickler(structure, dict(zip(found, copies, strict=True))).load()

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            unpin(self._memory)
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _reserve(self, size: int) -> None:
        if self._memory.numel() < size:
            self.close()  # before the new memory is there, so that the host never holds both
            self._memory = torch.empty(size, dtype=torch.uint8)
            self._pinned = get_accelerator().device_name() == "cuda" and pin(self._memory, "a checkpoint's copy")


class _Pickler(pickle.Pickler):
    """Pickles all but the storages, as torch.save does."""

    def __init__(self, file: io.BytesIO, found: dict[int, UntypedStorage]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.found = found

    def persistent_id(self, value: Any) -> Any:
        dtype = None
        if isinstance(value, TypedStorage):
            value, dtype = value._untyped_storage, value.dtype
        if not isinstance(value, UntypedStorage):
            return None
        self.found[value._cdata] = value
        return value._cdata, dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, copies: dict[int, Tensor]):
        super().__init__(file)
        self.copies = copies

    def persistent_load(self, key: Any) -> Any:
        storage = self.copies[key[0]].untyped_storage()
        return storage if key[1] is None else TypedStorage(wrap_storage=storage, dtype=key[1], _internal=True)


class Save:
    """A save in flight. Every rank must make one.

    Args: final: the checkpoint's folder; partial: the folder to write into, with the files that are in it already;
          meta: of checkpoint.json; states: this rank's files and what they hold, which must not change until they are
          written; background: write beside the training.
    """

    def __init__(self, final: Path, partial: Path, meta: dict[str, Any], states: dict[Path, Any], background: bool):
        self.final, self.partial, self.meta, self.states = final, partial, meta, states
        self.background = background
        # What DeepSpeed itself has written, such as its script.
        self._names = [path for path in partial.rglob("*") if path.is_file()] if comm.rank() == 0 else []
        self._names += states
        self._thread: threading.Thread | None = None
        self._sums: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def writing(self) -> bool:
        """Whether this rank still writes."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Write this rank's files; after a failed `finish` once more. Without `background` they are written now."""
        self._error, self._sums = None, {}
        if self.background:
            self._thread = threading.Thread(target=self._write, name="checkpoint-writer", daemon=True)
            self._thread.start()
        else:
            self._write()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until this rank has written its files."""
        if self._thread is not None:
            self._thread.join(seconds)

    def finish(self) -> Path:
        """Wait for the writers of all ranks, and give the checkpoint its name. Collective.

        Returns: the finished folder.
        Raises:  AgreedError if any rank could not write its part. Nothing then bears the finished name.
        """
        self.wait()
        with comm.all_or_none(f"writing {self.partial}"):
            if self._error is not None:
                raise self._error
        sums = {name: entry for part in comm.gather_objects(self._sums) for name, entry in part.items()}
        with comm.all_or_none(f"completing {self.final}"):
            if comm.rank() == 0:
                _complete(self.partial, self.final, self.meta, sums)
        return self.final

    def _write(self) -> None:
        try:
            for path, state in self.states.items():
                write_tensors(state, path)
            for path in self._names:
                sync(path)
                entry = {"bytes": path.stat().st_size, "sha256": checksum(path)}
                self._sums[str(path.relative_to(self.partial))] = entry
        except Exception as error:  # raised by `finish`, on all ranks together
            self._error = error


def checksum(path: Path) -> str:
    """SHA-256 of a file. Raises: OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that no crash leaves a renamed folder with lost contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete(partial: Path, final: Path, meta: dict[str, Any], sums: dict[str, dict[str, Any]]) -> None:
    meta = {**meta, "files": dict(sorted(sums.items()))}
    meta["seal"] = seal(meta)
    (partial / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    sync(partial / META)
    if os.path.lexists(final):  # an earlier save of this step: it is kept, so that a crash here loses neither
        set_aside(final)
    partial.rename(final)
    sync(final.parent)
