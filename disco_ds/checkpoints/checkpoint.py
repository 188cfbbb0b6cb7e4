"""The content of a checkpoint: DeepSpeed's files and, for each rank, a file with the state that DeepSpeed omits.

    checkpoints/step-00000100/
        checkpoint.json   step, settings, size and SHA-256 of each file; written last
        engine/           DeepSpeed's files: they contain pickled DeepSpeed classes, so loading them can run code
        rank_00000.pt     one per rank: data position, RNG state and loss state; only tensors and plain values

A checkpoint is written under a temporary name and completed by one rename (save.py), so a
folder called step-NNNNNNNN is complete. No file is parsed before its SHA-256 has been verified. This
check also replaces the CRC of the zip format, which torch does not check when it memory-maps a file.
keep.py manages the folder that contains all checkpoints of a run.
"""

import hashlib
import random
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from disco_ds.checkpoints.keep import DamagedError, check_format, read_meta
from disco_ds.config import Tree
from disco_ds.distributed import comm, jobs

_RETRY_AFTER_S = (1, 5)
"""Pauses before a file that cannot be read is read again."""
RANK_FILE = re.compile(r"rank_\d+\.pt")
"""Names of the rank files. Each contains the state of one rank."""


@dataclass(frozen=True)
class Checkpoint:
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

    def states(self, kind: str) -> list[Tree]:
        """Return one kind of state of every rank. With many ranks, call this on one rank only if possible.

        Args:
            kind: `rng` (random generators), `data` (the loader) or `loss`.

        Raises:
            DamagedError: If a file has changed or cannot be read.
        """
        return [self.load(name)[kind] for name in self.rank_files]

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
            raise DamagedError(
                f"{self.path / name} cannot be read: {type(error).__name__}"
            ) from error

    def load_ending(self, end: str) -> Any:
        """Load the only file whose name ends with `end`. DeepSpeed prefixes some names with the precision."""
        return self.load(next(name for name in self.meta["files"] if name.endswith(end)))


def _read_checksum(path: Path) -> str:
    """Return a file's SHA-256. Repeat failed reads, because the file system may recover."""
    for pause_s in _RETRY_AFTER_S:
        with suppress(OSError):
            return checksum(path)
        time.sleep(pause_s)
    return checksum(path)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path) -> Checkpoint:
    """Open a checkpoint in one process. Each file is verified when it is loaded.

    Raises:
        DamagedError: If the folder is not a disco_ds checkpoint or is incomplete.
        ValueError: If its format version is not the one that this version of disco_ds reads.
    """
    meta = read_meta(path)
    check_format(path, meta)
    return Checkpoint(path, meta)


def verify_on_all_ranks(saved: Checkpoint) -> None:
    """Verify all files of a checkpoint. The files are divided among the ranks. Collective.

    Raises:
        DamagedError: On every rank, if any rank finds a file changed or unreadable.
    """
    names = sorted(saved.meta["files"])
    verify = partial(saved.verify, names[comm.rank() :: comm.size()])
    # Computing the checksum of a large file on a slow disk may take longer than the timeout of collectives.
    jobs.run("verifying the checkpoint", verify, DamagedError)
    saved.verified.update(names)


def _has_accelerator() -> bool:
    return get_accelerator().device_name() != "cpu"


def read_rng() -> Tree:
    """Return the states of this rank's random generators."""
    numpy_state: Any = numpy.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state() if _has_accelerator() else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # type: ignore[union-attr, attr-defined]
    }


def restore_rng(state: Tree) -> None:
    """Restore this rank's random generators from a state that `read_rng` returned."""
    torch.set_rng_state(state["torch"])
    # A run that trained on a GPU may be resumed on a CPU, and the other way round.
    if state["device"] is not None and _has_accelerator():
        get_accelerator().set_rng_state(state["device"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
