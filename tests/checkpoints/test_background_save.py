"""Asynchronous saves: the copy in host memory, equality with synchronous saves, failed saves, and ranks killed during a
save."""

import errno
import fcntl
import io
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.keep import (
    ENGINE,
    FORMAT,
    META,
    DamagedError,
    find_latest,
    list_complete,
    remove_checkpoints,
)
from disco_ds.checkpoints.save import HostCopy, Save
from disco_ds.config import load_config
from disco_ds.distributed import comm, jobs
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import Run, build
from disco_ds.training.loop import train
from helpers.checkpoints import SHAPE, finish, flip, identify
from helpers.dist import run_ranks
from helpers.faults import At, failure, poisoned, start
from helpers.launched import CASES, SAME, equal_checkpoints, records, same_as_uninterrupted
from helpers.tiny_run import expect, recipe


class Holder:
    """An object that is not a container, like DeepSpeed's loss scaler."""

    def __init__(self, tensor: torch.Tensor):
        self.scale, self.tensor = 2.0, tensor


def mixed_state() -> dict[Any, Any]:
    flat = torch.arange(24, dtype=torch.float32)
    return {
        Path("file"): [flat[:8].view(2, 4), flat[8:].view(4, 4).t(), flat],
        "parameter": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "none": torch.empty(0),
        "number": torch.tensor(3),
        "holder": Holder(flat[3]),
        "plain": ("text", 3, None, torch.float16, torch.Size([2])),
    }


def test_copy_equals_the_original_and_outlives_its_change() -> None:
    state, original = mixed_state(), mixed_state()
    copy = HostCopy().take(state)
    state[Path("file")][2].zero_()
    state["parameter"].data.zero_()
    state["holder"].scale = 1.0
    written = io.BytesIO()
    torch.save(copy, written)
    assert written.tell() < 10_000, "a view must be copied without the tensor that it is a part of"
    written.seek(0)
    loaded = torch.load(written, weights_only=False)
    assert list(loaded) == list(original)
    for mine, other in zip(loaded[Path("file")], original[Path("file")], strict=True):
        assert torch.equal(mine, other)
    for name in ("parameter", "none", "number"):
        assert loaded[name].dtype == original[name].dtype
        assert torch.equal(loaded[name], original[name])
    assert not loaded["parameter"].requires_grad
    assert (loaded["holder"].scale, float(loaded["holder"].tensor)) == (2.0, 3.0)
    assert loaded["plain"] == original["plain"]
    assert list(map(type, loaded["plain"])) == list(map(type, original["plain"]))


def test_memory_of_a_copy_is_used_again() -> None:
    host = HostCopy()
    first = host.take({"a": torch.ones(1000), "b": torch.zeros(7)})
    address = first["a"].data_ptr()
    again = host.take({"a": torch.full((1000,), 2.0), "b": torch.zeros(3)})
    assert again["a"].data_ptr() == address
    assert bool((first["a"] == 2).all())


# Runs


def slow_disk(run: Run, number: int) -> None:
    """Make each flush take longer than a step, so that training continues while a checkpoint is written."""
    fsync = os.fsync
    if number == 1:
        os.fsync = lambda handle: (time.sleep(0.1), fsync(handle))[1]


def both_ways(path: Path, name: str, deepspeed: dict[str, Any]) -> None:
    """Check that asynchronous and synchronous saves of every other step give the same files and metrics."""
    own = ["steps=6", "checkpoint.keep_last=9", "log.tensorboard=false", "model.patch_dropout=0.5"]
    folders, fsync = {}, os.fsync
    for way in ("true", "false"):
        overrides = [f"name={name}-{way}", f"checkpoint.asynchronous={way}", *own]
        overrides += [f"deepspeed={deepspeed}"] if deepspeed else []
        in_flight: list[bool] = []

        def watch(run: Run, number: int, seen: list[bool] = in_flight) -> None:
            slow_disk(run, number)
            seen.append(run.saver.in_flight is not None and not run.saver.job.done())

        try:
            with ExitStack() as stack:
                run = start(load_config(path, overrides), watch, stack)
                train(run)
        finally:
            os.fsync = fsync
        assert any(comm.gather_objects(any(in_flight))[:1]) == (way == "true"), (
            "only an asynchronous save may still be writing when the next batch is trained"
        )
        folders[way] = run.folder
    if comm.rank() == 0:
        steps = [path.name for path in list_complete(folders["true"])]
        assert steps == ["step-00000002", "step-00000004", "step-00000006"]
        for step in steps:
            equal_checkpoints(*(folder / CHECKPOINTS / step for folder in folders.values()))
            sums = [read(folder / CHECKPOINTS / step).meta["files"] for folder in folders.values()]
            assert sums[0].keys() == sums[1].keys()
        mine, other = (records(folder) for folder in folders.values())
        assert [[one[key] for key in SAME] for one in mine] == [
            [one[key] for key in SAME] for one in other
        ]
        assert any(one.get("time/save_s", 0) > 0 for one in mine)


def all_stages(path: Path) -> None:
    for case, deepspeed in CASES.items():
        if case != "zero2-fp16":
            both_ways(path, case, deepspeed)


@pytest.mark.slow
def test_asynchronous_checkpoint_at_every_stage(tmp_path: Path) -> None:
    run_ranks(all_stages, 2, recipe(tmp_path))


def limit_files(first: int, last: int) -> At:
    """Return a hook: from batch `first` until batch `last`, rank 1 cannot write more than 64 kB to a file."""

    def at(run: Run, number: int) -> None:
        if comm.rank() == 1 and number in (first, last):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16 if number == first else hard, hard))

    return at


def failing_writer(path: Path) -> None:
    """Train while rank 1 cannot write large files, until batch 6: the first save fails, and a later one succeeds."""
    config = load_config(
        path, ["steps=8", "checkpoint.every_steps=2", "name=fails", "log.tensorboard=false"]
    )
    failed: list[int] = []

    def watch(run: Run, number: int) -> None:
        limit_files(1, 6)(run, number)
        failed.append(run.saver.num_failed)

    with ExitStack() as stack:
        run = start(config, watch, stack)
        train(run)
    assert max(failed) >= 1
    assert run.saver.num_failed == 0
    assert len(set(map(str, comm.gather_objects(failed)))) == 1, (
        "all ranks must count the same failures"
    )
    assert [path.name for path in list_complete(run.folder)][-1] == "step-00000008"
    assert "step-00000002" not in [path.name for path in list_complete(run.folder)]
    assert not list((run.folder / CHECKPOINTS).glob(".step-*"))
    # If the saves keep failing, the run ends.
    config = load_config(
        path,
        ["steps=8", "checkpoint.every_steps=1", "name=ends", "log.tensorboard=false"],
    )
    try:
        with ExitStack() as stack, pytest.raises(comm.AgreedError) as caught:
            train(start(config, limit_files(1, 0), stack))
    finally:
        limit_files(0, 1)(run, 1)
    said = comm.gather_objects(str(caught.value))
    assert len(set(said)) == 1
    expect(said[0], "writing ", "(rank 1)", "File too large in ")


def failing_writer_before_an_error(path: Path) -> None:
    """The save of step 2 fails while rank 1's disk is full. Batch 3 stops the run when there is space again."""
    config = load_config(
        path,
        ["steps=8", "checkpoint.every_steps=2", "name=stops", "skip_nonfinite=0"],
    )

    def at(run: Run, number: int) -> None:
        if number == 3:
            assert run.saver.in_flight is not None
            jobs.wait_for_all(run.saver.job, "the save of step 2")
        limit_files(1, 3)(run, number)
        poisoned({3: "loss"})(run, number)

    said = failure(config, at)
    expect(said, "a checkpoint was saved after step 2")


def save_of(run: Path, step: int) -> Save:
    final = run / CHECKPOINTS / f"step-{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT, "step": step, "num_steps": 9, "identity": identify(), "shape": SHAPE}
    return Save(final, partial, meta, {partial / f"rank_{comm.rank():05d}.pt": torch.ones(1000)})


def writable(handle: int) -> bool:
    return fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def test_all_files_and_folders_are_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    at_rename: list[list[tuple[str, bool]]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        flushed.append((META if META in name else name, writable(handle)))
        fsync(handle)

    def note_rename(path: Any, target: Any) -> None:
        at_rename.append(list(flushed))
        rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save = save_of(tmp_path, 1)
    (save.partial / ENGINE).mkdir()
    save.states[save.partial / ENGINE / "weights.pt"] = torch.ones(10)
    finish(save)
    (before,) = at_rename
    files = ["rank_00000.pt", "weights.pt", META]
    assert sorted(before) == sorted(
        [(name, True) for name in files] + [(ENGINE, False), (save.partial.name, False)]
    )
    assert flushed[len(before) :] == [(CHECKPOINTS, False)]


def test_write_error_that_comes_late_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS reports a failed write only when the descriptor that wrote is synced or closed."""
    fsync = os.fsync

    def fail_late(handle: int) -> None:
        if writable(handle) and "rank_" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail_late)
    save = save_of(tmp_path, 1)
    with pytest.raises(
        comm.AgreedError, match=r"rank_00000.pt could not be written: .*Input/output error"
    ):
        finish(save)
    assert list_complete(tmp_path) == []


def test_file_that_was_changed_on_its_way_to_the_disk_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def lose_a_page(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "rank_00000.pt":
            flip(path)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", lose_a_page)
    save = save_of(tmp_path, 1)
    saved = read(finish(save))
    with pytest.raises(DamagedError, match=r"rank_00000.pt is not what was written"):
        saved.verify(saved.meta["files"])


@pytest.mark.parametrize("missing", [1, 22, 100, 1000, 10_000])
def test_file_that_the_disk_has_cut_is_a_failed_save(tmp_path: Path, missing: int) -> None:
    """A limit on the file size simulates a full disk. It cuts the last `missing` bytes of the file."""
    whole = save_of(tmp_path, 1)
    whole.states = dict.fromkeys(whole.states, torch.arange(50_000))
    size = read(finish(whole)).meta["files"]["rank_00000.pt"]["bytes"]
    cut = save_of(tmp_path, 2)
    cut.states = dict.fromkeys(cut.states, torch.arange(50_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, before[1]))
    try:
        with pytest.raises(
            comm.AgreedError, match=r"rank_00000.pt could not be written: .*File too large"
        ):
            finish(cut)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert find_latest(tmp_path).name == "step-00000001"


def write_slowly_on_rank_0(run: Path, timeout_s: float) -> list[str]:
    """Save while rank 0 needs twice the timeout of a collective for its files. Return the log lines of this rank."""
    heard = io.StringIO()
    logging.getLogger("disco_ds").addHandler(logging.StreamHandler(heard))
    jobs.TURN_S, jobs.LOG_EVERY_S = 0.5, timeout_s
    fsync = os.fsync
    slow = [2 * timeout_s]

    def flush(handle: int) -> None:
        time.sleep(slow.pop() if slow and comm.rank() == 0 else 0)
        fsync(handle)

    os.fsync = flush
    with comm.session(timeout_s):
        finish(save_of(run, 1))
    return heard.getvalue().splitlines()


def test_rank_that_writes_longer_than_a_collective_waits_is_waited_for_and_named(
    tmp_path: Path,
) -> None:
    said, nothing = run_ranks(write_slowly_on_rank_0, 2, tmp_path, 5.0, joined=False)
    assert read(find_latest(tmp_path)).step == 1
    assert nothing == []
    expect(said[0], "step-00000001", "rank 0", " s")


def write_and_hang(run: Path, reached: Any) -> None:
    finish(save_of(run, 1))

    def hang(handle: int) -> None:
        reached.set()
        time.sleep(600)

    os.fsync = hang
    finish(save_of(run, 2))


def test_kill_inside_a_write_leaves_only_what_resume_ignores(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    reached = context.Event()
    process = context.Process(target=write_and_hang, args=(tmp_path, reached))
    process.start()
    assert reached.wait(300)
    process.kill()
    process.join()
    assert find_latest(tmp_path).name == "step-00000001"
    (left,) = (tmp_path / CHECKPOINTS).glob(".*")
    assert left.name == ".step-00000002.partial"
    remove_checkpoints(tmp_path, keep_last=1)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000001"]


def test_remove_old_leaves_the_save_in_flight(tmp_path: Path) -> None:
    save = save_of(tmp_path, 1)
    remove_checkpoints(tmp_path, 1, busy=[save.partial])
    assert finish(save).name == "step-00000001"


def remove_slowly(path: Path) -> None:
    """Save steps 8 and 16, on a file system that takes until batch 22 to remove the checkpoint of step 8."""
    gate, opened = threading.Event(), []
    rmtree = shutil.rmtree

    def remove(path: Any, **options: Any) -> None:
        opened.append(gate.wait(300))
        rmtree(path, **options)

    def watch(run: Run, number: int) -> None:
        if 17 < number < 22:
            time.sleep(0.3)  # so that the writer of step 16 reaches the removal
        if number == 22:
            gate.set()

    overrides = [
        "steps=23",
        "checkpoint.every_steps=8",
        "checkpoint.keep_last=1",
        "log.tensorboard=false",
    ]
    with ExitStack() as stack:
        run = start(load_config(path, overrides), watch, stack)
        shutil.rmtree = remove
        train(run)
    assert opened, "no checkpoint was removed"
    assert all(opened), "training waited for the removal"
    assert [path.name for path in list_complete(run.folder)] == ["step-00000023"]
    waited = {one["step"] for one in records(run.folder) if one.get("time/save_s", 0) > 0}
    assert waited - {9, 17}, "the time of a step that completes a save must be logged too"


def test_removal_of_an_old_checkpoint_stops_no_step(tmp_path: Path) -> None:
    run_ranks(remove_slowly, 1, recipe(tmp_path))


class NoMemory(HostCopy):
    """A copy that fails because the host has no memory left."""

    def take(self, state: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def copy_without_memory(path: Path) -> None:
    """Save every other step. From step 8 on, the host has no memory for the copy."""
    complete: list[list[str]] = []

    def watch(run: Run, number: int) -> None:
        if number == 8 and run.saver.host_copy is not None:
            run.saver.host_copy = NoMemory()
        complete.append([path.name for path in list_complete(run.folder)])

    overrides = [
        "steps=9",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=3",
        "log.tensorboard=false",
    ]
    with ExitStack() as stack, pytest.raises(comm.AgreedError) as caught:
        train(start(load_config(path, overrides), watch, stack))
    assert complete[-1] == ["step-00000002", "step-00000004", "step-00000006"]
    expect(str(caught.value), "copying the state", "step-00000009", "can't allocate memory")


def saves_of_runs(path: Path) -> None:
    both_ways(path, "one", {})
    failing_writer(path)
    failing_writer_before_an_error(path)
    copy_without_memory(path)


def test_saves_beside_training_equal_others_and_failed_ones_lose_nothing(tmp_path: Path) -> None:
    run_ranks(saves_of_runs, 2, recipe(tmp_path))


# Kills at random moments

KILLS = int(os.environ.get("DISCO_DS_TEST_KILLS", "9"))


def cut_inside(run: Path, since: float, step: int = 0) -> str:
    """Return what a save that began after `since`, at this step or later, is doing: nothing, copy or write."""

    def find(prefix: str, folder: Path) -> list[Path]:
        found = [path for path in folder.glob(f"{prefix}*") if path.stat().st_mtime >= since]
        return [path for path in found if path.name >= f"{prefix}{step:08d}"]

    if any(any(path.rglob("*.pt")) for path in find(".step-", run / CHECKPOINTS)):
        return "write"
    return "copy" if find("copying.step-", run) else "nothing"


def live(path: Path, name: str, victim: int | None, wanted: str, more: int, after: float) -> None:
    """Train from the last checkpoint. The rank `victim` kills itself during the `more`-th save.

    Args:
        path: The recipe.
        name: Name of the run.
        victim: The rank, or None if no rank dies.
        wanted: The phase of the save in which the rank dies: "copy" or "write".
        more: Number of the save in this process, from 1.
        after: Seconds from the moment at which the phase is noticed until the kill.
    """
    since = time.time()
    take = HostCopy.take

    def take_and_note(host: HostCopy, state: Any) -> Any:
        partial = next(path.parent.name for path in state if path.name.startswith("rank_"))
        note = run.folder / f"copying{partial}-{comm.rank()}"
        note.touch()
        time.sleep(0.05)  # copying a tiny model takes less time than a kill
        copy = take(host, state)
        note.unlink()
        return copy

    HostCopy.take = take_and_note  # type: ignore[method-assign]

    def watch(folder: Path, step: int) -> None:
        while True:
            with suppress(OSError):  # the folder was renamed in the meantime
                if cut_inside(folder, since, step) == wanted:
                    break
            time.sleep(1e-4)
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    overrides = [
        f"name={name}",
        f"steps={2 * KILLS + 2}",
        "checkpoint.every_steps=1",
        "log.tensorboard=false",
    ]
    config = load_config(path, [*overrides, "lost_after_s=60", "model.patch_dropout=0.5"])
    with ExitStack() as stack:
        run = build(config, "latest" if list_complete(Path(config.runs) / name) else None, stack)
        if comm.rank() == victim:
            threading.Thread(
                target=watch, args=(run.folder, run.schedule.first_step + more), daemon=True
            ).start()
        train(run)


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
def test_kills_inside_copies_and_writes_change_nothing(tmp_path: Path) -> None:
    """Kill a rank during a save, many times: in a third of the cases during the copy, otherwise during the write.

    The environment variable DISCO_DS_TEST_KILLS sets the number of kills.
    """
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
    same_as_uninterrupted(run, whole)
