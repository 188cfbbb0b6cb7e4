"""The content of a checkpoint: DeepSpeed's files, and the state of every rank that DeepSpeed does not save.

    checkpoints/step-00000100/
        checkpoint.json   step, settings, size and SHA-256 of all files; written last
        engine/           DeepSpeed's files: pickles of its own classes, so they are as trusted as code
        rank_00000.pt     one per rank: data cursor, RNG and loss state; tensors and plain values only

A checkpoint is written under a temporary name and completed by one rename (background_save.py), so a
folder called step-NNNNNNNN is complete. No file is parsed before its SHA-256 has been compared. This
also replaces the CRC of the zip format, which torch does not check in a mapped file. retention.py
manages the folder that has all checkpoints of a run.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.accelerator import get_accelerator

from disco_ds.checkpoints.background_save import HostCopy, Save, checksum
from disco_ds.checkpoints.retention import ENGINE, FORMAT, DamagedError, read_meta
from disco_ds.checkpoints.writer import copy_offloaded
from disco_ds.config import Config
from disco_ds.config.ds_config import precision, stage
from disco_ds.distributed import comm, jobs
from disco_ds.distributed.deepspeed_quirks import collect_checkpoint
from disco_ds.runs.run_folder import CHECKPOINTS

RANK_FILE = re.compile(r"rank_\d+\.pt")
"""Names of the files with the state of one rank."""

DATA_MAY_CHANGE = {
    "workers",
    "prefetch",
    "worker_timeout_s",
    "retry_s",
    "max_broken",
    "shards",
    "manifest",
    "remote",
    "options",
}
"""Data settings that affect neither a sample nor its position. Sources are compared by their fingerprints instead."""

SOURCE_MAY_CHANGE = {"shards", "manifest", "source", "options"}
"""The same for one entry of data.sources."""

MODEL_MAY_CHANGE = {
    "name",
    "factory",
    "options",
    "pretrained",
    "pretrained_image",
    "activation_checkpointing",
    "compile",
}
"""Name and factory are compared by the architecture that they stand for; the weights come from the checkpoint."""

COMMUNICATION_SETTINGS = ("overlap_comm", "reduce_bucket_size")
"""ZeRO settings for the communication of gradients, which do not change what each rank holds."""


def identity(config: Config, fingerprint: str, architecture: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must stay the same when a run is resumed, by the names that a user knows.

    Args:
        config: Settings of the run.
        fingerprint: Fingerprint of the shards.
        architecture: open_clip's config of the model.
    """
    excluded = dict.fromkeys(DATA_MAY_CHANGE, True) | {"sources": {"__all__": SOURCE_MAY_CHANGE}}
    return {
        "loss": config.loss.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json", exclude=MODEL_MAY_CHANGE),
        "model.config": architecture,
        "optim": config.optim.model_dump(mode="json"),
        "global_batch": config.global_batch,
        "seed": config.seed,
        "data": config.data.model_dump(mode="json", exclude=excluded),
        "data.shards": fingerprint,
    }


def shape(config: Config, ranks: int) -> dict[str, Any]:
    """Return the settings that decide which rank holds what, as JSON stores them.

    They may change when a run is resumed, see reshard.py.
    """
    zero = config.deepspeed.get("zero_optimization", {})
    found = {
        "ranks": ranks,
        "stage": stage(config.deepspeed),
        "precision": precision(config.deepspeed),
        "zero_optimization": {
            key: value for key, value in zero.items() if key not in COMMUNICATION_SETTINGS
        },
    }
    return json.loads(json.dumps(found))


class RunState(NamedTuple):
    """This rank's part of what a checkpoint contains in addition to the engine's files."""

    meta: dict[str, Any]
    """Content of checkpoint.json: step, num_steps, identity, shape, anomalies."""
    data: dict[str, Any]
    """State of the loader."""
    loss: dict[str, Any]
    """State of the loss."""


def prepare(folder: Path, step: int, engine: Engine) -> tuple[Path, list[Path]]:
    """Make the folder that a checkpoint is written into, with the files that are only copied. Collective.

    Args:
        folder: The run folder.
        step: The step of the checkpoint.
        engine: The engine to save.

    Returns:
        The folder, and this rank's files in it.

    Raises:
        AgreedError: If any rank could not write to the disk.
    """
    partial = folder / CHECKPOINTS / f".step-{step:08d}.partial"
    what = f"preparing {partial}"

    def make_folder() -> None:
        if comm.rank() == 0:
            # A crash, or a failed save of the same step, may have left a part of it.
            if partial.exists():
                shutil.rmtree(partial)
            (partial / ENGINE).mkdir(parents=True)

    jobs.run(what, make_folder)
    return partial, jobs.run(what, lambda: copy_offloaded(engine, partial / ENGINE))


def start_save(
    prepared: tuple[Path, list[Path]],
    engine: Engine,
    state: RunState,
    host: HostCopy | None = None,
) -> Save:
    """Start to write a checkpoint. Collective; the checkpoint is complete after Save.finish.

    Args:
        prepared: What `prepare` returned.
        engine: The engine to save.
        state: The rest of what is saved.
        host: Memory to copy the state to and to write from; None: the state must not change until
            Save.finish.

    Raises:
        AgreedError: If any rank could not copy its part.
    """
    partial, present = prepared
    files = collect_checkpoint(engine, partial, ENGINE)
    with comm.all_or_none(f"copying the state for {partial}"):
        rank_file = partial / f"rank_{comm.rank():05d}.pt"
        files[rank_file] = {"rng": _rng_state(), "data": state.data, "loss": state.loss}
        if host is not None:
            files = host.take(files)
    final = partial.with_name(f"step-{state.meta['step']:08d}")
    save = Save(final, partial, {"format": FORMAT, **state.meta}, files, present)
    save.start()
    return save


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk, whose files are verified before they are parsed."""

    path: Path
    meta: dict[str, Any]
    """The content of checkpoint.json."""
    verified: set[str] = field(default_factory=set)
    """Names of files whose checksum has been compared."""
    gathered: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The data state in each rank's file, by file name, and the loss state if it is empty; see open_verified."""

    @property
    def step(self) -> int:
        """The step that it was saved after."""
        return self.meta["step"]

    @property
    def rank_files(self) -> list[str]:
        """Names of the files with the state of one rank each, in rank order."""
        return sorted(filter(RANK_FILE.fullmatch, self.meta["files"]))

    def states(self, kind: str) -> Sequence[dict[str, Any]]:
        """Return the states of every rank; each is read, and may raise DamagedError, when it is indexed.

        Args:
            kind: rng, data or loss.
        """
        return RankStates(self, kind)

    def verify(self, names: Iterable[str]) -> None:
        """Compare the checksums of these files, once per file.

        Raises:
            DamagedError: If a file has changed or cannot be read.
        """
        for name in names:
            if name in self.verified:
                continue
            try:
                matches = checksum(self.path / name) == self.meta["files"][name]["sha256"]
            except (KeyError, OSError) as error:
                raise DamagedError(
                    f"{self.path} is damaged: {name} cannot be read: {error}"
                ) from None
            if not matches:
                raise DamagedError(f"{self.path} is damaged: {name} is not what was written")
            self.verified.add(name)

    def load(self, name: str) -> Any:
        """Verify a file of torch.save, and load it as mapped memory.

        Raises:
            DamagedError: If it has changed or cannot be read.
        """
        self.verify([name])
        # DeepSpeed's files contain DeepSpeed's classes.
        plain = RANK_FILE.fullmatch(name) is not None
        try:
            return torch.load(self.path / name, map_location="cpu", weights_only=plain, mmap=True)
        except Exception as error:
            # Only the type of the error, because torch's message advises to load classes, and thus code.
            why = type(error).__name__
            raise DamagedError(f"{self.path / name} cannot be read: {why}") from error


@dataclass(frozen=True)
class RankStates(Sequence[dict[str, Any]]):
    """The states that every rank wrote under one key. A rank's file is read only when it is indexed.

    With hundreds of ranks, it would take too long if every rank read all files.
    """

    saved: Saved
    kind: str

    def __len__(self) -> int:
        return len(self.saved.rank_files)

    def __getitem__(self, number: Any) -> Any:
        name = self.saved.rank_files[number]
        known = self.saved.gathered.get(name, {})
        if self.kind not in known:
            known = self.saved.load(name)
        return known[self.kind]


def read(path: Path) -> Saved:
    """Open a checkpoint in one process. Each file is verified when it is loaded.

    Raises:
        DamagedError: If the folder is not a disco_ds checkpoint, or an incomplete one.
        ValueError: If it has another format.
    """
    return Saved(path, read_meta(path))


def open_verified(path: Path, check: Callable[[dict[str, Any]], None]) -> Saved:
    """Open a checkpoint and verify all of its files, each by one of the ranks. Collective.

    Args:
        path: The checkpoint folder.
        check: Called with the content of checkpoint.json before the other files are read; it may
            raise ValueError.

    Raises:
        DamagedError: On every rank.
        ValueError: On every rank, with the error of `check`.
    """
    meta: dict[str, Any] = {}
    with _damage_agreed(path):
        if comm.rank() == 0:
            meta = read_meta(path)
    meta = comm.broadcast(meta)
    # Settings first: checksums of a large checkpoint take minutes, and the run may be refused.
    with comm.all_or_none(f"checkpoint {path}"):
        check(meta)
    saved = Saved(path, meta)
    names = sorted(meta["files"])
    # Every rank needs the data states of all ranks, and most losses have no state.
    mine: dict[str, dict[str, Any]] = {}
    with _damage_agreed(path):
        for name in names[comm.rank() :: comm.size()]:
            saved.verify([name])
            if RANK_FILE.fullmatch(name):
                state = saved.load(name)
                mine[name] = {"data": state["data"]}
                if state["loss"] == {}:
                    mine[name]["loss"] = {}
    saved.verified.update(names)
    for part in comm.gather_objects(mine):
        saved.gathered.update(part)
    return saved


@contextmanager
def _damage_agreed(path: Path) -> Iterator[None]:
    """Re-raise on all ranks the DamagedError that some ranks raise. Collective; the block must not communicate."""
    found = ""
    with comm.all_or_none(f"checkpoint {path}"):
        try:
            yield
        except DamagedError as error:
            found = str(error)
    reports = list(filter(None, comm.gather_objects(found)))
    if reports:
        raise DamagedError(reports[0])


def load_engine(saved: Saved, engine: Engine) -> None:
    """Load a verified checkpoint of the same shape into the engine and this rank's generators. Collective.

    Raises:
        AgreedError: On every rank, with the engine unchanged, if any rank cannot read its files.
    """
    with comm.all_or_none(f"checkpoint {saved.path}"):
        # DeepSpeed raises only on the rank that cannot read a file, while the others wait, so each
        # rank tries its files first.
        for name in _engine_files(engine, saved.path):
            saved.load(name)
    engine.load_checkpoint(str(saved.path), tag=ENGINE)
    _restore_rng(saved.states("rng")[comm.rank()])


def _engine_files(engine: Engine, path: Path) -> list[str]:
    """Return the names of the files that DeepSpeed reads on this rank."""
    names = {engine._get_ckpt_name(str(path), ENGINE)}
    if engine.zero_optimization():
        names.add(engine._get_zero_ckpt_name(str(path), ENGINE))
    return sorted(str(Path(name).relative_to(path)) for name in names)


def _rng_state() -> dict[str, Any]:
    on_device = get_accelerator().device_name() != "cpu"
    numpy_state: Any = numpy.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state() if on_device else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # type: ignore[union-attr, attr-defined]
    }


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        get_accelerator().set_rng_state(state["device"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
