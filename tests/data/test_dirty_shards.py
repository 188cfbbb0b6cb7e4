"""A thousand shards with the defects of web-scale data: the epoch completes, and every skipped sample is reported."""

import time
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from disco_ds.config.data import DataSettings
from disco_ds.data import (
    ImageSpec,
    InputSpec,
    Loader,
    Manifest,
    Share,
    index_shards,
    load_manifest,
    write_manifest,
)
from helpers.shards import bomb, encode, read_step, write_tar

SHARDS, ENTRIES, BATCH = 1000, 20, 100
SPEC = ImageSpec((64, 64))


def write_all(folder: Path, dirty: bool) -> Manifest:
    """Write 20,000 JPEGs of 96 pixels.

    If dirty, 1% are broken, 1% lack a caption, one is a bomb, and three shards are cut in the middle of their eleventh
    sample after they were counted.
    """
    folder.mkdir()
    generator = numpy.random.default_rng(0)
    images = [
        encode(
            Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=numpy.uint8)).resize(
                (96, 96)
            ),
            "JPEG",
        )
        for _ in range(200)
    ]
    for shard in range(SHARDS):
        members = []
        for entry in range(ENTRIES):
            index = shard * ENTRIES + entry
            image = images[index % len(images)]
            if dirty and index % 100 == 7:
                image = image[: len(image) // 3]
            if dirty and index == 4242:
                image = bomb()
            members.append((f"{entry:04d}.jpg", image))
            if not (dirty and index % 100 == 57):
                members.append((f"{entry:04d}.txt", b"sample %d" % index))
        write_tar(folder / f"{shard:05d}.tar", members)
    manifest = index_shards(folder)
    write_manifest(manifest)
    if not dirty:
        return manifest
    for shard in (100, 500, 900):
        path = folder / f"{shard:05d}.tar"
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 21 // 40])
    return load_manifest(folder)


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[int(text.split()[1]), 1] for text in texts])


def read_epoch(manifest: Manifest, workers: int) -> tuple[set[int], list[str], float]:
    """Return (ids seen in the first epoch, broken samples and damaged shards, samples per second)."""
    settings = DataSettings(shards=str(manifest.folder), workers=workers, max_broken=0.1)
    loader = Loader(
        settings, [manifest], InputSpec(SPEC, tokenize, 2, 50_000), Share(0, 1, BATCH, BATCH), 0
    )
    seen: set[int] = set()
    broken: list[str] = []
    try:
        read_step(loader)
        start = time.perf_counter()
        for _ in range(SHARDS * ENTRIES // BATCH):
            data = read_step(loader)
            assert data.error is None, data.error
            broken += data.broken + data.damaged
            (batch,) = data.micro_batches
            assert batch["text"][:, 0].tolist() == batch["index"].tolist()
            seen |= set(batch["index"][batch["epoch"] == 0].tolist())
        return seen, broken, SHARDS * ENTRIES / (time.perf_counter() - start)
    finally:
        loader.close()


@pytest.mark.slow
def test_thousand_dirty_shards_are_read_to_the_end_as_fast_as_clean_ones(tmp_path: Path) -> None:
    clean, dirty = (
        write_all(tmp_path / "clean", dirty=False),
        write_all(tmp_path / "dirty", dirty=True),
    )
    pairs = [(read_epoch(clean, 1), read_epoch(dirty, 1)) for _ in range(3)]
    seen, broken, _ = pairs[0][1]
    lost = {index for index in range(SHARDS * ENTRIES) if index % 100 in (7, 57)} | {4242}
    cut = {shard * ENTRIES + entry for shard in (100, 500, 900) for entry in range(10, ENTRIES)}
    first_batch = BATCH  # read before the clock started, and not in `seen`
    assert not seen & (lost | cut)
    assert len(seen) >= SHARDS * ENTRIES - len(lost | cut) - first_batch - BATCH
    named = {line.split(": ")[0] for line in broken}
    assert len(named) >= len(lost - cut) * 0.95
    assert any("50000 x 50000" in line or "DecompressionBomb" in line for line in broken)
    for shard in (100, 500, 900):
        reason = "the shard is damaged after 10 samples, and the rest is lost"
        assert any(line.startswith(f"{shard:05d}.tar/") and reason in line for line in broken)
    # Other processes can only slow a run down, so compare the fastest runs.
    clean_rate, dirty_rate = (max(run[2] for run in runs) for runs in zip(*pairs, strict=True))
    rate = dirty_rate / clean_rate
    print(f"throughput of dirty shards over that of clean ones: {rate:.3f}")
    assert rate > 0.95
