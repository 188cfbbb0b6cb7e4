"""`disco-ds launch` with real processes: cleanup, restarts and exit codes."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from disco_ds.runs.run_folder import CHECKPOINTS, FINISHED
from helpers.checkpoints import flip
from helpers.cluster import marked
from helpers.dist import free_port, run_ranks
from helpers.launched import (
    CASES,
    _launcher,
    alone,
    log_of,
    members,
    ranks_of,
    records,
    same_as_uninterrupted,
    train_without_launcher,
    wait_for,
    write_recipe,
)


def command(arguments: list[str], *more: str) -> list[str]:
    front = f"--num_accelerators 2 --master_port {free_port()}"
    return [sys.executable, "-m", "disco_ds", "launch", "--deepspeed", front, *more, *arguments]


@contextmanager
def launched(arguments: list[str], folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launch whose processes all have a marker in their environment. When the block ends, kill them."""
    name = f"DISCO_TEST_{free_port()}"
    with (folder / "log.txt").open("ab") as log:
        options: dict[str, Any] = {
            "cwd": folder,
            "env": alone() | {name: "1"},
            "stdout": log,
            "stderr": log,
        }
        process = subprocess.Popen(command(arguments, *more), start_new_session=True, **options)
    process.marker = name  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        for left in marked(name):
            left.kill()
        process.wait()


def deepspeed_session(process: Any, folder: Path) -> int:
    """Return the id of the running `deepspeed` process, which is also the id of its session."""

    def find() -> int | None:
        return next(
            (p.pid for p in marked(process.marker) if "deepspeed.launcher.runner" in p.cmdline()),
            None,
        )

    return wait_for(find, "deepspeed", folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_rank_is_restarted_from_the_last_undamaged_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is damaged, so the launch must resume from an older one without being told to."""
    folder = tmp_path / "run"
    arguments = [
        *write_recipe(folder, CASES["zero1-fp32"]),
        "steps=30",
        "checkpoint.every_steps=10",
    ]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = folder / "runs" / "cut"
    newest = run / CHECKPOINTS / "step-00000020"
    with launched([*arguments, "name=cut"], folder, "--restarts", "1") as process:
        wait_for(newest.exists, "step 20", folder, poll_s=0.005)
        flip(max((newest / "engine").iterdir(), key=lambda file: file.stat().st_size))
        ranks_of(deepspeed_session(process, folder))[1].kill()
        assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
        assert not marked(process.marker)  # type: ignore[attr-defined]
    log = log_of(folder)
    assert "launch: restart 1 of 1, from runs/cut, step-00000020" in log
    assert re.search(
        r"step-00000020 is damaged: engine/.*; trying the previous one, step-00000010", log
    )
    assert "runs/cut/checkpoints/step-00000020 is set aside as set-aside-step-00000020" in log
    same_as_uninterrupted(run, folder / "runs" / "whole")
    assert (run / CHECKPOINTS / "set-aside-step-00000020").is_dir()


VICTIMS = ("wrapper", "wrapper, killed", "front end", "launcher", "rank", "data worker")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", VICTIMS)
def test_signal_to_any_process_leaves_no_orphan(victim: str, tmp_path: Path) -> None:
    """The signal is SIGTERM, except for "wrapper, killed", which is SIGKILL."""
    folder = tmp_path / "run"
    arguments = [
        *write_recipe(folder, CASES["zero1-fp32"]),
        "steps=20000",
        "checkpoint.every_steps=0",
    ]
    run = folder / "runs" / "tiny"
    with launched(arguments, folder) as process:
        wait_for(lambda: len(records(run)) > 3, "step 4", folder)
        session = deepspeed_session(process, folder)
        rank = ranks_of(session)[1]
        targets = {"wrapper": psutil.Process(process.pid), "front end": psutil.Process(session)}
        targets |= {
            "launcher": _launcher(session),
            "rank": rank,
            "data worker": rank.children(recursive=True)[-1],
        }
        if victim == "data worker":  # the worker ignores SIGTERM, so its trainer must end it
            targets[victim].terminate()
            before = len(records(run))
            wait_for(lambda: len(records(run)) > before + 20, "steps after the signal", folder)
        start = time.monotonic()
        if victim == "wrapper, killed":
            process.kill()
        else:
            targets["wrapper" if victim == "data worker" else victim].terminate()
        code = process.wait(timeout=120)
        took = time.monotonic() - start
        # A killed wrapper cannot wait for its ranks.
        end_s = 20 if victim == "wrapper, killed" else 5
        mark = process.marker  # type: ignore[attr-defined]
        wait_for(
            lambda: not marked(mark) and not members(session), "every process to end", folder, end_s
        )
    print(f"signal to {victim}: exit code {code} after {took:.1f} s")
    saved = list((run / CHECKPOINTS).glob("step-*"))
    # If the front end or the wrapper is ended directly, the ranks end without a save. Otherwise, they save first.
    expected = {"front end": (1, 0), "wrapper, killed": (-signal.SIGKILL, 0)}.get(victim, (3, 1))
    assert (code, len(saved)) == expected, log_of(folder)[-3000:]
    assert took < 30


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mistakes_are_reported_once_and_not_restarted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    for given, said in (
        (["lr=1"], "unknown key lr"),
        (["--hostfile", "missing"], "hostfile missing cannot be read"),
        (["data.shards=missing"], "missing"),  # detected only by the ranks
    ):
        with launched([*arguments, *given], folder, "--restarts", "5") as process:
            assert process.wait(timeout=100) == 2, log_of(folder)
        assert said in log_of(folder)
    assert "restart 1" not in log_of(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_of_srun_are_the_ranks_of_one_run(tmp_path: Path) -> None:
    """srun is emulated by the variables that it sets."""
    folder = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "disco_ds.train",
        *write_recipe(folder, CASES["zero1-fp32"]),
        "steps=2",
    ]
    step = {
        "STEP_ID": "0",
        "JOB_ID": str(free_port()),
        "STEP_NUM_TASKS": "2",
        "STEP_NODELIST": "localhost",
    }
    tasks = []
    with (folder / "log.txt").open("ab") as log:
        for number in range(2):
            mine = {f"SLURM_{name}": value for name, value in step.items()}
            mine |= {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            tasks.append(
                subprocess.Popen(words, cwd=folder, env=alone() | mine, stdout=log, stderr=log)
            )
    try:
        assert [task.wait(timeout=200) for task in tasks] == [0, 0], log_of(folder)[-3000:]
    finally:
        for task in tasks:
            task.kill()
    assert log_of(folder).count("global batch 16 = 2 ranks x") == 1
    assert (folder / "runs" / "tiny" / FINISHED).exists()
