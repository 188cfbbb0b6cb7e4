"""Save a run's checkpoints in the background, one at a time.

`Saver.save` copies the state of this rank into host memory, and training continues. `Save.run` shows the whole life of
a save: each rank writes, hashes and flushes its files in a thread; the ranks exchange the checksums; a thread of rank 0
writes checkpoint.json, renames the folder and removes old checkpoints. In every step, the ranks agree whether the
threads of all ranks are done (training/step.agree). If they are, the save continues after the step (`Saver.poll`).
Training waits only for the copy, and for the previous save if that is still in progress.

A thread is enough, because torch.save and hashlib release Python's global interpreter lock for everything but the
small pickles. Unlike a process, a thread ends with its rank and needs no shared memory. The threads never communicate
with other ranks. The checksums are exchanged by a collective and not through files, because on NFS a new file may
become visible to other hosts late.

Alternatives considered: DeepSpeed's decoupled checkpoint engine sends the live tensors to a child
process through /dev/shm, and hangs or silently loses saves if this transfer fails. DeepSpeed's fast checkpoint
engine returns only after it has written. torch's StateDictStager keeps one buffer per live storage, so
it allocates memory again for every tensor that DeepSpeed re-creates. Pinned memory would make the copy
from a GPU faster, but torch rounds the size of each pinned tensor up to a power of two.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from deepspeed import DeepSpeedEngine as Engine
from torch import Tensor
from torch.utils._pytree import tree_map

from disco_ds.checkpoints import keep
from disco_ds.checkpoints.checkpoint import read_rng
from disco_ds.checkpoints.keep import ENGINE, FORMAT, Mirror, seal, set_aside
from disco_ds.config import CheckpointSettings, Tree
from disco_ds.config.text_file import write_json
from disco_ds.distributed import comm, deepspeed_quirks, jobs
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.runs.run_folder import CHECKPOINTS, META

MAX_FAILED_SAVES = 2
"""Number of consecutive saves that may fail. If one more save fails, the run stops."""


@dataclass
class Saver:
    """Saves a run's checkpoints, with retries, removal of old checkpoints and uploads. Every rank has one."""

    folder: Path
    """The run folder."""
    settings: CheckpointSettings
    """The run's settings for checkpoints."""
    engine: Engine
    """The engine whose state is saved."""
    read_state: Callable[[int], tuple[Tree, Tree]]
    """Called with the number of completed steps. Returns two trees: the entries of checkpoint.json (step, samples,
    num_steps, warmup_batch, identity, shape, anomalies), and the state of this rank to save in addition to the engine's
    and the random generators': `data` (the loader) and `loss`."""
    heartbeat: Heartbeat
    """Notified when this rank waits for a save, so that the wait does not look like a hang."""
    add_wait: Callable[[float], None]
    """Called after each wait for a save, with the number of seconds that this wait took."""
    uploads: Mirror | None = None
    """Runs the user's upload command on each checkpoint. None on ranks other than 0 or if there is no command.

    In a run with stages, it also finishes the uploads that the previous stage left unfinished.
    """
    host_copy: HostCopy | None = None
    """Host memory for a copy of the state, so that training can continue while files are written.

    None if saves are synchronous. Then the files are written from the state itself.
    """
    in_flight: Save | None = None
    """The save in progress, if any. All ranks have the same save in progress."""
    job: Future[Any] = field(default_factory=Future)
    """The current job of the save in progress, in a thread of this rank."""
    are_jobs_done: bool = False
    """True if `job` was done on every rank at the last exchange between the ranks (training/step.agree)."""
    _jobs: Iterator[Future[Any]] = field(init=False)
    """The following jobs of the save in progress."""
    saved_step: int = 0
    """Step of the newest complete checkpoint. Until the first save, this is the step that the run was resumed from, or
    at which the current stage began."""
    num_failed: int = 0
    """Number of saves that have failed in a row."""

    def __post_init__(self) -> None:
        if self.settings.asynchronous:
            self.host_copy = HostCopy()
        if self.settings.copy_command and self.uploads is None and comm.rank() == 0:
            self.uploads = Mirror(self.settings.copy_command, self.folder)
        # A killed run may have left an incomplete checkpoint of a step that this run saves too.
        self._remove_old(keep_last=None)

    def save(self, step: int, last: bool) -> None:
        """Start to save a checkpoint in the background. Collective.

        If a save fails (for example because the disk is full), training continues and the next due
        save tries again. If this step has already been saved, do nothing.

        Args:
            step: Number of completed steps.
            last: Whether the stage or the run ends here. If so, wait until the checkpoint is complete.

        Raises:
            comm.AgreedError: If the last save of the run fails, or too many saves in a row have failed.
        """
        with self._waiting(step):
            self._finish()  # the previous save, if it is still in progress
            if step == self.saved_step:
                return
            try:
                self.in_flight = self._copy_state(step)
            except comm.AgreedError as error:
                self._note_failure(step, last, error)
                return
            self._jobs = self._write(self.in_flight, last)
            self.job = next(self._jobs)
            if last or self.host_copy is None:
                self._finish()

    def poll(self, step: int) -> None:
        """Advance the uploads and, if the jobs of all ranks are done, the save in progress. Collective.

        Args:
            step: Number of completed steps.

        Raises:
            comm.AgreedError: If too many saves have failed in a row.
        """
        if self.uploads:
            self.uploads.advance()
        if self.in_flight and self.are_jobs_done:
            with self._waiting(step):
                self.job = next(self._jobs, self.job)

    def save_before_error(self, step: int) -> str:
        """Save the progress made before a failed step, unless it is already saved. Collective.

        Args:
            step: Number of completed steps.

        Returns:
            A clause for the error message that reports whether the progress was saved.
        """
        try:
            self.save(step, last=True)
        except comm.AgreedError as error:
            return f"step {step:,} could not be saved: {error}"
        if step == 0:
            return "no step was completed"
        return f"a checkpoint was saved after step {step:,}; --resume latest resumes from there"

    def end(self, step: int) -> None:
        """Complete the save in progress, then wait for the uploads up to a time limit. Collective.

        Failures are only logged, because the run ends anyway.
        """
        try:
            with self._waiting(step):
                self._finish()
        except comm.AgreedError as error:
            comm.warn(f"the save in progress failed: {error}")
        if self.settings.copy_command:
            self.heartbeat.mark(step, "waiting for uploads")
            wait = self.uploads.wait if self.uploads else lambda seconds: None
            jobs.run("uploading checkpoints", lambda: wait(self.heartbeat.timeout_s))
            # An old checkpoint whose upload was not done at the last save is still there.
            self._remove_old(self.settings.keep_last)

    def close(self) -> None:
        """Kill a running upload. Wait up to 10 seconds for a save in progress."""
        if self.uploads:
            self.uploads.close()
        if self.in_flight is not None:
            futures.wait([self.job], 10.0)

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """Record the duration of the block as time waited for a save, and mark it as "saving" for the heartbeat."""
        start = time.monotonic()
        self.heartbeat.mark(step, "saving")
        yield
        self.add_wait(time.monotonic() - start)

    def _copy_state(self, step: int) -> Save:
        """Copy the state of all ranks for a checkpoint, which Save.run then writes. Collective.

        Raises:
            AgreedError: If any rank could not copy its state.
        """
        meta, state = self.read_state(step)
        final = self.folder / CHECKPOINTS / f"step-{step:08d}"
        temporary = final.with_name(f".{final.name}.partial")
        files = deepspeed_quirks.collect_checkpoint(self.engine, temporary, ENGINE)
        with comm.all_or_none(f"copying the state for {temporary}"):
            rank_file = temporary / f"rank_{comm.rank():05d}.pt"
            files[rank_file] = {"rng": read_rng(), **state}
            if self.host_copy is not None:
                files = self.host_copy.take(files)
        tidy = partial(self._remove, self.settings.keep_last)
        return Save(final, temporary, {"format": FORMAT, **meta}, files, tidy)

    def _finish(self) -> None:
        """Wait until the save in progress, if any, is complete or has failed. Collective."""
        while self.in_flight:
            jobs.wait_for_all(self.job, f"saving {self.in_flight.final}")
            self.job = next(self._jobs, self.job)

    def _write(self, save: Save, last: bool) -> Iterator[Future[Any]]:
        """Yield the jobs of a save, and at the end record that its checkpoint is complete. Collective.

        If the save fails, remove the oldest checkpoint to make room, and write the same state again. If no checkpoint
        can be removed, count the save as failed.

        Args:
            save: The save.
            last: Whether to raise the error of a failed save, because no later save can make up for it.
        """
        # Keep at least one checkpoint. Although training continues, host memory still contains the state to save.
        fewer = self.settings.keep_last and max(self.settings.keep_last - 1, 1)
        step = save.meta["step"]
        while True:
            try:
                yield from save.run()
                break
            except comm.AgreedError as error:
                if not self._remove_old(fewer):
                    self.in_flight = None
                    self._note_failure(step, last, error)
                    return
        self.in_flight = None
        self.num_failed = 0
        self.saved_step = step
        if self.uploads:
            self.uploads.add(save.final)

    def _note_failure(self, step: int, last: bool, error: comm.AgreedError) -> None:
        """Count a failed save and remove its files. Raise `error` if this was the last save or too many have failed."""
        self.num_failed += 1
        self._remove_old(self.settings.keep_last)
        if last or self.num_failed > MAX_FAILED_SAVES:
            raise error
        comm.warn(
            f"step {step} is not saved: {error}; training continues and the next save tries again"
        )

    def _remove_old(self, keep_last: int | None) -> int:
        """Remove old checkpoints and the files of failed saves in a thread of rank 0. Collective.

        Args:
            keep_last: Number of newest checkpoints to keep; None means all.

        Returns:
            Number of removed checkpoints.
        """
        remove = partial(self._remove, keep_last) if comm.rank() == 0 else lambda: 0
        return comm.broadcast(jobs.run("removing old checkpoints", remove))

    def _remove(self, keep_last: int | None) -> int:
        """Remove old checkpoints, except those being written, uploaded or queued for upload. Rank 0 only."""
        busy = list(self.uploads.pending) if self.uploads else []
        if self.in_flight:
            busy.append(self.in_flight.partial)
        keep_every = self.settings.keep_every_steps
        return keep.remove_checkpoints(self.folder, keep_last, keep_every, busy)


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
        numbers = itertools.count()

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return deepcopy(leaf)
            number = next(numbers)
            memory = self._tensors.get(number)
            if memory is None or memory.shape != leaf.shape or memory.dtype != leaf.dtype:
                # The copy needs a separate storage: torch.save writes a tensor's whole storage, even for a slice.
                memory = self._tensors[number] = torch.empty(leaf.shape, dtype=leaf.dtype)
            return memory.copy_(leaf.detach())

        # tree_map would otherwise descend into a torch.Size, and rebuild it as a plain tuple.
        return tree_map(copy, state, is_leaf=lambda node: isinstance(node, torch.Size))


@dataclass
class Save:
    """The state to save, and how it becomes a checkpoint. Every rank must create one."""

    final: Path
    """The folder of the complete checkpoint."""
    partial: Path
    """The folder to write into, which is renamed to `final` at the end."""
    meta: Tree
    """Content of checkpoint.json, without its entries `files` and `seal`."""
    states: dict[Path, Any]
    """Content of each file that this rank writes, keyed by path. It must not change until the files are written."""
    tidy: Callable[[], object] = lambda: None
    """Called in rank 0's thread as soon as the checkpoint is complete."""

    def run(self) -> Iterator[Future[Any]]:
        """Yield the jobs of this save, each of which must be done on all ranks before the next one is requested.

        What happens between them is collective.

        Raises:
            AgreedError: If any rank could not write its files, or rank 0 could not complete the checkpoint.
        """
        job = jobs.start(self._write)
        yield job
        files: dict[str, Tree] = {}
        with comm.all_or_none(f"writing {self.partial}"):
            files = job.result()
        for others in comm.gather_objects(files):
            files |= others
        completing = jobs.start(
            partial(self._complete, files) if comm.rank() == 0 else lambda: None
        )
        yield completing
        with comm.all_or_none(f"completing {self.final}"):
            completing.result()

    def _write(self) -> dict[str, Tree]:
        """Write this rank's files. Return the size and checksum of each file, keyed by name."""
        (self.partial / ENGINE).mkdir(parents=True, exist_ok=True)
        return {
            str(path.relative_to(self.partial)): write_tensors(state, path)
            for path, state in self.states.items()
        }

    def _complete(self, files: dict[str, Tree]) -> None:
        """Write checkpoint.json and give the folder its final name."""
        meta = {**self.meta, "files": dict(sorted(files.items()))}
        meta["seal"] = seal(meta)
        write_json(self.partial / META, meta)
        # After a crash, a folder with the final name must not lack a file, so flush all folders first.
        for folder in {path.parent for path in self.partial.rglob("*")}:
            sync(folder)
        # If this step was saved before, keep the earlier checkpoint, so that a crash between the two
        # renames loses neither checkpoint.
        if os.path.lexists(self.final):
            set_aside(self.final)
        self.partial.rename(self.final)
        sync(self.final.parent)
        self.tidy()


@dataclass
class _HashedFile:
    """A file for torch.save that hashes the bytes written to it.

    It stores the first write error instead of raising it, because torch.save would hide the cause.
    """

    file: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)
    error: OSError | None = None

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


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
