"""The loader: one sequence of global batches for any ranks and workers, exact resume, errors as values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from shards import (
    CONTEXT,
    SPEC,
    VOCAB,
    bomb,
    encode,
    make_loader,
    read_global,
    read_rank,
    settings,
    tokenize,
    write_shards,
)

from disco_ds.data import Loader, Manifest, load_manifest, merge_states

SIZES = [17, 30, 9, 25, 30, 13, 20, 22]
NUM_SAMPLES = sum(SIZES)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_shards(tmp_path_factory.mktemp("shards"), SIZES)


@pytest.fixture(scope="module")
def reference(manifest: Manifest) -> Any:
    """Twelve global batches of 24, nearly two epochs, read by one rank in process; the state after each."""
    loader = make_loader(manifest, settings())
    steps, states = [], [loader.state_dict()]
    for _ in range(12):
        steps += read_rank(loader, 1)
        states.append(loader.state_dict())
    loader.close()
    return steps, states


def test_epochs_hold_every_sample_once(reference: Any) -> None:
    steps, _ = reference
    read = [sample for step in steps for sample in step]
    assert len(set(read)) == len(read) == 288
    first = {index for index, epoch in read if epoch == 0}
    assert first == set(range(NUM_SAMPLES))
    # 8 slots of 20 or 21 samples take turns: epoch 0 ends within position 8 x 21.
    assert {epoch for _, epoch in read[: 8 * 20]} == {0}
    assert {epoch for _, epoch in read[8 * 21 : 8 * 41]} == {1}


@pytest.mark.parametrize(("size", "workers", "micro_batch"), [(2, 0, 3), (4, 0, 1), (8, 0, 3), (1, 1, 24), (2, 3, 2)])
def test_global_batches_do_not_depend_on_ranks_workers_micro_batch(
    manifest: Manifest, reference: Any, size: int, workers: int, micro_batch: int
) -> None:
    batches, state, _ = read_global(manifest, settings(workers=workers), size, 12, micro_batch=micro_batch)
    assert batches == reference[0]
    assert state == reference[1][12]


@pytest.mark.parametrize(("done", "size", "workers"), [(2, 4, 0), (7, 2, 0), (8, 2, 2), (0, 1, 0)])
def test_resume_at_another_number_of_ranks_goes_on_exactly(
    manifest: Manifest, reference: Any, done: int, size: int, workers: int
) -> None:
    _, middle, _ = read_global(manifest, settings(), 4, done)
    assert middle == reference[1][done]
    batches, state, _ = read_global(manifest, settings(workers=workers), size, 12 - done, state=middle)
    assert batches == reference[0][done:]
    assert state == reference[1][12]


def test_batch_smaller_than_the_slots_leaves_workers_empty_parts(manifest: Manifest) -> None:
    data = settings(slots=8, workers=3)
    in_process = read_global(manifest, settings(slots=8), 1, 12, batch=2, micro_batch=2)
    assert read_global(manifest, data, 1, 12, batch=2, micro_batch=2) == in_process
    whole = read_global(manifest, settings(slots=8), 1, 1, batch=24)
    assert [sample for step in in_process[0] for sample in step] == whole[0][0]


def test_another_seed_is_another_order(manifest: Manifest, reference: Any) -> None:
    assert read_global(manifest, settings(), 1, 1, seed=4)[0][0] != reference[0][0]


def test_state_of_another_run_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    ranks = [make_loader(manifest, settings(), rank, 2) for rank in range(2)]
    states = [loader.state_dict() for loader in ranks]
    merged = merge_states(states)
    for loader in ranks:
        loader.close()
    with pytest.raises(ValueError, match="slots 8, this run has 4"):
        make_loader(manifest, settings(slots=4), state=merged)
    with pytest.raises(ValueError, match="global_batch 24, this run has 48"):
        make_loader(manifest, settings(), batch=48, state=merged)
    with pytest.raises(ValueError, match="fingerprint"):
        make_loader(write_shards(tmp_path, SIZES[::-1]), settings(), state=merged)
    with pytest.raises(ValueError, match="merge_states"):
        make_loader(manifest, settings(), state=states[0])
    with pytest.raises(ValueError, match="4 of 8 slots are missing"):
        merge_states(states[:1])
    with pytest.raises(ValueError, match="differ in steps"):
        merge_states([states[0], {**states[1], "steps": 1}])


def test_ranks_that_do_not_divide_the_slots_are_refused(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match=r"8 slots .* data.slots=6 or data.slots=9"):
        make_loader(manifest, settings(), 0, 3)
    with pytest.raises(ValueError, match="global_batch 25"):
        make_loader(manifest, settings(), batch=25, micro_batch=3)


def damage(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
    """One sample in 10 is broken, in six ways."""
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
    return {name: data for name, data in (sample | way).items() if "gif" not in way or name != "png"}


REASONS = (
    "truncated",
    "image: ",
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
        assert read_global(manifest, settings(max_broken=0.2, workers=workers), size, 12) == expected
    # The count goes on after a resume, at the sum over ranks.
    middle = read_global(manifest, settings(max_broken=0.2), 2, 5)[1]
    batches, state, broken = read_global(manifest, settings(max_broken=0.2), 4, 7, state=middle)
    assert (batches, state, broken) == (expected[0][5:], expected[1], expected[2])
    assert len(lost) <= expected[2] <= 2 * len(lost)

    loader = make_loader(manifest, settings(max_broken=0.2))
    named = set()
    for _ in range(8):
        loader.read_step()
        named |= set(loader.last_broken)
    loader.close()
    assert len(loader.last_broken) == 5
    assert all(name.startswith("0000") and ".tar/00" in name for name in named)


@pytest.mark.parametrize(("way", "reason"), list(enumerate(REASONS)))
def test_broken_sample_says_why(tmp_path: Path, way: int, reason: str) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return damage(10 * way + 4, sample) if index == 2 else sample

    loader = make_loader(write_shards(tmp_path, [8], change), settings(), batch=8)
    assert loader.read_step().error is None
    loader.close()
    assert loader.broken in (1, 2)  # the batch reaches into the next epoch
    assert loader.last_broken[0].startswith("00000.tar/0002: ")
    assert any(word in loader.last_broken[0] for word in reason.split("|")), loader.last_broken


def test_truncated_shard_costs_its_lost_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_shards(tmp_path, [20, 20]).folder
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    manifest = load_manifest(folder)
    assert "00001.tar" in caplog.text
    expected = read_global(manifest, settings(), 1, 1)
    assert read_global(manifest, settings(), 2, 1) == expected
    loader = make_loader(manifest, settings(max_broken=1.0), batch=20)
    ids = {index for step in read_rank(loader, 3) for index, epoch in step if epoch == 0}
    loader.close()
    assert ids >= set(range(20))
    assert 5 <= 40 - len(ids) <= 15
    assert "the file ends at" in loader.last_broken[0] or "end mark" in loader.last_broken[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("max_broken", [0.01, 1.0])
def test_wrong_image_key_ends_with_the_members_seen(manifest: Manifest, workers: int, max_broken: float) -> None:
    loader = make_loader(manifest, settings(image_key="jpg;webp", workers=workers, max_broken=max_broken))
    data = loader.read_step()
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
    data = loader.read_step()
    assert data.error
    assert len(data.micro_batches) == 2
    for batch in data.micro_batches:
        assert batch.image.shape == (micro_batch, 3, *SPEC.size)
        assert batch.image.dtype == torch.uint8
        assert batch.text.shape == (micro_batch, CONTEXT)
        assert batch.index.shape == batch.epoch.shape == (micro_batch,)
        assert not any(value.any() for value in (batch.image, batch.text, batch.index, batch.epoch))
    assert loader.state_dict() == before


def test_missing_field_and_limit_stop_the_run(tmp_path: Path) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return sample if index % 4 else {"png": sample["png"]}

    loader = make_loader(write_shards(tmp_path, [60] * 4, change), settings(captions={"{json[label]}": 1.0}))
    errors = [loader.read_step().error for _ in range(8)]
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
    loader = make_loader(copy, settings(), batch=20)
    error = loader.read_step().error
    loader.close()
    assert error is not None
    assert "No such file" in error
    assert str(tmp_path / "00001.tar") in error


def fail(texts: list[str]) -> torch.Tensor:
    if texts == ["5"]:
        raise RuntimeError("the tokenizer is upset")
    return tokenize(texts)


def stall(texts: list[str]) -> torch.Tensor:
    time.sleep(60)
    return tokenize(texts)


@pytest.mark.parametrize("workers", [0, 1])
def test_exception_in_a_worker_becomes_an_error_with_its_traceback(manifest: Manifest, workers: int) -> None:
    loader = make_loader(manifest, settings(workers=workers), tokenize=fail)
    errors = [loader.read_step().error for _ in range(8)]
    loader.close()
    assert errors[-1] is not None
    assert "RuntimeError: the tokenizer is upset" in errors[-1]
    assert "Traceback" in errors[-1]


def test_wrong_context_length_is_an_error(manifest: Manifest) -> None:
    loader = Loader(settings(), manifest, SPEC, tokenize, CONTEXT + 1, VOCAB, 0, 1, 24, 12, 0)
    error = loader.read_step().error
    loader.close()
    assert error is not None
    assert "tokenizer returned (1, 8)" in error


def test_silent_worker_is_an_error_after_the_timeout(manifest: Manifest) -> None:
    loader = make_loader(manifest, settings(workers=1, timeout_s=1.0), tokenize=stall)
    data = loader.read_step()
    assert data.error is not None
    assert "silent for data.timeout_s=1 s" in data.error
    assert data.wait_s >= 1
    start = time.perf_counter()
    loader.close()
    assert time.perf_counter() - start < 2


def test_killed_worker_is_an_error_and_raises_nowhere(manifest: Manifest) -> None:
    loader = make_loader(manifest, settings(workers=2))
    handler = signal.getsignal(signal.SIGCHLD)
    read_rank(loader, 1)
    assert signal.getsignal(signal.SIGCHLD) == handler
    os.kill(loader.worker_pids[1], signal.SIGTERM)
    read_rank(loader, 1)
    os.kill(loader.worker_pids[1], signal.SIGKILL)
    deadline = time.perf_counter() + 20
    while (data := loader.read_step()).error is None and time.perf_counter() < deadline:
        pass
    assert data.error is not None
    assert f"data worker 1 of 2 (pid {loader.worker_pids[1]}) died, exit code -9" in data.error
    check_placeholders(loader, 12)
    loader.close()
    wait_until_gone(loader.worker_pids)
    assert loader.read_step().error == data.error


TRAINER = """
import sys, time
from pathlib import Path
from disco_ds.data import load_manifest
from shards import make_loader, read_rank, settings
if __name__ == "__main__":
    loader = make_loader(load_manifest(Path(sys.argv[1])), settings(workers=2))
    read_rank(loader, 1)
    print(*loader.worker_pids, flush=True)
    if sys.argv[2] == "stay":
        time.sleep(60)
"""


@pytest.mark.parametrize("end", ["stay", "leave"])
def test_workers_end_with_their_trainer(manifest: Manifest, tmp_path: Path, end: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    command = [sys.executable, str(script), str(manifest.folder), end]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        if end == "stay":
            trainer.kill()
        assert trainer.wait(20) == (-9 if end == "stay" else 0)
    wait_until_gone(pids)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.perf_counter() + 10
    while any(is_running(pid) for pid in pids):
        assert time.perf_counter() < deadline, pids
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_micro_batch_moves_and_pins(manifest: Manifest) -> None:
    loader = make_loader(manifest, settings())
    batch = loader.read_step().micro_batches[0]
    loader.close()
    moved = batch.to("cpu", non_blocking=True)
    assert torch.equal(moved.image, batch.image)
    if torch.cuda.is_available():
        assert batch.pin_memory().text.is_pinned()
        assert torch.equal(batch.pin_memory().to("cuda", non_blocking=True).index.cpu(), batch.index)


def read_pixels(loader: Loader, steps: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    for _ in range(steps):
        data = loader.read_step()
        assert data.error is None
        for b in data.micro_batches:
            yield from zip(b.index.tolist(), b.epoch.tolist(), b.image, b.text, strict=True)


def test_synthetic_source_is_a_function_of_the_id() -> None:
    data = settings(source="synthetic", shards=None, num_samples=100, slots=4)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    orders = []
    for size in (1, 2):
        for rank in range(size):
            loader = make_loader(None, data, rank, size, batch=20)
            read = list(read_pixels(loader, 10))
            loader.close()
            orders.append([(index, epoch) for index, epoch, _, _ in read])
            for index, _, image, text in read:
                known = seen.setdefault(index, (image, text))
                assert torch.equal(image, known[0])
                assert torch.equal(text, known[1])
    assert orders[0][::2] == orders[1]
    assert orders[0][1::2] == orders[2]
    assert sorted(orders[0][:100]) == [(index, 0) for index in range(100)]
    assert sorted(seen) == list(range(100))
    texts = torch.stack([text for _, text in seen.values()])
    assert texts.shape == (100, CONTEXT)
    assert texts.min() >= 0
    assert (texts.argmax(dim=1) == CONTEXT - 1).all()
    assert texts.max() == VOCAB - 1
    assert len({image.flatten().float().mean().item() for image, _ in seen.values()}) > 90


def test_pixels_do_not_depend_on_ranks_but_on_the_epoch(tmp_path: Path) -> None:
    """With a crop that matters: a gradient instead of one colour."""

    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
        return {**sample, "png": encode(picture)}

    manifest = write_shards(tmp_path, [12, 12], change)
    data = settings(crop_scale=(0.3, 0.8))

    def pixels(size: int, workers: int, data: Any = data) -> dict[tuple[int, int], bytes]:
        found = {}
        for rank in range(size):
            loader = make_loader(manifest, data.model_copy(update={"workers": workers}), rank, size, batch=12)
            found |= {(i, e): image.numpy().tobytes() for i, e, image, _ in read_pixels(loader, 4)}
            loader.close()
        return found

    one = pixels(1, 0)
    assert pixels(2, 0) == one
    assert pixels(1, 1) == one
    assert len(set(one.values())) > 30
    plain = pixels(1, 0, settings(crop_scale=None))
    assert len(set(plain.values())) == 1
