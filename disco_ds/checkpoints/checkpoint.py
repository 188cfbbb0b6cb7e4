"""The content of a checkpoint: DeepSpeed's files and, for each rank, a file with the state that DeepSpeed omits.

    checkpoints/step-00000100/
        checkpoint.json   step, settings, size and SHA-256 of each file; written last
        engine/           DeepSpeed's files: they contain pickled DeepSpeed classes, so loading them can run code
        rank_00000.pt     one per rank: data position, RNG state and loss state; only tensors and plain values

A checkpoint is written under a temporary name and completed by one rename (background_save.py), so a
folder called step-NNNNNNNN is complete. No file is parsed before its SHA-256 has been verified. This
check also replaces the CRC of the zip format, which torch does not check when it memory-maps a file.
retention.py manages the folder that contains all checkpoints of a run.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from deepspeed import DeepSpeedEngine as Engine
from deepspeed.accelerator import get_accelerator

from disco_ds.checkpoints.background_save import HostCopy, Save, checksum
from disco_ds.checkpoints.retention import (
    ENGINE,
    FORMAT,
    DamagedError,
    check_format,
    read_meta,
)
from disco_ds.config import Config, Tree
from disco_ds.distributed import comm, jobs
from disco_ds.distributed.deepspeed_quirks import collect_checkpoint
from disco_ds.runs.run_folder import CHECKPOINTS

_RETRY_AFTER_S = (1, 5)
"""Pauses before a file that cannot be read is read again."""
RANK_FILE = re.compile(r"rank_\d+\.pt")
"""Names of the rank files. Each contains the state of one rank."""

DATA_MAY_CHANGE = {
    "workers",
    "prefetch",
    "max_broken",
    "shards",
    "manifest",
    "remote",
    "options",
}
"""Data settings that are not compared when a run is resumed, because they do not affect the samples or their order.

The shards are compared by their fingerprint, not by the settings that locate them.
"""

SOURCE_MAY_CHANGE = {"shards", "manifest", "source", "options"}
"""Settings of a data.sources entry that are not compared when a run is resumed.

They do not affect the samples or their order. The shards are compared by their fingerprint.
"""

MODEL_MAY_CHANGE = {
    "name",
    "factory",
    "options",
    "pretrained",
    "pretrained_image",
    "activation_checkpointing",
    "compile",
    "towers",
}
"""Model settings that are not compared when a run is resumed.

The architecture is compared instead of name, factory and options. The settings for initial weights do not
matter, because a resumed run takes its weights from the checkpoint.
"""

COMMUNICATION_SETTINGS = ("overlap_comm", "reduce_bucket_size")
"""ZeRO settings for gradient communication, which may change without resharding.

They do not affect which part of the state each rank holds.
"""


def identity(config: Config, fingerprint: str, architecture: Tree) -> Tree:
    """Return the settings that must stay the same when a run is resumed, keyed by their names in a recipe.

    Args:
        config: Settings of the run.
        fingerprint: Fingerprint of the shards.
        architecture: The model's config in open_clip's format.
    """
    excluded = dict.fromkeys(DATA_MAY_CHANGE, True) | {"sources": {"__all__": SOURCE_MAY_CHANGE}}
    return {
        "loss": config.loss.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json", exclude=MODEL_MAY_CHANGE),
        "model.config": architecture,
        "optim": config.optim.model_dump(mode="json", exclude={"elementwise"}),
        "global_batch": config.global_batch,
        "seed": config.seed,
        "data": config.data.model_dump(mode="json", exclude=excluded),
        "data.shards": fingerprint,
    }


def shape(config: Config, ranks: int) -> Tree:
    """Return, as JSON values, the settings that decide which part of the state each rank holds.

    If they have changed when a run is resumed, reshard.py loads the checkpoint.
    """
    zero = config.deepspeed.get("zero_optimization", {})
    return {
        "ranks": ranks,
        "stage": config.zero_stage,
        "precision": config.precision,
        "zero_optimization": {
            key: value for key, value in zero.items() if key not in COMMUNICATION_SETTINGS
        },
    }


class RunState(NamedTuple):
    """The state that a checkpoint contains in addition to DeepSpeed's engine files and the random generators."""

    meta: Tree
    """Entries of checkpoint.json: step, samples, num_steps, warmup_batch, identity, shape, anomalies."""
    data: Tree
    """State of this rank's data loader."""
    loss: Tree
    """This rank's state of the loss."""


def start_save(folder: Path, engine: Engine, state: RunState, host: HostCopy | None = None) -> Save:
    """Start writing a checkpoint. It is complete when Save.advance returns True. Collective.

    Args:
        folder: The run folder.
        engine: The engine to save.
        state: The state to save in addition to the engine's.
        host: Host memory that receives a copy of the state, from which the files are written. If it is
            None, the files are written from the state itself, which must not change until they are written.

    Raises:
        AgreedError: If any rank could not copy its state.
    """
    final = folder / CHECKPOINTS / f"step-{state.meta['step']:08d}"
    partial = final.with_name(f".{final.name}.partial")
    files = collect_checkpoint(engine, partial, ENGINE)
    with comm.all_or_none(f"copying the state for {partial}"):
        rank_file = partial / f"rank_{comm.rank():05d}.pt"
        files[rank_file] = {"rng": _rng_state(), "data": state.data, "loss": state.loss}
        if host is not None:
            files = host.take(files)
    save = Save(final, partial, {"format": FORMAT, **state.meta}, files)
    save.start()
    return save


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk, whose files are verified before they are parsed."""

    path: Path
    meta: Tree
    """The content of checkpoint.json."""
    verified: set[str] = field(default_factory=set)
    """Names of the files that have passed the checksum test."""

    @property
    def step(self) -> int:
        """The training step after which the checkpoint was saved."""
        return self.meta["step"]

    @property
    def rank_files(self) -> list[str]:
        """Names of the rank files, in rank order."""
        return sorted(filter(RANK_FILE.fullmatch, self.meta["files"]))

    def states(self, kind: str) -> Sequence[Tree]:
        """Return a sequence with the state of each rank.

        A state is read when the sequence is indexed, which may raise DamagedError.

        Args:
            kind: "rng" for the random generators, "data" for the loader, or "loss" for the loss.
        """
        return RankStates(self, kind)

    def verify(self, names: Iterable[str]) -> None:
        """Check these files against their recorded checksums. Files that have been checked before are skipped.

        Raises:
            DamagedError: If a file has changed or cannot be read.
        """
        for name in names:
            if name in self.verified:
                continue
            try:
                matches = _read_checksum(self.path / name) == self.meta["files"][name]["sha256"]
            except (KeyError, OSError) as error:
                raise DamagedError(
                    f"{self.path} is damaged: {name} cannot be read: {error}"
                ) from None
            if not matches:
                raise DamagedError(f"{self.path} is damaged: {name} is not what was written")
            self.verified.add(name)

    def load(self, name: str) -> Any:
        """Verify a file that torch.save has written, and load it as memory-mapped tensors.

        Raises:
            DamagedError: If the file has changed or cannot be read.
        """
        self.verify([name])
        # DeepSpeed's files also contain DeepSpeed's classes, which weights_only would refuse.
        plain = RANK_FILE.fullmatch(name) is not None
        try:
            return torch.load(self.path / name, map_location="cpu", weights_only=plain, mmap=True)
        except Exception as error:
            # Show only the error's type: torch's message recommends weights_only=False, which can run code.
            why = type(error).__name__
            raise DamagedError(f"{self.path / name} cannot be read: {why}") from error


def _read_checksum(path: Path) -> str:
    """Return a file's SHA-256. Repeat failed reads, because the file system may recover."""
    for pause_s in _RETRY_AFTER_S:
        with suppress(OSError):
            return checksum(path)
        time.sleep(pause_s)
    return checksum(path)


@dataclass(frozen=True)
class RankStates(Sequence[Tree]):
    """The ranks' saved states of one kind: "rng", "data" or "loss". Indexing the sequence reads the file of one rank.

    With hundreds of ranks, it would take too long for every rank to read the files of all ranks.
    """

    saved: Saved
    kind: str

    def __len__(self) -> int:
        return len(self.saved.rank_files)

    def __getitem__(self, number: Any) -> Any:
        return self.saved.load(self.saved.rank_files[number])[self.kind]


def read(path: Path) -> Saved:
    """Open a checkpoint in one process. Each file is verified when it is loaded.

    Raises:
        DamagedError: If the folder is not a disco_ds checkpoint or is incomplete.
        ValueError: If its format version is not the one that this version of disco_ds reads.
    """
    meta = read_meta(path)
    check_format(path, meta)
    return Saved(path, meta)


def open_verified(path: Path, check: Callable[[Tree], None]) -> Saved:
    """Open a checkpoint and verify all of its files. The files are divided among the ranks. Collective.

    Args:
        path: The checkpoint folder.
        check: Called with the content of checkpoint.json before the other files are read. It raises
            ValueError to refuse the checkpoint.

    Raises:
        DamagedError: On every rank, if any rank finds a file missing, changed or unreadable.
        ValueError: On every rank, if `check` raises it or the format version does not match.
    """
    what = "verifying the checkpoint"
    meta: Tree = {}
    with comm.all_or_none(what, DamagedError):
        if comm.rank() == 0:
            meta = read_meta(path)
    meta = comm.broadcast(meta)
    # Check the settings first: verifying a large checkpoint takes minutes, which a refusal would waste.
    with comm.all_or_none(f"checkpoint {path}"):
        check_format(path, meta)
        check(meta)
    saved = Saved(path, meta)
    names = sorted(meta["files"])
    mine = names[comm.rank() :: comm.size()]
    # Computing the checksum of a large file on a slow disk may take longer than the timeout of collectives.
    jobs.run(what, lambda: saved.verify(mine), DamagedError)
    saved.verified.update(names)
    return saved


def load_engine(saved: Saved, engine: Engine) -> None:
    """Load a verified checkpoint into the engine and this rank's random generators. Collective.

    The run that wrote the checkpoint must have had the same `shape`: number of ranks, ZeRO settings and precision.

    Raises:
        AgreedError: On every rank, if any rank cannot read its files. The engine is then unchanged.
    """
    with comm.all_or_none(f"checkpoint {saved.path}"):
        # If a rank cannot read a file, DeepSpeed raises an error only on that rank, and the others wait
        # forever. So each rank first tries to read its files.
        names = [engine._get_ckpt_name(str(saved.path), ENGINE)]
        if engine.zero_optimization():
            names.append(engine._get_zero_ckpt_name(str(saved.path), ENGINE))
        for name in names:
            saved.load(str(Path(name).relative_to(saved.path)))
    engine.load_checkpoint(str(saved.path), tag=ENGINE)
    _restore_rng(saved.states("rng")[comm.rank()])


def _has_accelerator() -> bool:
    return get_accelerator().device_name() != "cpu"


def _rng_state() -> Tree:
    numpy_state: Any = numpy.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state() if _has_accelerator() else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # type: ignore[union-attr, attr-defined]
    }


def _restore_rng(state: Tree) -> None:
    torch.set_rng_state(state["torch"])
    # A run that trained on a GPU may be resumed on a CPU, and the other way round.
    if state["device"] is not None and _has_accelerator():
        get_accelerator().set_rng_state(state["device"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
