"""Runs of a tiny model on the bundled data: their recipe, and the errors with which they are refused or stop."""

import io
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from disco_ds.config import Config
from disco_ds.distributed import comm
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.towers import BPE_SIZE, write_tiny


def recipe(folder: Path, **changes: Any) -> Path:
    """Write the recipe of a run of four steps of the tiny model, with `changes`, and return its path."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "runs": str(folder / "runs"),
        "global_batch": 16,
        "micro_batch": 4,
        "steps": 4,
        "model": {"name": write_tiny(folder, BPE_SIZE)},
        "data": {
            "shards": "bundled:emoji/unseen",
            "image_key": "png",
            "workers": 0,
            "slots": 4,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 0},
        "checkpoint": {"every_steps": 2},
        "log": {"every_steps": 1},
        "deepspeed": {"base": "zero1", "torch_autocast": {"enabled": False}},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree | changes))
    return path


def write_shard(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, members in enumerate(samples):
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{number:05d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def image_sample(number: int) -> dict[str, bytes]:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), (number * 7 % 256, 90, 10)).save(buffer, "PNG")
    return {"png": buffer.getvalue(), "txt": f"picture {number}".encode()}


def refused(config: Config, resume: str | None = None) -> str:
    """Return the error message of build, which must come within seconds and be equal on all ranks."""
    start = time.monotonic()
    with ExitStack() as stack, pytest.raises(ValueError) as caught:
        build(config, resume, stack)
    assert time.monotonic() - start < 100
    said = comm.gather_objects(str(caught.value))
    assert len(set(said)) == 1, said
    return said[0]


def stopped(config: Config) -> str:
    """Train until the run stops with an AgreedError. Return the message, which must be equal on all ranks."""
    with ExitStack() as stack, pytest.raises(comm.AgreedError) as caught:
        train(build(config, None, stack))
    said = comm.gather_objects(str(caught.value))
    assert len(set(said)) == 1, said
    return said[0]


def expect(said: str, *parts: str) -> None:
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"
