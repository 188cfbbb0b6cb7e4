"""Small tar shards for tests. The color of an image and its caption encode the sample's id."""

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from disco_ds.config import DataSettings
from disco_ds.data import (
    ImageSpec,
    InputSpec,
    Loader,
    Manifest,
    MicroBatch,
    Share,
    Source,
    Staging,
    StepData,
    index_shards,
    load_sources,
    merge_states,
    write_manifest,
)

SIZES = [17, 30, 9, 25, 30, 13, 20, 22]
NUM_SAMPLES = sum(SIZES)
CONTEXT = 8
VOCAB = 260
SPEC = ImageSpec((8, 8))

Change = Callable[[int, dict[str, bytes]], dict[str, bytes]]


def tokenize(texts: list[str]) -> torch.Tensor:
    """Use the bytes of each text as tokens, cut or padded with zeros to CONTEXT."""
    rows = [list(text.encode())[:CONTEXT] for text in texts]
    return torch.tensor([row + [0] * (CONTEXT - len(row)) for row in rows])


def color(index: int) -> tuple[int, int, int]:
    return index % 256, index // 256, 7


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def picture(index: int) -> bytes:
    """Return a PNG of 24 x 20 random pixels."""
    noise = np.random.default_rng(index).integers(0, 256, (20, 24, 3), np.uint8)
    return encode(Image.fromarray(noise))


def make_sample(index: int) -> dict[str, bytes]:
    image = Image.new("RGB", (12, 10), color(index))
    fields = {"label": f"label {index % 3}", "keywords": [f"k{index}", "x"], "nothing": None}
    return {"png": encode(image), "txt": b"%d" % index, "json": json.dumps(fields).encode()}


def bomb(side: int = 50_000) -> bytes:
    """Return a PNG of a few bytes whose header claims side x side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def write_tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_shards(
    folder: Path, sizes: list[int], change: Change | None = None, first: int = 0
) -> Manifest:
    """Write shards of these sizes and their manifest. Ids begin at `first`. `change` may damage a sample's members."""
    folder.mkdir(parents=True, exist_ok=True)
    index = first
    for number, size in enumerate(sizes):
        members = []
        for entry in range(size):
            sample = make_sample(index)
            for extension, data in (change(index, sample) if change else sample).items():
                members.append((f"{entry:04d}.{extension}", data))
            index += 1
        write_tar(folder / f"{number:05d}.tar", members)
    manifest = index_shards(folder)
    write_manifest(manifest)
    return manifest


def settings(
    folder: Path | str = "unused", worker_timeout_s: float = 240.0, **changes: Any
) -> DataSettings:
    data = DataSettings(**{"shards": str(folder), "workers": 0, "window": 5, **changes})
    return data.model_copy(update={"worker_timeout_s": worker_timeout_s})


def make_loader(
    sources: Source | list[Source] | None,
    data: DataSettings,
    rank: int = 0,
    size: int = 1,
    batch: int = 24,
    **changes: Any,
) -> Loader:
    sources = [sources] if isinstance(sources, Source) else sources or load_sources(data)
    options = {
        "micro_batch": batch // size // 2,
        "seed": 3,
        "tokenize": tokenize,
        "kept_on": "device",
        **changes,
    }
    return Loader(
        data,
        sources,
        InputSpec(SPEC, options["tokenize"], CONTEXT, VOCAB),
        Share(rank, size, batch, options["micro_batch"]),
        options["seed"],
        options.get("state"),
        Staging(options["kept_on"], ranks_here=options.get("ranks_here")),
    )


@dataclass
class Step(StepData):
    """The data of a step that has been read, with its micro-batches."""

    micro_batches: list[MicroBatch] = field(default_factory=list)


def read_step(loader: Loader) -> Step:
    """Read a step, and return copies of its micro-batches."""
    data = loader.start_step()
    batches = [
        {name: array.clone() for name, array in batch.items()} for batch in loader.first_pass()
    ]
    return Step(**vars(data), micro_batches=batches)


def read_rank(loader: Loader, steps: int) -> list[list[tuple[int, int]]]:
    """Return (id, epoch) of each sample of this rank, one list per step. Check that pixels and text fit the id."""
    read = []
    for _ in range(steps):
        data = read_step(loader)
        assert data.error is None, data.error
        step = []
        for batch in data.micro_batches:
            for image, text, index, epoch in zip(
                *(batch[name] for name in ("image", "text", "index", "epoch")), strict=True
            ):
                assert image[:, 4, 4].tolist() == list(color(int(index)))
                assert bytes(text[text > 0].tolist()) == b"%d" % index
                step.append((int(index), int(epoch)))
        read.append(step)
    return read


def read_global(
    sources: Any, data: DataSettings, size: int, steps: int, batch: int = 24, **changes: Any
) -> Any:
    """Read steps with the loaders of `size` ranks, one rank after the other.

    Returns:
        The global batches, each a list of (id, epoch) by position in the batch; the merged state of the loaders; and
        the number of broken samples.
    """
    ranks, states, broken = [], [], []
    for rank in range(size):
        loader = make_loader(sources, data, rank, size, batch, **changes)
        try:
            ranks.append(read_rank(loader, steps))
            states.append(loader.state_dict())
            broken.append(loader.position.broken)
        finally:
            loader.close()
    batches = [[ranks[p % size][t][p // size] for p in range(batch)] for t in range(steps)]
    return batches, merge_states(states), sum(broken)


def noise(width: int, height: int) -> Image.Image:
    """Make an image of random blocks plus random pixels. Resizing averages the pixels; the pixels reveal shifts."""
    rng = np.random.default_rng(width * 1000 + height)
    blocks = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize(
        (width, height)
    )
    return Image.blend(
        blocks, Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)), 0.4
    )
