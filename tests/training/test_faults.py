"""Faults in runs of two ranks, such as a full disk: which of them stop the run, and with which messages."""

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.keep import find_latest, read_meta
from disco_ds.config import Config, load_config
from disco_ds.data import index_shards, write_manifest
from disco_ds.distributed import comm
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import Run
from disco_ds.training.loop import finish, train
from helpers.dist import run_ranks
from helpers.faults import At, failure, nothing, start
from helpers.launched import (
    CASES,
    SAME,
    equal_checkpoints,
    launched,
    members,
    ranks_of,
    records,
    wait_for,
    write_recipe,
)
from helpers.launched import finish as finish_run
from helpers.small_disk import mount_small_disk
from helpers.tiny_run import expect, image_sample, recipe, stopped, write_shard


def train_with(config: Config, at: At) -> Run:
    with ExitStack() as stack:
        run = start(config, at, stack)
        train(run)
    return run


# Data


def data_faults(path: Path, folder: Path) -> None:
    def config(name: str, *overrides: str) -> Config:
        data = [
            f"data.shards={folder / name}",
            "timeout_s=60",
            "data.slots=2",
            "data.window=4",
            "steps=30",
            "checkpoint.every_steps=0",
        ]
        return load_config(path, [f"name={name}", *data, *overrides])

    def kill_worker(run: Run, number: int) -> None:
        if number == 2 and comm.rank() == 1:
            os.kill(run.loader.worker_pids[0], signal.SIGKILL)

    def remove(run: Run, number: int) -> None:
        if number == 2 and comm.rank() == 0:
            for shard in (folder / "vanished").glob("*.tar"):
                shard.unlink()

    def cut(run: Run, number: int) -> None:
        if number == 2 and comm.rank() == 0:
            for shard in (folder / "cut").glob("*.tar"):
                os.truncate(shard, shard.stat().st_size // 2)

    said = failure(config("killed", "data.workers=1"), kill_worker)
    expect(said, "data failed on rank 1: ", "data worker 0 of 1", "died with exit code -9")
    said = failure(config("vanished"), remove)
    expect(said, "data failed on rank", "No such file", str(folder / "vanished"))
    expect(
        stopped(config("keys", "data.captions={'{json[title]}': 1.0}")),
        "title",
        "the sample has png, txt",
    )
    run = train_with(config("cut", "data.max_broken=1.0"), cut)
    comm.barrier()
    names = [line for path in run.folder.glob("broken-*.txt") for line in path.open()]
    assert any(
        ("of" in name and "bytes" in name) or "complete samples" in name for name in names
    ), names


@pytest.mark.slow
def test_faults_of_the_data_stop_all_ranks_and_are_named(tmp_path):
    for name in ("killed", "vanished", "cut", "keys"):
        (tmp_path / name).mkdir()
        for number in range(8):
            write_shard(
                tmp_path / name / f"{number:05d}.tar",
                [image_sample(number) for number in range(20)],
            )
        write_manifest(index_shards(tmp_path / name))
    run_ranks(data_faults, 2, recipe(tmp_path), tmp_path)


# Resumed runs: records, points, copies


class Crash(Exception):  # noqa: N818
    pass


def crash_and_resume(path: Path, folder: Path) -> None:
    overrides = [
        "steps=8",
        "checkpoint.every_steps=4",
        "checkpoint.asynchronous=false",  # otherwise, the crash might come while a save is in progress
        f"checkpoint.copy_command=cp -r {{path}} {folder}/{{name}}",
        "eval={every_steps: 2, labeled: {unseen: 'bundled:emoji/unseen'}}",
    ]
    config = load_config(path, overrides)

    def crash(run: Run, number: int) -> None:
        if number == 7:
            raise Crash

    with ExitStack() as stack, pytest.raises(Crash):
        train(start(config, crash, stack))
    with ExitStack() as stack:
        run = start(config, nothing, stack, resume=str(folder / "runs" / "tiny"))
        assert run.schedule.first_step == 4
        train(run)
        finish(run)
        run.saver.end(run.schedule.num_steps)


@pytest.mark.slow
def test_records_and_points_go_on_after_a_crash(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(crash_and_resume, 2, recipe(tmp_path), tmp_path)
    run = tmp_path / "runs" / "tiny"
    steps = [(record["step"], "loss" in record) for record in records(run)]
    evaluated = [(step, False) for step in (2, 4, 6, 8)]
    assert sorted(steps) == sorted([(step, True) for step in range(1, 9)] + evaluated)
    points = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    names = points.Tags()["scalars"]
    assert "train/loss" in names
    # Which steps wait for a save depends on the disk.
    for name in set(names) - {"time/save_s"}:
        # The evaluation at the step of the checkpoint is repeated, because the run may have ended before it.
        expected = (2, 4, 4, 6, 8) if name.startswith("eval/") else range(1, 9)
        assert [point.step // 16 for point in points.Scalars(name)] == list(expected), name
    losses = {record["step"]: record["loss"] for record in records(run) if "loss" in record}
    assert [point.value for point in points.Scalars("train/loss")] == pytest.approx(
        list(losses.values())
    )
    for name in ("step-00000004", "step-00000008"):
        read_meta(tmp_path / name)


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system with room for two and a half checkpoints of the tiny model."""
    with mount_small_disk(tmp_path / "disk", "66m") as path:
        yield path


def full_disk(path: Path, disk: Path) -> None:
    ballast = disk / "ballast"

    def config(name: str, *overrides: str, steps: int = 5, way: str = "false") -> Config:
        own = [
            f"runs={disk}",
            f"name={name}",
            "checkpoint.every_steps=1",
            f"steps={steps}",
            f"checkpoint.asynchronous={way}",
        ]
        return load_config(path, [*own, *overrides])

    def fill(run: Run, number: int) -> None:
        """Fill the disk before the second checkpoint, so that only a part fits. Free it after the save has failed."""
        comm.barrier()
        if number == 2 and comm.rank() == 0:
            ballast.write_bytes(bytes(free(disk) - 10 * 2**20))
        if number == 3 and comm.rank() == 0:
            assert [p.name for p in (run.folder / CHECKPOINTS).iterdir()] == ["step-00000001"]
            # Fill the disk completely, so that records wait in memory too.
            with suppress(OSError), (disk / "more").open("wb", buffering=0) as more:
                while more.write(bytes(512)):
                    pass
        if number == 4 and comm.rank() == 0:
            ballast.unlink()
            (disk / "more").unlink()
        comm.barrier()

    def fill_for_long(run: Run, number: int) -> None:
        if number < 4:
            fill(run, number)

    def saved(run: Run) -> list[str]:
        comm.barrier()
        return sorted(path.name for path in (run.folder / CHECKPOINTS).iterdir())

    # The disk has room for two checkpoints, and two are kept. So the oldest one is removed before a save.
    for way in ("false", "true"):
        run = train_with(config(f"tight-{way}", "checkpoint.keep_last=2", way=way), nothing)
        assert saved(run) == ["step-00000004", "step-00000005"]
        assert run.saver.num_failed == 0
        clear(run)
    # If others fill the disk for a while, the run continues.
    run = train_with(config("goes-on", "checkpoint.keep_last=1"), fill)
    assert run.saver.num_failed == 0
    assert saved(run) == ["step-00000005"]
    if comm.rank() == 0:
        assert [record["step"] for record in records(run.folder)] == [1, 2, 3, 4, 5]
    clear(run)
    # If the disk stays full for too long, all ranks stop, and the previous checkpoint is intact.
    said = failure(config("stops", steps=9), fill_for_long)
    expect(said, "No space left on device", str(disk / "stops" / CHECKPOINTS), "free up space")
    saved_at = read(find_latest(disk / "stops"))
    assert saved_at.step == 1
    assert not list((disk / "stops" / CHECKPOINTS).glob(".*"))


def free(disk: Path) -> int:
    usage = os.statvfs(disk)
    return usage.f_bavail * usage.f_frsize


def clear(run: Run) -> None:
    """Remove the checkpoints. Collective."""
    comm.barrier()
    if comm.rank() == 0:
        shutil.rmtree(run.folder / CHECKPOINTS)
    comm.barrier()


@pytest.mark.slow
def test_full_disk_stops_no_run_that_need_not_stop(tmp_path, small_disk):
    run_ranks(full_disk, 2, recipe(tmp_path), small_disk)


# Whole runs, through a launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_is_named_and_nobody_is_left(number, tmp_path):
    folder = tmp_path / "run"
    arguments = [
        *write_recipe(folder, CASES["zero1-fp32"]),
        "steps=5000",
        "checkpoint.every_steps=0",
        "lost_after_s=5",
    ]
    with launched("launch", 2, arguments, folder) as process:
        wait_for(lambda: len(records(folder / "runs" / "tiny")) > 3, "step 4", folder)
        begin = time.monotonic()
        ranks_of(process.pid)[1].send_signal(number)
        named = f"rank 0 stops: rank 1 on {socket.gethostname()} (last step "
        wait_for(
            lambda: named in (folder / "log.txt").read_text(), "the lost rank's name", folder, 5 + 5
        )
        assert process.wait(timeout=60) != 0
        # The launcher gives a stopped rank half a minute to answer its SIGTERM.
        wait_for(lambda: not members(process.pid), "every process to end", folder, 10)
        assert time.monotonic() - begin < 55


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_kills_at_random_moments_change_nothing(tmp_path):
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    arguments += [
        "steps=60",
        "checkpoint.every_steps=2",
        "log.tensorboard=false",
        "lost_after_s=4",
        "data.workers=0",
    ]
    finish_run("torchrun", 2, [*arguments, "name=whole"], folder)
    arguments, run, draw = [*arguments, "name=cut"], folder / "runs" / "cut", random.Random(0)
    unfinished = 0
    for life in range(10):
        resume = ["--resume", "latest"] if life else []
        with launched("launch", 2, [*arguments, *resume], folder) as process:
            wait_for(
                lambda life=life: any(r["step"] >= 4 + 5 * life for r in records(run)),
                "its step",
                folder,
            )
            ranks = ranks_of(process.pid)
            if life % 2:
                wait_for(
                    lambda: list((run / CHECKPOINTS).glob(".step-*")),
                    "a save",
                    folder,
                    poll_s=0.001,
                )
                time.sleep(draw.uniform(0, 0.02))
            else:
                time.sleep(draw.uniform(0, 0.05))
            for rank in draw.choice([ranks, ranks[:1], ranks[1:]]):
                rank.kill()
            assert process.wait(timeout=60) != 0
            wait_for(
                lambda process=process: not members(process.pid), "every process to end", folder, 40
            )
        unfinished += bool(list((run / CHECKPOINTS).glob(".step-*")))
    assert not (run / "finished.json").exists()
    assert unfinished, "no kill came in the middle of a save"
    finish_run("launch", 2, [*arguments, "--resume", "latest"], folder)
    whole = folder / "runs" / "whole"
    for mine, other in zip(records(run), records(whole), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]
    equal_checkpoints(*(path / CHECKPOINTS / "step-00000060" for path in (run, whole)))
