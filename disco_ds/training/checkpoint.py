"""Checkpoints: DeepSpeed's files plus what DeepSpeed does not keep (data cursor, RNG and loss state of every rank).

A checkpoint is written under a temporary name and completed by one rename (background_save.py), so a folder called
step-NNNNNNNN is whole.
No file is parsed before its SHA-256 has been compared, which takes the place of zip's CRC: torch does not check that in
a mapped file. The folder of a run's checkpoints is retention.py's.
checkpoints/step-00000100/
    checkpoint.json   step, settings, size and SHA-256 of all files; written last
    engine/           DeepSpeed's: pickles of its own classes, so as trusted as code
    rank_00000.pt     ours, one per rank: tensors and plain values only
"""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from disco_ds.config import Config
from disco_ds.config.ds_config import precision, stage
from disco_ds.distributed import comm
from disco_ds.metrics.run_folder import CHECKPOINTS
from disco_ds.training.background_save import HostCopy, Save, checksum
from disco_ds.training.engine import Engine
from disco_ds.training.retention import ENGINE, FORMAT, DamagedError, read_meta

OWN = re.compile(r"rank_\d+\.pt")
MAY_CHANGE = {"workers", "prefetch", "timeout_s", "patience_s", "max_broken", "shards", "manifest", "remote", "options"}
"""Data settings that change neither a sample nor its place; sources are compared by their fingerprints instead."""

MODEL_MAY_CHANGE = {
    "name",
    "factory",
    "options",
    "pretrained",
    "pretrained_image",
    "activation_checkpointing",
    "compile",
}
"""Name and factory are compared by what they stand for; the weights come from the checkpoint."""

TRAVEL = ("overlap_comm", "reduce_bucket_size")
"""ZeRO settings of the way gradients travel, which do not change what each rank holds."""

_REBUILD = numpy.empty(0).__reduce__()[0]
_NUMPY: list[Any] = [numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]
_NUMPY += [(_REBUILD, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
"""Classes that arrays of integers are unpickled from, in the ranks' files of format 4."""


def identity(config: Config, fingerprint: str, architecture: dict[str, Any]) -> dict[str, Any]:
    """The settings that must stay the same when a run is resumed, by the names that a user knows.

    Args: fingerprint: of the shards; architecture: open_clip's config of the model, from whatever file.
    """
    moved = {"sources": {"__all__": {"shards", "manifest", "source", "options"}}}
    data = config.data.model_dump(mode="json", exclude={**dict.fromkeys(MAY_CHANGE, True), **moved})
    return {
        "loss": config.loss.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json", exclude=MODEL_MAY_CHANGE),
        "model.config": architecture,
        "optim": config.optim.model_dump(mode="json"),
        "global_batch": config.global_batch,
        "seed": config.seed,
        "data": data,
        "data.shards": fingerprint,
    }


def shape(config: Config, ranks: int) -> dict[str, Any]:
    """The settings that decide which rank holds what. They may change when a run is resumed, see reshard.py."""
    return {
        "ranks": ranks,
        "stage": stage(config.deepspeed),
        "precision": precision(config.deepspeed),
        "zero_optimization": config.deepspeed.get("zero_optimization", {}),
    }


def same_shape(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare two shapes: True if every rank holds the same part in both, whatever buckets gradients travel in."""

    def holding(of: dict[str, Any]) -> dict[str, Any]:
        zero = {key: value for key, value in of["zero_optimization"].items() if key not in TRAVEL}
        return json.loads(json.dumps(of | {"zero_optimization": zero}))  # which turns tuples into lists

    return holding(one) == holding(other)


def begin_save(
    folder: Path,
    meta: dict[str, Any],
    engine: Engine,
    data_state: dict[str, Any],
    loss_state: dict[str, Any],
    host: HostCopy | None = None,
) -> Save:
    """Begin to write checkpoints/step-N of this run folder. Collective; it is complete after Save.finish.

    Args:    meta: step, num_steps, identity, shape; data_state, loss_state: this rank's part; host: memory to copy the
             state to and write from beside the training; None: all is written before this returns.
    Raises:  AgreedError if any rank could not copy its part, or the folder could not be made.
    """
    final = folder / CHECKPOINTS / f"step-{meta['step']:08d}"
    partial = final.with_name(f".{final.name}.partial")
    with comm.all_or_none(f"preparing {partial}"):
        if comm.rank() == 0:
            # A crash, or a failed save of the same step, may have left a part of it.
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
    # DeepSpeed's writer keeps its first error for raise_error, because the ranks meet in barriers in here.
    # Nothing is written here: the states are kept for Save. DeepSpeed's file `latest` would name a folder that is not
    # whole yet.
    with engine.checkpoint_engine.held() as states:
        engine.save_checkpoint(str(partial), tag=ENGINE, save_latest=False)
    with comm.all_or_none(f"copying the state for {partial}"):
        engine.checkpoint_engine.raise_error()
        ours = {"rng": _rng_state(), "data": data_state, "loss": loss_state}
        states[partial / f"rank_{comm.rank():05d}.pt"] = ours
        if host is not None:
            states = host.take(states)
        save = Save(final, partial, {"format": FORMAT, **meta}, states, background=host is not None)
    save.start()
    return save


def save(
    folder: Path, meta: dict[str, Any], engine: Engine, data_state: dict[str, Any], loss_state: dict[str, Any]
) -> Path:
    """Write a whole checkpoint, and wait for it. Collective. Returns: its folder. Raises: AgreedError."""
    return begin_save(folder, meta, engine, data_state, loss_state).finish()


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk, whose files are verified before they are parsed."""

    path: Path
    meta: dict[str, Any]
    verified: set[str] = field(default_factory=set)
    """Names of files whose checksum has been compared."""
    gathered: list[dict[str, Any]] = field(default_factory=list)
    """Of every rank's file the data state, and the loss's where it is empty; see open_whole."""

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def own_files(self) -> list[str]:
        """Names of our files, of one rank each, in rank order."""
        return sorted(filter(OWN.fullmatch, self.meta["files"]))

    def states(self, kind: str) -> Sequence[dict[str, Any]]:
        """The `rng`, `data` or `loss` states of every rank, each read when it is asked for. Raises: DamagedError."""
        return States(self, kind)

    def verify(self, names: Iterable[str]) -> None:
        """Compare the checksums of these files, of each file once. Raises: DamagedError for one that has changed."""
        for name in names:
            if name in self.verified:
                continue
            try:
                fine = checksum(self.path / name) == self.meta["files"][name]["sha256"]
            except (KeyError, OSError) as error:
                raise DamagedError(f"{self.path} is damaged: {name} cannot be read: {error}") from None
            if not fine:
                raise DamagedError(f"{self.path} is damaged: {name} is not what was written")
            self.verified.add(name)

    def load(self, name: str) -> Any:
        """Verify a file of torch.save, and load it mapped. Raises: DamagedError."""
        self.verify([name])
        own = OWN.fullmatch(name) is not None
        allowed = _NUMPY if own and self.meta["format"] == 4 else []
        try:
            with torch.serialization.safe_globals(allowed):
                # DeepSpeed's files hold its own classes.
                return torch.load(self.path / name, map_location="cpu", weights_only=own, mmap=True)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if own and isinstance(error, pickle.UnpicklingError):  # torch advises to allow them all
                why = "it holds more than tensors and plain values"
            raise DamagedError(f"{self.path / name} cannot be read: {why}") from error


class States(Sequence[dict[str, Any]]):
    """What every rank has written under one key. With hundreds of ranks, none can read the files of all."""

    def __init__(self, saved: Saved, kind: str) -> None:
        self._saved, self._kind, self._names = saved, kind, saved.own_files

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        gathered = self._saved.gathered
        if gathered and self._kind in gathered[number]:
            return gathered[number][self._kind]
        return self._saved.load(self._names[number])[self._kind]


def read(path: Path) -> Saved:
    """A checkpoint for use by one process; each file is verified when it is loaded. Raises: see read_meta."""
    return Saved(path, read_meta(path))


def open_whole(path: Path, check: Callable[[dict[str, Any]], None]) -> Saved:
    """A checkpoint with all its files verified, each by one of the ranks. Collective.

    Args:   check: called with the content of checkpoint.json before the other files are read; it may raise ValueError.
    Raises: DamagedError, or the error of `check` as a ValueError, on every rank alike.
    """
    meta: dict[str, Any] = {}
    with _damage_agreed(path):
        if comm.rank() == 0:
            meta = read_meta(path)
    meta = comm.broadcast(meta)
    # Settings first: checksums of a large checkpoint take minutes, for a run that would be refused.
    with comm.all_or_none(f"checkpoint {path}"):
        check(meta)
    # Each file is read by one rank, and what that rank found counts for all.
    saved, names = Saved(path, meta), sorted(meta["files"])
    with _damage_agreed(path):
        saved.verify(names[comm.rank() :: comm.size()])
    saved.verified.update(names)
    with _damage_agreed(path):
        mine = [saved.load(name) for name in saved.own_files[comm.rank() :: comm.size()]]
    # A rank needs the data states of all, and most losses keep none.
    parts = [{"data": part["data"]} | ({"loss": {}} if part["loss"] == {} else {}) for part in mine]
    shares = comm.gather_objects(parts)
    saved.gathered.extend(shares[i % len(shares)][i // len(shares)] for i in range(len(saved.own_files)))
    return saved


@contextmanager
def _damage_agreed(path: Path) -> Iterator[None]:
    """Raise damage that some ranks find in the block on all ranks. Collective; the block must not communicate."""
    found = ""
    with comm.all_or_none(f"checkpoint {path}"):
        try:
            yield
        except DamagedError as error:
            found = str(error)
    reports = list(filter(None, comm.gather_objects(found)))
    if reports:
        raise DamagedError(reports[0])


def restore(saved: Saved, engine: Engine) -> None:
    """Load a verified checkpoint of the same shape into the engine and this rank's generators. Collective.

    Raises: ValueError on every rank alike, with the engine unchanged, if any rank cannot read its files.
    """
    with comm.all_or_none(f"checkpoint {saved.path}"):
        # DeepSpeed raises on the rank that cannot read a file, while the others wait, so each tries its own first.
        for name in _own_names(engine, saved.path):
            saved.load(name)
    engine.load_checkpoint(str(saved.path), tag=ENGINE)
    _restore_rng(saved.states("rng")[comm.rank()])


def _own_names(engine: Engine, path: Path) -> list[str]:
    names = {engine._get_ckpt_name(str(path), ENGINE)}
    if engine.zero_optimization():
        names.add(engine._get_zero_ckpt_name(str(path), ENGINE))
    return sorted(str(Path(name).relative_to(path)) for name in names)


def _rng_state() -> dict[str, Any]:
    on_device = get_accelerator().device_name() != "cpu"
    state: Any = numpy.random.get_state()
    kind, key, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state() if on_device else None,
        "python": random.getstate(),
        "numpy": (kind, key.tolist(), *rest),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        get_accelerator().set_rng_state(state["device"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
