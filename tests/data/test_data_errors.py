"""Broken samples are skipped identically at any number of ranks. Other data errors are returned in StepData.error."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from disco_ds.cli.main import main
from disco_ds.data import InputSpec, Loader, Manifest, Share, load_manifest
from helpers.paths import ROOT, TESTS
from helpers.shards import (
    CONTEXT,
    NUM_SAMPLES,
    SIZES,
    SPEC,
    VOCAB,
    bomb,
    make_loader,
    read_global,
    read_rank,
    read_step,
    settings,
    tokenize,
    write_shards,
)
from helpers.waiting import wait_until_gone


def damage(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
    """Break one sample in 10, in six ways."""
    ways: list[dict[str, bytes]] = [
        {"png": sample["png"][:-30]},
        {"png": b"not an image"},
        {"png": bomb()},
        {"txt": b"  "},
        {"txt": b"\xff\xfe"},
        {"gif": sample["png"]},
    ]
    if index % 10 != 4:
        return sample
    way = ways[index // 10 % len(ways)]
    return {
        name: data for name, data in (sample | way).items() if "gif" not in way or name != "png"
    }


REASONS = (
    "truncated",
    "cannot be read as an image",
    "50000 x 50000|DecompressionBomb",
    "is empty",
    "UnicodeDecodeError",
    "no image under",
)


def test_broken_samples_are_skipped_alike_counted_and_named(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, SIZES, damage)
    lost = {index for index in range(NUM_SAMPLES) if index % 10 == 4}
    expected = read_global(manifest, settings(max_broken=0.2), 1, 12)
    read = [sample for step in expected[0] for sample in step]
    assert {index for index, epoch in read if epoch == 0} == set(range(NUM_SAMPLES)) - lost
    assert not {index for index, _ in read} & lost
    for size, workers in [(2, 0), (4, 0), (1, 3)]:
        assert (
            read_global(manifest, settings(max_broken=0.2, workers=workers), size, 12) == expected
        )
    # After a resume, the count continues from the sum over ranks.
    middle = read_global(manifest, settings(max_broken=0.2), 2, 5)[1]
    batches, state, broken = read_global(manifest, settings(max_broken=0.2), 4, 7, state=middle)
    assert (batches, state, broken) == (expected[0][5:], expected[1], expected[2])
    assert len(lost) <= expected[2] <= 2 * len(lost)

    loader = make_loader(manifest, settings(max_broken=0.2))
    named = set()
    for _ in range(8):
        named |= set(read_step(loader).broken)
    loader.close()
    assert len(named) >= len(lost)
    assert all(name.startswith("0000") and ".tar/00" in name for name in named)


@pytest.mark.parametrize(("way", "reason"), list(enumerate(REASONS)))
def test_broken_sample_says_why(tmp_path: Path, way: int, reason: str) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return damage(10 * way + 4, sample) if index == 2 else sample

    loader = make_loader(write_shards(tmp_path, [8], change), settings(), batch=8)
    data = read_step(loader)
    loader.close()
    assert data.error is None
    assert (
        loader.position.broken == len(data.broken) in (1, 2)
    )  # the batch reaches into the next epoch
    assert data.broken[0].startswith("00000.tar/0002: ")
    assert any(word in data.broken[0] for word in reason.split("|")), data.broken


def test_truncated_shard_costs_its_lost_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_shards(tmp_path, [20, 20]).folder
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    manifest = load_manifest(folder)
    assert "00001.tar" in caplog.text
    expected = read_global(manifest, settings(), 1, 1)
    assert read_global(manifest, settings(), 2, 1) == expected
    loader = make_loader(manifest, settings(max_broken=1.0), batch=20)
    steps, read = [], []
    for _ in range(3):
        steps.append(read_step(loader))
        read += [
            i
            for batch in steps[-1].micro_batches
            for i in batch["index"][batch["epoch"] == 0].tolist()
        ]
    loader.close()
    assert set(read) >= set(range(20))
    assert 5 <= 40 - len(set(read)) <= 15
    assert not any(step.broken for step in steps)
    # The loader names the shard once, although it reads more than one epoch.
    (damaged,) = [name for step in steps for name in step.damaged]
    assert damaged.startswith("00001.tar/")
    assert "samples, and the rest is lost: " in damaged
    assert loader.position.dropped >= 40 - len(set(read))


def test_shard_that_several_workers_read_is_named_once(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, [40, 40]).folder
    damage_header(folder / "00001.tar")
    loader = make_loader(load_manifest(folder), settings(workers=2), batch=20)
    damaged = [name for _ in range(6) for name in read_step(loader).damaged]
    loader.close()
    assert len(damaged) == 1


def damage_header(path: Path) -> None:
    """Overwrite a header in the middle of a shard, as a faulty disk might. The rest of the shard is then lost."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    start = data.index(b"0008.png")
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_damaged_shards_stop_a_run_only_if_they_are_many(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, [40] * 8).folder
    for number in range(3):
        damage_header(folder / f"{number:05d}.tar")
    loader = make_loader(load_manifest(folder), settings(), batch=20)
    steps = [read_step(loader) for _ in range(20)]
    loader.close()
    assert not any(step.error for step in steps)
    assert sorted(name[:9] for step in steps for name in step.damaged) == [
        f"{number:05d}.tar" for number in range(3)
    ]
    assert "the shard is damaged after 7 samples" in next(
        step.damaged[0] for step in steps if step.damaged
    )
    damage_header(folder / "00005.tar")
    loader = make_loader(load_manifest(folder), settings(), batch=20)
    error = next(step.error for step in iter(lambda: read_step(loader), None) if step.error)
    loader.close()
    assert "4 of " in error
    assert "shards are damaged; the limit is 3" in error
    assert "--check --full" in error


def test_full_check_names_a_shard_that_was_damaged_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_shards(tmp_path, [20, 20]).folder
    damage_header(folder / "00001.tar")
    assert main(["index", str(folder), "--check"]) == 0
    assert main(["index", str(folder), "--check", "--full", "--workers", "0"]) == 1
    assert "00001.tar: 7 samples" in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "max_broken"), [(0, 1.0), (2, 0.01)])
def test_wrong_image_key_ends_with_the_members_seen(
    manifest: Manifest, workers: int, max_broken: float
) -> None:
    loader = make_loader(
        manifest, settings(image_key="jpg;webp", workers=workers, max_broken=max_broken)
    )
    data = read_step(loader)
    assert data.error is not None
    assert "no image under jpg;webp; the sample has png, txt, json" in data.error
    assert "rank 0, step 1" in data.error
    if max_broken < 1:
        assert "17 of 17 samples are broken" in data.error
        assert "data.max_broken=0.01" in data.error
    check_placeholders(loader, 12)
    loader.close()


def check_placeholders(loader: Loader, micro_batch: int) -> None:
    before = loader.state_dict()
    data = read_step(loader)
    assert data.error
    assert len(data.micro_batches) == 2
    for batch in data.micro_batches:
        assert batch["image"].shape == (micro_batch, 3, *SPEC.size)
        assert batch["image"].dtype == torch.uint8
        assert batch["text"].shape == (micro_batch, CONTEXT)
        assert batch["index"].shape == batch["epoch"].shape == (micro_batch,)
        assert not any(
            value.any() for value in (batch["image"], batch["text"], batch["index"], batch["epoch"])
        )
    assert loader.state_dict() == before


def test_missing_field_and_limit_stop_the_run(tmp_path: Path) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return sample if index % 4 else {"png": sample["png"]}

    loader = make_loader(
        write_shards(tmp_path, [60] * 4, change), settings(captions={"{json[label]}": 1.0})
    )
    errors = [read_step(loader).error for _ in range(8)]
    loader.close()
    assert errors[0] is None
    assert errors[-1] is not None
    assert "17 of " in errors[-1]
    assert "'{json[label]}'" in errors[-1]
    assert "the sample has png" in errors[-1]
    assert loader.state_dict()["steps"] == errors.index(errors[-1])


def test_vanished_shard_is_named(manifest: Manifest, tmp_path: Path) -> None:
    copy = write_shards(tmp_path, [10, 10])
    (tmp_path / "00001.tar").unlink()
    loader = make_loader(copy, settings(worker_timeout_s=0), batch=20)
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert "No such file" in error
    assert str(tmp_path / "00001.tar") in error


def test_shard_that_is_away_for_a_while_is_read_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = write_shards(tmp_path, [10, 10])
    away = (tmp_path / "00001.tar").rename(tmp_path / "away")
    loader = make_loader(copy, settings(workers=0), batch=20)
    threading.Timer(0.8, away.rename, [tmp_path / "00001.tar"]).start()
    step = read_step(loader)
    loader.close()
    assert step.error is None
    assert not step.broken
    assert sorted(torch.cat(step.index).tolist()) == list(range(20))
    assert "up to 48 s (a tenth of timeout_s)" in caplog.text


def fail(texts: list[str]) -> torch.Tensor:
    raise RuntimeError("the tokenizer is upset")


def die(texts: list[str]) -> torch.Tensor:
    if texts == ["5"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return tokenize(texts)


def stall(texts: list[str]) -> torch.Tensor:
    time.sleep(600)
    return tokenize(texts)


@pytest.mark.parametrize("workers", [0, 1])
def test_code_that_fails_for_all_samples_is_an_error_with_its_traceback(
    manifest: Manifest, workers: int
) -> None:
    loader = make_loader(manifest, settings(workers=workers), tokenize=fail)
    errors = [read_step(loader).error for _ in range(8)]
    loader.close()
    assert errors[-1] is not None
    assert "17 of 17 samples are broken" in errors[-1]
    assert "RuntimeError: the tokenizer is upset" in errors[-1]
    assert "Traceback" in errors[-1]


def test_wrong_context_length_is_an_error(manifest: Manifest) -> None:
    loader = Loader(
        settings(),
        [manifest],
        InputSpec(SPEC, tokenize, CONTEXT + 1, VOCAB),
        Share(0, 1, 24, 12),
        0,
    )
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert "(1, 8)" in error


def test_silent_worker_is_an_error_after_the_timeout(manifest: Manifest) -> None:
    loader = make_loader(manifest, settings(workers=1, worker_timeout_s=12.0), tokenize=stall)
    data = read_step(loader)
    assert data.error is not None
    assert "silent for 12 s (half of timeout_s) while reading 0000" in data.error
    assert ".tar, entry " in data.error
    assert data.wait_s >= 12
    start = time.perf_counter()
    loader.close()
    assert time.perf_counter() - start < 60


def test_worker_that_dies_of_a_sample_names_it(manifest: Manifest) -> None:
    loader = make_loader(manifest, settings(workers=1), tokenize=die)
    errors = [read_step(loader).error for _ in range(8)]
    loader.close()
    assert errors[-1] is not None
    assert "died with exit code -9" in errors[-1]
    assert "exit code -9 while reading 00000.tar, entry 5; if" in errors[-1]


def test_killed_worker_is_an_error_and_raises_nowhere(manifest: Manifest) -> None:
    loader = make_loader(manifest, settings(workers=2))
    handler = signal.getsignal(signal.SIGCHLD)
    read_rank(loader, 1)
    assert signal.getsignal(signal.SIGCHLD) == handler
    os.kill(loader.worker_pids[1], signal.SIGTERM)
    read_rank(loader, 1)
    os.kill(loader.worker_pids[1], signal.SIGKILL)
    deadline = time.perf_counter() + 300
    while (data := read_step(loader)).error is None and time.perf_counter() < deadline:
        pass
    assert data.error is not None
    assert f"data worker 1 of 2 (pid {loader.worker_pids[1]}) died with exit code -9" in data.error
    check_placeholders(loader, 12)
    loader.close()
    wait_until_gone(loader.worker_pids)
    assert read_step(loader).error == data.error


TRAINER = """
import sys, time
from pathlib import Path
from disco_ds.data import InputSpec, Share, load_manifest
from helpers.shards import make_loader, read_rank, settings
if __name__ == "__main__":
    loader = make_loader(load_manifest(Path(sys.argv[1])), settings(workers=1))
    read_rank(loader, 1)
    print(*loader.worker_pids, flush=True)
    if sys.argv[2] == "stay":
        time.sleep(600)
"""


@pytest.mark.parametrize("end", ["stay", pytest.param("leave", marks=pytest.mark.slow)])
def test_workers_end_with_their_trainer(manifest: Manifest, tmp_path: Path, end: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    path = os.pathsep.join([str(TESTS), str(ROOT)])
    command = [sys.executable, str(script), str(manifest.folder), end]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 1
        if end == "stay":
            trainer.kill()
        assert trainer.wait(300) == (-9 if end == "stay" else 0)
    wait_until_gone(pids)
