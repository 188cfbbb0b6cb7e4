"""Checkpoints: DeepSpeed's files plus what DeepSpeed does not keep (data cursor, RNG and loss state of every rank).

A checkpoint is written under a temporary name and completed by one rename, so a folder called step-NNNNNNNN is whole.
checkpoints/step-00000100/
    checkpoint.json   step, settings, size and SHA-256 of all files; written last
    engine/           DeepSpeed's
    rank_00000.pt     ours, one per rank
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from disco_ds import comm
from disco_ds.config import Config
from disco_ds.disk import write_tensors
from disco_ds.ds_config import precision, stage
from disco_ds.engine import Engine
from disco_ds.run_folder import CHECKPOINTS

FORMAT = 4
META = "checkpoint.json"
MAY_CHANGE = {"workers", "prefetch", "timeout_s", "max_broken", "shards", "manifest", "remote"}
"""Data settings that change neither a sample nor its place; the shards are compared by their manifest instead."""

MODEL_MAY_CHANGE = {"name", "pretrained", "activation_checkpointing", "compile"}
"""The name is compared by what it stands for; the weights come from the checkpoint."""

FORMER_DEFAULTS = {"loss.name": "disco"}
"""Of settings whose default has changed: the one that an older run may have by saying nothing."""


def identity(config: Config, fingerprint: str, architecture: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same over a resume, by the names a user knows.

    Args: fingerprint: of the shards; architecture: open_clip's config of the model, whatever file it came from.
    """
    moved = {"sources": {"__all__": {"shards", "manifest"}}}
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
    """What says who holds what. It may change over a resume, by way of reshape.py."""
    return {
        "ranks": ranks,
        "stage": stage(config.deepspeed),
        "precision": precision(config.deepspeed),
        "zero_optimization": config.deepspeed.get("zero_optimization", {}),
    }


def save(
    folder: Path, meta: dict[str, Any], engine: Engine, data_state: dict[str, Any], loss_state: dict[str, Any]
) -> Path:
    """Write checkpoints/step-N of this run folder. Collective.

    Args:    meta: step, num_steps, identity, shape; data_state, loss_state: this rank's part.
    Returns: the finished folder.
    Raises:  AgreedError if any rank could not write its part. Nothing then bears the finished name.
    """
    final = folder / CHECKPOINTS / f"step-{meta['step']:08d}"
    partial = final.with_name(f".{final.name}.partial")
    with comm.together(f"preparing {partial}"):
        if comm.rank() == 0:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
    engine.save_checkpoint(str(partial), tag="engine", save_latest=False)
    with comm.together(f"writing {partial}"):
        engine.checkpoint_engine.raise_error()
        ours = {"rng": _rng_state(), "data": data_state, "loss": loss_state}
        write_tensors(ours, partial / f"rank_{comm.rank():05d}.pt")
    names = _list_files(partial)
    sums: dict[str, str] = {}
    with comm.together(f"checking {partial}"):
        for name in names[comm.rank() :: comm.size()]:
            _sync(partial / name)
            sums[name] = _checksum(partial / name)
    checked = {name: value for part in comm.gather_objects(sums) for name, value in part.items()}
    with comm.together(f"completing {final}"):
        if comm.rank() == 0:
            _complete(partial, final, {"format": FORMAT, **meta}, checked)
    return final


@dataclass(frozen=True)
class Saved:
    """A checkpoint's own files, read and found whole."""

    path: Path
    meta: dict[str, Any]
    ranks: list[dict[str, Any]]
    """rng, data and loss state of every rank."""

    @property
    def step(self) -> int:
        return self.meta["step"]


def read(path: Path) -> Saved:
    """Everything but DeepSpeed's files.

    Raises: ValueError for a folder that is not a whole checkpoint of ours.
    """
    meta = read_meta(path)
    names = sorted(name for name in meta["files"] if re.fullmatch(r"rank_\d+\.pt", name))
    return Saved(path, meta, [read_file(path / name) for name in names])


def verify(saved: Saved) -> None:
    """Read all files once, shared out between the ranks. Collective.

    Raises: ValueError on every rank alike for one that is not what was written.
    """
    with comm.together(f"checkpoint {saved.path}"):
        for name in sorted(saved.meta["files"])[comm.rank() :: comm.size()]:
            if _checksum(saved.path / name) != saved.meta["files"][name]["sha256"]:
                raise ValueError(f"{name} is damaged: it is not what was written; resume from an older checkpoint")


def restore(saved: Saved, engine: Engine) -> None:
    """Put a checkpoint of the same shape into the engine and this rank's RNG. Collective.

    Raises: ValueError on every rank alike, with the engine untouched, if any rank cannot read its files.
    """
    verify(saved)
    with comm.together(f"checkpoint {saved.path}"):
        # Unreadable on one rank only, a file would let the others train on, so each looks at its own first.
        for path in _own_files(engine, saved.path):
            read_file(path)
    engine.load_checkpoint(str(saved.path), tag="engine")
    _restore_rng(saved.ranks[comm.rank()]["rng"])


def find_latest(folder: Path) -> Path:
    """The last complete checkpoint of a run folder.

    Raises: ValueError if there is none.
    """
    complete = [path for path in _list(folder) if (path / META).is_file()]
    if not complete:
        raise ValueError(f"{folder} has no complete checkpoint; start the run anew without --resume")
    return complete[-1]


def read_meta(path: Path) -> dict[str, Any]:
    """checkpoint.json, after a look at the files it lists.

    Raises: ValueError for a folder that is not ours, or not whole.
    """
    if not (path / META).is_file():
        raise ValueError(f"{path} is not a complete disco_ds checkpoint: it has no {META}")
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        version, *_ = meta["format"], meta["step"], meta["num_steps"], meta["identity"], meta["shape"]["stage"]
        sizes = {name: (entry["bytes"], entry["sha256"])[0] for name, entry in meta["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / META} is not a disco_ds checkpoint description: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this version of disco_ds reads {FORMAT}")
    for name, size in sizes.items():
        if not (path / name).is_file():
            raise ValueError(f"{path} is incomplete: {name} is missing")
        if (path / name).stat().st_size != size:
            raise ValueError(f"{path} is damaged: {name} has {(path / name).stat().st_size} bytes, expected {size}")
    return meta


def refuse_changes(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises: ValueError naming each setting that differs from the checkpoint's and must not."""
    changed = [line for key in now for line in _differences(key, saved.get(key), now[key])]
    if changed:
        raise ValueError("the checkpoint was made with other settings:\n  " + "\n  ".join(changed))


def remove_old(folder: Path, keep_last: int, keep_every_steps: int = 0, busy: Collection[Path] = ()) -> int:
    """Remove all but the last complete checkpoints, those of every so many steps (0: none) and those in `busy`, and
    what a crash has left unfinished. Returns: how many complete ones are gone. Rank 0 only."""
    old = [path for path in _list(folder)[:-keep_last] if path not in busy]
    if keep_every_steps:
        old = [path for path in old if int(path.name.removeprefix("step-")) % keep_every_steps]
    for path in [*old, *(folder / CHECKPOINTS).glob(".step-*.partial")]:
        shutil.rmtree(path)
    return len(old)


def _list(folder: Path) -> list[Path]:
    """Checkpoints by step; a copy that a user has named step-00000100-best is not ours to use or remove."""
    return sorted(path for path in (folder / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def _list_files(partial: Path) -> list[str]:
    """Relative names, as rank 0 sees them. Collective."""
    names: list[str] = []
    with comm.together(f"listing {partial}"):
        if comm.rank() == 0:
            names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    return comm.broadcast(names)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def _complete(partial: Path, final: Path, meta: dict[str, Any], sums: dict[str, str]) -> None:
    meta["files"] = {name: {"bytes": (partial / name).stat().st_size, "sha256": sums[name]} for name in sorted(sums)}
    (partial / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    _sync(partial / META)
    if final.exists():  # an older visit of this step, by a run that was resumed from before it
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Make sure it is on the disk before a rename says so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _own_files(engine: Engine, path: Path) -> list[Path]:
    names = {engine._get_ckpt_name(str(path), "engine")}
    if engine.zero_optimization():
        names.add(engine._get_zero_ckpt_name(str(path), "engine"))
    return [Path(name) for name in sorted(names)]


def read_file(path: Path) -> Any:
    """What torch.save has written, mapped. Raises: ValueError if it cannot be read."""
    try:
        # weights_only=False: DeepSpeed's files hold its own classes. A checkpoint is as trusted as the code.
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _rng_state() -> dict[str, Any]:
    on_device = get_accelerator().device_name() != "cpu"
    return {
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state() if on_device else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        get_accelerator().set_rng_state(state["device"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])


def _differences(key: str, saved: Any, now: Any) -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(set(saved) | set(now))
        return [line for part in keys for line in _differences(f"{key}.{part}", saved.get(part), now.get(part))]
    # JSON turns tuples into lists; compare as JSON would.
    if json.loads(json.dumps(saved)) == json.loads(json.dumps(now)):
        return []
    hint = ""
    if key in FORMER_DEFAULTS and saved == FORMER_DEFAULTS[key]:
        hint = f"; the default used to be {saved}: set {key}={saved} to go on, or start a new run without --resume"
    return [f"{key}: {saved!r} in the checkpoint, {now!r} now{hint}"]
