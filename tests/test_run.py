"""Whole runs through real launchers: stopped and resumed bit for bit, killed without orphans, nothing left behind."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from dist import free_port, run_ranks
from machine import needs_fp16
from test_build import recipe
from towers import BPE_SIZE, write_tiny

from disco_ds.cli.parser import parse_args
from disco_ds.config import load_config
from disco_ds.metrics.records import METRICS_FILE
from disco_ds.training.build import build
from disco_ds.training.loop import train

BIN = Path(sys.executable).parent
SAME = ("step", "ids", "loss", "lr", "scale", "grad_norm")
"""What a resumed run repeats to the bit."""


def launch_command(kind: str, ranks: int, arguments: list[str]) -> list[str]:
    if kind == "deepspeed":
        front = [str(BIN / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", str(free_port())]
        return [*front, "--module", "disco_ds.train", *arguments]
    if kind == "torchrun":
        front = [str(BIN / "torchrun"), "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
        return [*front, "-m", "disco_ds.train", *arguments]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    front = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    return [*front, "--master_addr=127.0.0.1", f"--master_port={free_port()}", "--module", "disco_ds.train", *arguments]


@contextmanager
def launched(kind: str, ranks: int, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a session of its own; every process of it is ended at the end, whatever happens."""
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            launch_command(kind, ranks, arguments),
            cwd=folder,
            env=alone(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for member in members(process.pid):
            member.kill()
        process.wait()


def members(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def ranks_of(session: int) -> list[psutil.Process]:
    """The trainers among them, by rank; data workers are their children."""
    trainers = [p for p in members(session) if p.environ().get("LOCAL_RANK") and "disco_ds.train" in p.cmdline()]
    by_rank = {int(p.environ()["LOCAL_RANK"]): p for p in sorted(trainers, key=lambda p: -p.create_time())}
    return [by_rank[rank] for rank in sorted(by_rank)]


def wait_for(
    condition: Callable[[], Any], what: str, folder: Path, timeout_s: float = 600, poll_s: float = 0.05
) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(poll_s)
    pytest.fail(f"waited {timeout_s} s for {what}:\n{(folder / 'log.txt').read_text()[-3000:]}")


def records(run: Path) -> list[dict[str, Any]]:
    if not (run / METRICS_FILE).exists():
        return []
    lines = (run / METRICS_FILE).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finish(kind: str, ranks: int, arguments: list[str], folder: Path) -> None:
    with launched(kind, ranks, arguments, folder) as process:
        assert process.wait(timeout=800) == 0, (folder / "log.txt").read_text()[-3000:]


def train_without_launcher(folder: Path, arguments: list[str]) -> None:
    """One rank, in a process of run_ranks: sooner there than a launcher's."""
    os.chdir(folder)
    args = parse_args(["train", *arguments])
    with ExitStack() as stack:
        train(build(load_config(args.config, args.overrides), args.resume, stack))


def kill_at_step(step: int, victim: str, kind: str, arguments: list[str], folder: Path, run: Path) -> float:
    """Start, wait for a step's record, SIGKILL one process; seconds until no process of the run is left."""
    with launched(kind, 2, arguments, folder) as process:
        wait_for(lambda: any(record["step"] >= step for record in records(run)), f"step {step}", folder)
        targets = {"rank": lambda: ranks_of(process.pid)[1], "launcher": lambda: _launcher(process.pid)}
        targets |= {"front end": lambda: psutil.Process(process.pid)}
        start = time.monotonic()
        targets[victim]().kill()
        process.wait(timeout=200)
        wait_for(lambda: not members(process.pid), "every process to end", folder, 60)
        return time.monotonic() - start


def _launcher(session: int) -> psutil.Process:
    return next(p for p in members(session) if "deepspeed.launcher.launch" in p.cmdline())


def equal_checkpoints(first: Path, second: Path) -> None:
    """Weights, optimizer and our own state, to the bit."""
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*.pt"))
    assert names == sorted(str(path.relative_to(second)) for path in second.rglob("*.pt"))
    for name in names:
        mine, other = (torch.load(path / name, weights_only=False, map_location="cpu") for path in (first, second))
        for noise in ("global_samples", "dp_world_size", "ds_config", "ds_version"):
            for tree in (mine, other):
                tree.pop(noise, None)
        assert_same(mine, other, name)


def assert_same(mine: Any, other: Any, where: str) -> None:
    assert type(mine) is type(other), where
    if isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other), where
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys(), where
        for key in mine:
            assert_same(mine[key], other[key], f"{where}.{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other), where
        for number, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    elif isinstance(mine, numpy.ndarray):
        assert numpy.array_equal(mine, other), where
    elif isinstance(mine, int | float | str | bool | torch.Size | torch.dtype | None):
        assert mine == other, where
    elif isinstance(mine, type | types.FunctionType):
        assert mine is other, where
    else:  # the loss scaler, for one
        assert_same(vars(mine), vars(other), where)


def write_recipe(folder: Path, deepspeed: dict[str, Any]) -> list[str]:
    """Eight steps with dropout, two micro-batches, a checkpoint every three, in a folder with a space."""
    folder.mkdir()
    model = {"name": write_tiny(folder, BPE_SIZE, patch_dropout=0.5)}
    data = {"shards": "bundled:emoji/unseen", "image_key": "png", "workers": 1, "slots": 4}
    path = recipe(
        folder,
        runs="runs",
        steps=8,
        model=model,
        data=data | {"augment": {"rotate_degrees": 10, "colour_scale": 0.1}},
        checkpoint={"every_steps": 3, "keep_last": 3},
        lost_after_s=10,
        deepspeed=deepspeed,
    )
    return ["--config", path.name]


FP32 = {"torch_autocast": {"enabled": False}}
CASES = {
    "zero1-fp32": {"base": "zero1", **FP32},
    "zero0-fp32": {"base": "zero0", **FP32},
    "zero3-autocast": {"base": "zero3"},
    "zero2-bf16": {"base": "zero2", "bf16": {"enabled": True}, **FP32},
    "zero2-fp16": {"base": "zero2", "fp16": {"enabled": True, "initial_scale_power": 8}, **FP32},
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "case",
    [
        "zero1-fp32",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("zero0-fp32", "zero3-autocast", "zero2-bf16")),
        pytest.param("zero2-fp16", marks=[pytest.mark.slow, needs_fp16]),
    ],
)
def test_killed_and_resumed_run_is_the_uninterrupted_one(case, tmp_path):
    folder = tmp_path / "a folder"
    arguments = write_recipe(folder, CASES[case])
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = folder / "runs" / "cut"
    # The kernel tells the launcher's ranks, a lost rank makes the others fail, and so on: nobody trains on.
    assert kill_at_step(4, "rank", "launch", [*arguments, "name=cut"], folder, run) < 45
    assert kill_at_step(7, "launcher", "launch", [*arguments, "name=cut", "--resume", "latest"], folder, run) < 10
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=cut", "--resume", "latest"])
    whole = folder / "runs" / "whole"
    for mine, other in zip(records(run), records(whole), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]
    assert len({record["ids"] for record in records(whole) if "ids" in record}) == 8
    equal_checkpoints(*(path / "checkpoints" / "step-00000008" for path in (run, whole)))
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006", "step-00000008"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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
    assert f"asked to stop, saved after step {step}" in (folder / "log.txt").read_text()
    assert not (run / "finished.json").exists()
    finish("launch", 2, [*arguments, "name=cut", "--resume", "latest"], folder)
    for mine, other in zip(records(run), records(folder / "runs" / "whole"), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]


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


@pytest.mark.timeout(1200)
def test_front_end_killed_ends_launcher_and_ranks(tmp_path):
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    run = folder / "runs" / "tiny"
    arguments += ["steps=500", "checkpoint.every_steps=0"]
    assert kill_at_step(2, "front end", "deepspeed", arguments, folder, run) < 30
    assert not (run / "finished.json").exists()


def test_sessions_are_found():
    """The helper that says nothing is left must find what is there."""
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as process:
        assert [member.pid for member in members(process.pid)] == [process.pid]
        os.killpg(process.pid, signal.SIGKILL)


def test_command_line_trains_alone_and_says_what_it_did(tmp_path):
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    arguments += ["micro_batch=16", "steps=2", "eval={labelled: {unseen: bundled:emoji/unseen}}"]
    command = [sys.executable, "-m", "disco_ds", "train", *arguments]
    done = subprocess.run(command, cwd=folder, env=alone(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "global batch 16 = 1 ranks x 16 micro-batch x 1 micro-batches per rank" in done.stdout
    assert re.search(r"^zero-shot +top-1 +top-5 .*\nunseen +\d", done.stdout, re.MULTILINE)
    run = folder / "runs" / "tiny"
    assert [record["step"] for record in records(run)] == [1, 2, 2]
    assert {"time/forward_s", "time/loss_s", "time/update_s", "ranks/slowest"} <= records(run)[0].keys()
    assert (run / "finished.json").is_file()
    assert list((run / "tensorboard").glob("events.*"))
    # The written settings are a recipe, and a finished run is not started again.
    again = [sys.executable, "-m", "disco_ds", "train", "--config", "runs/tiny/config.yaml", "--resume", "latest"]
    refused = subprocess.run(again, cwd=folder, env=alone(), capture_output=True, text=True, timeout=600)
    assert refused.returncode == 2
    assert "has done all its steps" in refused.stderr
    wrong = subprocess.run(
        [*command, "lr=1", "--dry-run"], cwd=folder, env=alone(), capture_output=True, text=True, timeout=600
    )
    assert wrong.returncode == 2
    assert "unknown key lr; valid: name, runs, seed" in wrong.stderr


def alone() -> dict[str, str]:
    """The environment without a launcher's variables."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    return environment | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
