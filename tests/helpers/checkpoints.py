"""Checkpoint folders written by hand, and ways to damage them."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from disco_ds.checkpoints.checkpoint import read_rng
from disco_ds.checkpoints.keep import FORMAT, find_latest, seal
from disco_ds.checkpoints.resume import identity_of, shape_of
from disco_ds.checkpoints.save import Save, Saver
from disco_ds.config import CheckpointSettings
from disco_ds.distributed import jobs
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.runs.run_folder import CHECKPOINTS, META
from helpers.towers import TINY, tiny_config


def identify(fingerprint: str = "abc", **changes: Any) -> dict[str, Any]:
    return identity_of(
        tiny_config("tiny", {"zero_optimization": {"stage": 1}}, **changes), fingerprint, TINY
    )


SHAPE = shape_of(tiny_config("tiny", {"zero_optimization": {"stage": 1}}), 2)


def write_checkpoint(run: Path, step: int, ranks: int = 2) -> Path:
    """Write a complete checkpoint folder without an engine."""
    path = run / CHECKPOINTS / f"step-{step:08d}"
    (path / "engine").mkdir(parents=True)
    (path / "engine" / "weights.pt").write_bytes(b"0123456789")
    for rank in range(ranks):
        state = {"rng": read_rng(), "data": {"rank": rank}, "loss": torch.arange(rank)}
        torch.save(state, path / f"rank_{rank:05d}.pt")
    describe(
        path,
        {
            "format": FORMAT,
            "step": step,
            "samples": 16 * step,
            "num_steps": 10,
            "identity": identify(),
            "shape": SHAPE,
        },
    )
    return path


def save_now(
    folder: Path,
    meta: dict[str, Any],
    engine: Any,
    data_state: dict[str, Any],
    loss_state: dict[str, Any],
) -> Path:
    """Write a checkpoint, wait until it is complete, and return its folder. Collective."""
    saver = Saver(
        folder,
        CheckpointSettings(asynchronous=False),
        engine,
        lambda step: (meta, {"data": data_state, "loss": loss_state}),
        Heartbeat(60.0, 60.0),
        lambda seconds: None,
    )
    saver.save(meta["step"], last=True)
    return find_latest(folder)


def finish(save: Save) -> Path:
    """Write a checkpoint and return its folder. Collective."""
    for job in save.run():
        jobs.wait_for_all(job, f"saving {save.final}")
    return save.final


def describe(path: Path, meta: dict[str, Any]) -> None:
    """Write checkpoint.json with the sizes and checksums of the files that are now in the folder."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != META]
    sums = {str(file.relative_to(path)): sha256(file.read_bytes()).hexdigest() for file in files}
    meta["files"] = {
        name: {"bytes": (path / name).stat().st_size, "sha256": value}
        for name, value in sums.items()
    }
    (path / META).write_text(json.dumps(meta | {"seal": seal(meta)}, indent=1))


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


class Bomb:
    """An object whose pickle contains code: unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def plant(path: Path, name: str, mark: Path) -> None:
    """Replace a file of a checkpoint by a pickle that creates `mark`. Correct only the size in checkpoint.json."""
    torch.save({"module": Bomb(mark)}, path / name)
    meta = json.loads((path / META).read_text())
    meta["files"][name]["bytes"] = (path / name).stat().st_size
    (path / META).write_text(json.dumps(meta | {"seal": seal(meta)}))
