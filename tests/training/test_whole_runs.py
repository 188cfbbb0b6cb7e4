"""Whole runs with real launchers: resumed runs are bit-identical, and killed runs leave no processes behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers.dist import free_port, run_ranks
from helpers.launched import (
    CASES,
    SAME,
    _launcher,
    alone,
    finish,
    launched,
    log_of,
    members,
    ranks_of,
    records,
    same_as_uninterrupted,
    train_until_killed,
    train_without_launcher,
    wait_for,
    write_recipe,
)
from helpers.machine import needs_fp16


def kill_at_step(
    step: int, victim: str, kind: str, arguments: list[str], folder: Path, run: Path
) -> float:
    """Start a run, wait for a step, and kill one process. Return the seconds until no process of the run is left."""

    def is_there() -> bool:
        # A checkpoint is written in the background, so it may appear later than the steps.
        saved = "checkpoint.every_steps=0" in arguments or any(run.glob("checkpoints/step-*"))
        return saved and any(record["step"] >= step for record in records(run))

    with launched(kind, 2, arguments, folder) as process:
        wait_for(is_there, f"step {step}", folder)
        targets = {
            "rank": lambda: ranks_of(process.pid)[1],
            "launcher": lambda: _launcher(process.pid),
        }
        targets |= {"front end": lambda: psutil.Process(process.pid)}
        start = time.monotonic()
        targets[victim]().kill()
        process.wait(timeout=200)
        wait_for(lambda: not members(process.pid), "every process to end", folder, 60)
        return time.monotonic() - start


def test_killed_run_resumes_as_the_uninterrupted_one(tmp_path):
    """Like test_killed_and_resumed_run_is_the_uninterrupted_one, but without launchers and with only one kill."""
    folder = tmp_path / "a folder"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    arguments += ["steps=12", "data.workers=0", "lost_after_s=5", "optim.name=muon"]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = train_until_killed(folder, [*arguments, "name=cut"], "cut", 4)
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=cut", "--resume", "latest"])
    same_as_uninterrupted(run, folder / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "case",
    [
        *("zero1-fp32", "zero0-fp32", "zero3-autocast", "zero2-bf16"),
        pytest.param("zero2-fp16", marks=needs_fp16),
    ],
)
def test_killed_and_resumed_run_is_the_uninterrupted_one(case, tmp_path):
    folder = tmp_path / "a folder"
    arguments = write_recipe(folder, CASES[case])
    if case in ("zero0-fp32", "zero3-autocast"):
        arguments.append("optim.name=muon")
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = folder / "runs" / "cut"
    # If a rank or the launcher is killed, the other ranks must notice it and stop.
    assert kill_at_step(4, "rank", "launch", [*arguments, "name=cut"], folder, run) < 45
    # Do not wait for step 7, because the run might end before it can be killed.
    assert (
        kill_at_step(
            6, "launcher", "launch", [*arguments, "name=cut", "--resume", "latest"], folder, run
        )
        < 10
    )
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=cut", "--resume", "latest"])
    whole = folder / "runs" / "whole"
    same_as_uninterrupted(run, whole)
    assert len({record["ids"] for record in records(whole) if "ids" in record}) == 8
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006", "step-00000008"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_to_one_rank_saves_on_all_and_loses_nothing(number, tmp_path):
    folder = tmp_path / "run"
    arguments = [*write_recipe(folder, CASES["zero1-fp32"]), "steps=60", "checkpoint.every_steps=0"]
    finish("torchrun", 2, [*arguments, "name=whole"], folder)
    run = folder / "runs" / "cut"
    with launched("launch", 2, [*arguments, "name=cut"], folder) as process:
        wait_for(lambda: any(record["step"] >= 4 for record in records(run)), "step 4", folder)
        start = time.monotonic()
        ranks_of(process.pid)[1].send_signal(number)
        assert process.wait(timeout=60) != 0
        assert time.monotonic() - start < 30
        wait_for(lambda: not members(process.pid), "every process to end", folder, 10)
    (saved,) = (run / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert 4 <= step < 60
    assert re.search(
        rf"^(?!.*error).*: asked to stop: .*saved after step {step}",
        (folder / "log.txt").read_text(),
        re.M,
    )
    assert not (run / "finished.json").exists()
    finish("launch", 2, [*arguments, "name=cut", "--resume", "latest"], folder)
    for mine, other in zip(records(run), records(folder / "runs" / "whole"), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_command_starts_a_run_resumes_it_and_finds_it_done(tmp_path, monkeypatch):
    """torchrun's restarts, Kubernetes and requeued Slurm jobs repeat the same command."""
    # With a shared store, a restart would read the keys of the previous attempt.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder = tmp_path / "run"
    arguments = [*write_recipe(folder, CASES["zero1-fp32"]), "steps=60"]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    arguments += ["--resume", "auto", "name=cut"]
    run = folder / "runs" / "cut"
    with launched("torchrun --standalone --max-restarts 1", 2, arguments, folder) as process:
        wait_for(lambda: any(run.glob("checkpoints/step-*")), "the first checkpoint", folder)
        # torchrun starts each rank in a separate session.
        started = psutil.Process(process.pid).children(recursive=True)
        next(rank for rank in started if rank.environ().get("LOCAL_RANK") == "1").kill()
        assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
    same_as_uninterrupted(run, folder / "runs" / "whole")
    assert "cut: resumes after step" in log_of(folder)
    written = (run / "finished.json").stat().st_mtime_ns
    finish("torchrun", 2, arguments, folder)
    given = f"--num_accelerators 2 --master_port {free_port()}"
    front = [sys.executable, "-m", "disco_ds", "launch", "--deepspeed", given]
    options = {"cwd": folder, "env": alone(), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*front, *arguments], check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    for said in (log_of(folder), done.stdout):
        assert said.count("runs/cut has done all its steps\n") == 1
    assert (run / "finished.json").stat().st_mtime_ns == written
    assert sorted(path.name for path in run.parent.iterdir()) == ["cut", "whole"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupt_from_the_terminal_saves_and_is_one_line(tmp_path):
    """Ctrl-C reaches torchrun and the ranks, and torchrun then sends it to the ranks again."""
    folder = tmp_path / "run"
    arguments = [
        *write_recipe(folder, CASES["zero1-fp32"]),
        "steps=600",
        "checkpoint.every_steps=0",
        "name=cut",
    ]
    run = folder / "runs" / "cut"
    with launched("torchrun", 2, arguments, folder) as process:
        wait_for(lambda: any(record["step"] >= 4 for record in records(run)), "step 4", folder)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
        wait_for(lambda: not members(process.pid), "every process to end", folder, 10)
    (saved,) = (run / "checkpoints").glob("step-*")
    log = (folder / "log.txt").read_text()
    assert log.count("Ctrl-C: saving after this step") == 1
    assert re.search(
        rf"asked to stop: .*saved after step {int(saved.name.removeprefix('step-'))}", log
    )
    assert "KeyboardInterrupt" not in log


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_changed_byte_in_a_checkpoint_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    arguments = [*write_recipe(folder, CASES["zero1-fp32"]), "name=cut"]
    run = folder / "runs" / "cut"
    kill_at_step(4, "rank", "launch", arguments, folder, run)
    (latest,) = (run / "checkpoints").glob("step-*")
    victim = max((path for path in latest.rglob("*.pt")), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with launched("launch", 2, [*arguments, "--resume", "latest"], folder) as process:
        assert process.wait(timeout=100) != 0
    assert f"{victim.name} is not what was written" in (folder / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_front_end_killed_ends_launcher_and_ranks(tmp_path):
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    run = folder / "runs" / "tiny"
    arguments += ["steps=500", "checkpoint.every_steps=0"]
    assert kill_at_step(2, "front end", "deepspeed", arguments, folder, run) < 30
    assert not (run / "finished.json").exists()


def test_sessions_are_found():
    """Other tests check that no process is left. They would prove nothing if the helper `members` found none."""
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as process:
        assert [member.pid for member in members(process.pid)] == [process.pid]
        os.killpg(process.pid, signal.SIGKILL)


def test_command_line_trains_alone_and_says_what_it_did(tmp_path):
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    arguments += [
        "micro_batch=16",
        "steps=2",
        "data.workers=0",
        "eval={labeled: {unseen: bundled:emoji/unseen}}",
    ]
    command = [sys.executable, "-m", "disco_ds", "train", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=alone(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "global batch 16 = 1 rank x micro-batch 16 x 1 per step" in done.stdout
    table = r"^ *zero-shot +top1 +top5 .*\n *unseen +\d.*\n *unseen_ema +\d"
    assert re.search(table, done.stdout, re.MULTILINE)
    run = folder / "runs" / "tiny"
    assert [record["step"] for record in records(run)] == [1, 2, 2]
    assert {"time/forward_s", "time/loss_s", "time/update_s", "ranks/slowest"} <= records(run)[
        0
    ].keys()
    assert (run / "finished.json").is_file()
    assert list((run / "tensorboard").glob("events.*"))
