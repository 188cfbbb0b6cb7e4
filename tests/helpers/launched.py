"""Start whole runs with real launchers, and inspect them while they run and afterwards."""

import base64
import json
import os
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

from disco_ds.cli.options import parse_args
from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.dist import become_rank, free_port, start_ranks
from helpers.paths import ROOT
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, write_tiny

BIN = Path(sys.executable).parent


SAME = ("step", "ids", "loss", "lr", "scale", "grad_norm")
"""Metrics that must be bit-identical in a resumed and in an uninterrupted run."""


def launch_command(kind: str, ranks: int, arguments: list[str]) -> list[str]:
    if kind == "deepspeed":
        front = [
            str(BIN / "deepspeed"),
            "--num_accelerators",
            str(ranks),
            "--master_port",
            str(free_port()),
        ]
        return [*front, "--module", "disco_ds.train", *arguments]
    if kind.startswith("torchrun"):
        _, *options = kind.split()
        port = [] if "--standalone" in options else ["--master_port", str(free_port())]
        front = [str(BIN / "torchrun"), *options, "--nproc_per_node", str(ranks), *port]
        return [*front, "-m", "disco_ds.train", *arguments]
    world = base64.urlsafe_b64encode(
        json.dumps({"localhost": list(range(ranks))}).encode()
    ).decode()
    front = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    return [
        *front,
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
        "--module",
        "disco_ds.train",
        *arguments,
    ]


def hear_interrupts() -> None:
    """Make a child process receive SIGINT, which is ignored if the tests run as a background job."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def launched(
    kind: str, ranks: int, arguments: list[str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run in a new session. When the block ends, kill all processes of the session."""
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            launch_command(kind, ranks, arguments),
            cwd=folder,
            env=alone(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )
    try:
        yield process
    finally:
        for member in members(process.pid):
            member.kill()
        process.wait()


def members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def ranks_of(session: int) -> list[psutil.Process]:
    """Return the trainer processes of a session, in the order of ranks. Their children are the data workers."""
    trainers = [
        p
        for p in members(session)
        if p.environ().get("LOCAL_RANK") and "disco_ds.train" in p.cmdline()
    ]
    by_rank = {
        int(p.environ()["LOCAL_RANK"]): p for p in sorted(trainers, key=lambda p: -p.create_time())
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


def wait_for(
    condition: Callable[[], Any],
    what: str,
    folder: Path,
    timeout_s: float = 600,
    poll_s: float = 0.05,
) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(poll_s)
    pytest.fail(f"waited {timeout_s} s for {what}:\n{log_of(folder)[-3000:]}")


def records(run: Path) -> list[dict[str, Any]]:
    if not (run / METRICS_FILE).exists():
        return []
    lines = (run / METRICS_FILE).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def same_as_uninterrupted(run: Path, whole: Path) -> None:
    for mine, other in zip(records(run), records(whole), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]
    last = f"{CHECKPOINTS}/step-{records(whole)[-1]['step']:08d}"
    equal_checkpoints(run / last, whole / last)


def finish(kind: str, ranks: int, arguments: list[str], folder: Path) -> None:
    with launched(kind, ranks, arguments, folder) as process:
        assert process.wait(timeout=800) == 0, log_of(folder)[-3000:]


def train_without_launcher(folder: Path, arguments: list[str]) -> None:
    """Train in this process, which is already a rank of run_ranks. That starts faster than a launcher."""
    os.chdir(folder)
    args = parse_args(["train", *arguments])
    with ExitStack() as stack:
        train(build(load_config(args.config, args.overrides), args.resume, stack))


def train_until_killed(folder: Path, arguments: list[str], name: str, step: int) -> Path:
    """Train on two ranks without a launcher, kill rank 1 with SIGKILL after a step, and return the run folder."""
    run = folder / "runs" / name
    (folder / "log.txt").touch()
    with start_ranks(_train_alone, 2, folder, arguments) as ranks:
        wait_for(
            lambda: any(run.glob("checkpoints/step-*")) and records(run)[-1]["step"] >= step,
            f"step {step}",
            folder,
        )
        ranks[1].kill()
        ranks[0].join(300)  # it notices that rank 1 is lost, and ends
        assert ranks[0].exitcode == 1
    assert not (run / "finished.json").exists()
    return run


def _train_alone(number: int, port: int, folder: Path, arguments: list[str]) -> None:
    """Train as one of two ranks, without a launcher."""
    become_rank(number, port, folder / f"{number}.log")
    with comm.session(60):
        train_without_launcher(folder, arguments)


def _launcher(session: int) -> psutil.Process:
    return next(p for p in members(session) if "deepspeed.launcher.launch" in p.cmdline())


def equal_checkpoints(first: Path, second: Path) -> None:
    """Check that two checkpoints have bit-identical weights, optimizer states and states of this package."""
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*.pt"))
    assert names == sorted(str(path.relative_to(second)) for path in second.rglob("*.pt"))
    for name in names:
        mine, other = (
            torch.load(path / name, weights_only=False, map_location="cpu")
            for path in (first, second)
        )
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
    else:  # for example the loss scaler
        assert_same(vars(mine), vars(other), where)


def write_recipe(folder: Path, deepspeed: dict[str, Any]) -> list[str]:
    """Write a recipe of eight steps with dropout, two micro-batches and a checkpoint every three steps."""
    folder.mkdir()
    model = {"name": write_tiny(folder, BPE_SIZE, patch_dropout=0.5)}
    data = {"shards": "bundled:emoji/unseen", "image_key": "png", "workers": 1, "slots": 4}
    path = recipe(
        folder,
        runs="runs",
        steps=8,
        model=model,
        data=data | {"augment": {"rotate_degrees": 10, "color_scale": 0.1}},
        checkpoint={"every_steps": 3, "keep_last": 3},
        lost_after_s=10,
        optim={"lr": 1e-3, "warmup_steps": 0, "ema": {"decay": 0.9, "every_steps": 2}},
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


def alone() -> dict[str, str]:
    """Return the environment without the variables of a launcher."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    return environment | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def run_program(command: list[str], timeout_s: float, folder: Path) -> str:
    """Run a program and return its output. Then end all processes that it has left.

    The test fails if the program fails or takes too long.
    """
    environment = alone() | {"DS_ACCELERATOR": os.environ["DS_ACCELERATOR"]}
    log = folder / "said.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for member in members(process.pid):
                member.kill()
            process.wait()
    said = log.read_text(errors="replace")
    assert code == 0, f"exit code {code} ({timeout_s:g} s allowed):\n{said[-4000:]}"
    return said
