"""Checkpoints written beside the training: the copy, the same files as a waiting save's, failures, a killed writer."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.metrics.run_folder import CHECKPOINTS
from disco_ds.training.background_save import HostCopy, Save
from disco_ds.training.build import Run, build
from disco_ds.training.checkpoint import read
from disco_ds.training.loop import train
from disco_ds.training.retention import FORMAT, find_latest, list_complete, remove_old
from helpers.checkpoints import SHAPE, identify
from helpers.dist import run_ranks
from helpers.faults import At, start
from helpers.launched import CASES, SAME, equal_checkpoints, records
from helpers.tiny_run import expect, recipe


class Holder:
    """An object that is no container, as DeepSpeed's loss scaler."""

    def __init__(self, tensor: torch.Tensor):
        self.scale, self.tensor = 2.0, tensor


def mixed_state() -> dict[str, Any]:
    flat = torch.arange(24, dtype=torch.float32)
    return {
        "views": [flat[:8].view(2, 4), flat[8:].view(4, 4).t(), flat],
        "parameter": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "none": torch.empty(0),
        "holder": Holder(flat[3]),
        "plain": ("text", 3, None, torch.float16, torch.Size([2])),
    }


def test_copy_is_written_as_the_original_and_outlives_its_change() -> None:
    state, host = mixed_state(), HostCopy()
    original, written = io.BytesIO(), io.BytesIO()
    torch.save(state, original)
    copy = host.take(state)
    state["views"][2].zero_()
    state["parameter"].data.zero_()
    state["holder"].scale = 1.0
    torch.save(copy, written)
    assert written.getvalue() == original.getvalue()
    written.seek(0)
    loaded = torch.load(written, weights_only=False)
    assert loaded["views"][1].stride() == (1, 4)
    assert loaded["views"][0].untyped_storage()._cdata == loaded["views"][2].untyped_storage()._cdata
    assert torch.equal(loaded["views"][2], torch.arange(24, dtype=torch.float32))
    assert type(loaded["parameter"]) is nn.Parameter


def test_memory_of_a_copy_is_used_again() -> None:
    host = HostCopy()
    first = host.take({"a": torch.ones(1000), "b": torch.zeros(7)})
    address = first["a"].data_ptr()
    again = host.take({"a": torch.full((1000,), 2.0), "b": torch.zeros(3)})
    assert again["a"].data_ptr() == address
    assert bool((first["a"] == 2).all())


# Runs


def slow_disk(run: Run, number: int) -> None:
    """Make each flush take longer than a step, so that training goes on while a checkpoint is written."""
    fsync = os.fsync
    if number == 1:
        os.fsync = lambda handle: (time.sleep(0.1), fsync(handle))[1]


def both_ways(path: Path, name: str, deepspeed: dict[str, Any]) -> None:
    """A run that saves in every other step, in both ways: the same files, and the same records."""
    own = ["steps=6", "checkpoint.keep_last=9", "log.tensorboard=false", "model.patch_dropout=0.5"]
    folders, fsync = {}, os.fsync
    for way in ("true", "false"):
        overrides = [f"name={name}-{way}", f"checkpoint.asynchronous={way}", *own]
        overrides += [f"deepspeed={deepspeed}"] if deepspeed else []
        in_flight: list[bool] = []

        def watch(run: Run, number: int, seen: list[bool] = in_flight) -> None:
            slow_disk(run, number)
            seen.append(run.interrupts.writing())

        try:
            with ExitStack() as stack:
                run = start(load_config(path, overrides), watch, stack)
                train(run)
        finally:
            os.fsync = fsync
        assert any(comm.gather_objects(any(in_flight))[:1]) == (way == "true"), "the training has gone on meanwhile"
        folders[way] = run.folder
    if comm.rank() == 0:
        steps = [path.name for path in list_complete(folders["true"])]
        assert steps == ["step-00000002", "step-00000004", "step-00000006"]
        for step in steps:
            equal_checkpoints(*(folder / CHECKPOINTS / step for folder in folders.values()))
            sums = [read(folder / CHECKPOINTS / step).meta["files"] for folder in folders.values()]
            assert sums[0].keys() == sums[1].keys()
        mine, other = (records(folder) for folder in folders.values())
        assert [[one[key] for key in SAME] for one in mine] == [[one[key] for key in SAME] for one in other]
        assert any(one.get("time/save_s", 0) > 0 for one in mine)


def all_stages(path: Path) -> None:
    for case, deepspeed in CASES.items():
        if case != "zero2-fp16":
            both_ways(path, case, deepspeed)


def test_checkpoint_written_beside_the_training_is_that_of_its_step(tmp_path: Path) -> None:
    run_ranks(both_ways, 2, recipe(tmp_path), "one", {})


@pytest.mark.slow
def test_checkpoint_written_beside_the_training_at_every_stage(tmp_path: Path) -> None:
    run_ranks(all_stages, 2, recipe(tmp_path))


def limit_files(first: int, last: int) -> At:
    """Rank 1 cannot write more than 64 kB into a file while these batches are trained."""

    def at(run: Run, number: int) -> None:
        if comm.rank() == 1 and number in (first, last):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16 if number == first else hard, hard))

    return at


def failing_writer(path: Path) -> None:
    """Batches 1 to 4 are trained while rank 1's disk is full: the save of step 2 fails, that of step 6 does not."""
    config = load_config(path, ["steps=8", "checkpoint.every_steps=2", "name=fails", "log.tensorboard=false"])
    failed: list[int] = []

    def watch(run: Run, number: int) -> None:
        limit_files(1, 6)(run, number)
        failed.append(run.failed_saves)

    with ExitStack() as stack:
        run = start(config, watch, stack)
        train(run)
    assert max(failed) >= 1
    assert run.failed_saves == 0
    assert len(set(map(str, comm.gather_objects(failed)))) == 1, "all ranks count alike"
    assert [path.name for path in list_complete(run.folder)][-1] == "step-00000008"
    assert "step-00000002" not in [path.name for path in list_complete(run.folder)]
    assert not list((run.folder / CHECKPOINTS).glob(".step-*"))
    # Where it never ends, the run does.
    config = load_config(path, ["steps=8", "checkpoint.max_failed=0", "name=ends", "log.tensorboard=false"])
    try:
        with ExitStack() as stack, pytest.raises(comm.AgreedError) as caught:
            train(start(config, limit_files(1, 0), stack))
    finally:
        limit_files(0, 1)(run, 1)
    said = comm.gather_objects(str(caught.value))
    assert len(set(said)) == 1
    expect(said[0], "writing ", "(rank 1)", "File too large in ")


def test_writer_that_fails_on_one_rank_is_a_failed_save_on_all(tmp_path: Path) -> None:
    run_ranks(failing_writer, 2, recipe(tmp_path))


def save_of(run: Path, step: int, background: bool) -> Save:
    final = run / CHECKPOINTS / f"step-{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(parents=True)
    meta = {"format": FORMAT, "step": step, "num_steps": 9, "identity": identify(), "shape": SHAPE}
    return Save(final, partial, meta, {partial / "rank_00000.pt": torch.ones(1000)}, background)


def write_and_hang(run: Path, reached: Any) -> None:
    first = save_of(run, 1, background=False)
    first.start()
    first.finish()

    def hang(handle: int) -> None:
        reached.set()
        time.sleep(600)

    os.fsync = hang
    second = save_of(run, 2, background=True)
    second.start()
    second.finish()


def test_kill_inside_a_write_leaves_only_what_resume_ignores(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    reached = context.Event()
    process = context.Process(target=write_and_hang, args=(tmp_path, reached))
    process.start()
    assert reached.wait(60)
    process.kill()
    process.join()
    assert find_latest(tmp_path).name == "step-00000001"
    left = [path.name for path in (tmp_path / CHECKPOINTS).glob(".*")]
    assert left == [".step-00000002.partial"]
    remove_old(tmp_path, keep_last=1)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000001"]


def test_remove_old_leaves_the_save_in_flight(tmp_path: Path) -> None:
    save = save_of(tmp_path, 1, background=False)
    remove_old(tmp_path, 1, busy=[save.partial])
    save.start()
    assert save.finish().name == "step-00000001"


# Kills at random moments

KILLS = int(os.environ.get("DISCO_DS_TEST_KILLS", "9"))


def cut_inside(run: Path, since: float, step: int = 0) -> str:
    """What a save that began `since` then, of this step or later, is doing: nothing, copying, or writing files."""
    left = [path for path in (run / CHECKPOINTS).glob(".step-*.partial") if path.stat().st_mtime >= since]
    left = [path for path in left if path.name >= f".step-{step:08d}"]
    return "write" if any(any(path.rglob("*.pt")) for path in left) else "copy" if left else "nothing"


def live(path: Path, name: str, victim: int | None, wanted: str, more: int, after: float) -> None:
    """Train from the last checkpoint; `after` seconds after the `more`-th save is seen copying or writing, the victim
    kills itself."""
    since = time.time()

    def watch(folder: Path, step: int) -> None:
        while True:
            with suppress(OSError):  # renamed meanwhile
                if cut_inside(folder, since, step) == wanted:
                    break
            time.sleep(1e-4)
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    overrides = [f"name={name}", f"steps={2 * KILLS + 2}", "checkpoint.every_steps=1", "log.tensorboard=false"]
    config = load_config(path, [*overrides, "lost_after_s=60", "model.patch_dropout=0.5"])
    with ExitStack() as stack:
        run = build(config, "latest" if list_complete(Path(config.runs) / name) else None, stack)
        if comm.rank() == victim:
            threading.Thread(target=watch, args=(run.folder, run.first_step + more), daemon=True).start()
        train(run)


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_kills_inside_copies_and_writes_change_nothing(tmp_path: Path) -> None:
    """DISCO_DS_TEST_KILLS=50 makes it fifty: a third in copies, two thirds in writes or just after."""
    path, draw, cut = recipe(tmp_path), random.Random(0), []
    run_ranks(live, 2, path, "whole", None, "nothing", 0, 0.0)
    run, whole = tmp_path / "runs" / "cut", tmp_path / "runs" / "whole"
    for number in range(KILLS):
        since, wanted = time.time(), ("copy", "write", "write")[number % 3]
        after = draw.choice([0, draw.uniform(0, 0.01)])
        with pytest.raises(pytest.fail.Exception, match=r"exit code -9|rank . failed"):
            run_ranks(live, 2, path, "cut", draw.randrange(2), wanted, draw.randint(1, 2), after)
        cut.append(cut_inside(run, since))
        for folder in list_complete(run):
            saved = read(folder)
            saved.verify(saved.meta["files"])
    print(f"{KILLS} kills: {cut.count('write')} inside a write, {cut.count('copy')} inside a copy")
    assert {"write", "copy"} <= set(cut), "no kill came in the middle of a save"
    run_ranks(live, 2, path, "cut", None, "nothing", 0, 0.0)
    mine, other = records(run), records(whole)
    assert [[one[key] for key in SAME] for one in mine] == [[one[key] for key in SAME] for one in other]
    last = f"step-{2 * KILLS + 2:08d}"
    equal_checkpoints(run / CHECKPOINTS / last, whole / CHECKPOINTS / last)
