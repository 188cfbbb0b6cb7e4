"""Parts of `disco-ds launch`: ending processes, exit codes, run folders, and the variables of srun."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from disco_ds.cli.options import parse_args
from disco_ds.config import load_config
from disco_ds.distributed.launcher import adopt_slurm
from disco_ds.launch.launcher import (
    Signals,
    find_run,
    judge,
    newest_checkpoint,
    run_once,
    supervise,
)
from disco_ds.runs.run_folder import CHECKPOINTS, FINISHED, LAUNCHED, META, mark_launch
from helpers.cluster import words
from helpers.tiny_run import recipe

RANK = "import time; time.sleep(300)"
FRONT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {rank!r}, "--local_rank=0", {word!r}], start_new_session={apart})
print({says!r}, file=sys.stderr, flush=True)
{then}
"""


WATCH = """
import os, resource, subprocess
from disco_ds.distributed.launcher import _end_after
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
front = subprocess.Popen({command!r}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
_end_after({pid})
"""
REAPED = (["sleep", "0.3"], "front.pid")
ZOMBIE = (["sh", "-c", "sleep 0.3 & echo $!; exec sleep 60"], "int(front.stdout.readline())")
"""A process whose parent never reaps it, like the first process of some containers."""


@pytest.mark.parametrize(("command", "pid"), [REAPED, ZOMBIE], ids=["reaped", "zombie"])
def test_rank_with_many_open_files_ends_with_its_front_end(command: list[str], pid: str) -> None:
    start = time.monotonic()
    script = WATCH.format(command=command, pid=pid)
    done = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 0.3 < time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("says", "then", "apart", "codes"),
    [
        ("", "sys.exit(0)", True, {0}),
        (
            "pdsh@here: host-2: ssh exited with exit code 255",
            "import time; time.sleep(300)",
            False,
            {255},
        ),
    ],
)
def test_what_a_front_end_leaves_behind_is_ended(
    says: str,
    then: str,
    apart: bool,
    codes: set[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One front end returns 0 while its ranks keep training. The other waits forever for a lost host.

    Ranks in another session are found by the launch id. Other processes, such as ssh, are found by their process group.
    """
    monkeypatch.setattr("disco_ds.launch.launcher.NAMING_S", 1.0)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    handlers[signal.SIGUSR1] = signal.getsignal(signal.SIGUSR1)
    word = f"word-{os.getpid()}-{len(codes)}-{len(says)}"
    script = FRONT.format(
        rank=RANK, word=f"{word}-0" if apart else f"not-{word}", says=says, then=then, apart=apart
    )
    start = time.monotonic()
    try:
        assert (
            run_once([sys.executable, "-c", script], [], word, Signals(), patience_s=300) == codes
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert time.monotonic() - start < 150
    assert not [process for process in psutil.process_iter() if word in " ".join(words(process))]
    if says:
        assert f"{says}\ndisco-ds launch: host-2 is cut off\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("finished", "agreed", "codes", "code"),
    [
        (True, 1, {1, 247}, 0),  # a failure after the last step does not make the run fail
        (False, 0, {0}, 1),
        (False, None, {0}, 1),  # deepspeed returns 0 if its launcher was killed
        (False, 3, {1}, 3),
        (False, None, {2, 247}, 2),
        (False, None, {1, 3}, 3),
        (False, None, {-9}, 1),
        (None, None, {2}, 2),
    ],
)
def test_exit_code_follows_the_run_folder_first(
    finished: bool | None, agreed: int | None, codes: set[int], code: int, tmp_path: Path
) -> None:
    if finished:
        (tmp_path / FINISHED).touch()
    assert judge(None if finished is None else tmp_path, agreed, codes) == code


FOREIGN = {
    "dict": b'{"version": "0.2.0", "configurations": []}',
    "list": b"[1, 2]",
    "word": b'"launch"',
    "none": b"null",
    "empty": b"",
    "cut": b'{"launch": "our-w',
    "binary": b"\xff\xfe\x00",
}


def test_run_is_found_among_the_launch_files_of_other_programs(tmp_path: Path) -> None:
    for name, body in FOREIGN.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / LAUNCHED).write_bytes(body)
    (tmp_path / "folder" / LAUNCHED).mkdir(parents=True)
    assert find_run([tmp_path, tmp_path / "missing"], "our-word") == (None, None)
    for name, word, code in (("our", "our-word", 3), ("theirs", "another", 1)):
        (tmp_path / name).mkdir()
        mark_launch(tmp_path / name, word, code)
    assert find_run([tmp_path], "our-word") == (tmp_path / "our", 3)


def test_newest_checkpoint_is_the_last_complete_one(tmp_path: Path) -> None:
    assert newest_checkpoint(None) is newest_checkpoint(tmp_path) is None
    for name in (
        "step-99999999",
        "step-100000000",
        "set-aside-step-200000000",
        ".step-300000000.removed",
    ):
        (tmp_path / CHECKPOINTS / name).mkdir(parents=True)
        (tmp_path / CHECKPOINTS / name / META).touch()
    (tmp_path / CHECKPOINTS / "step-400000000").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / CHECKPOINTS / "step-100000000"


@pytest.mark.parametrize(
    ("nodes", "lead"),
    [
        ("node003", "node003"),
        ("node[003-006,010]", "node003"),
        ("gpu[7,9],cpu[1-2]", "gpu7"),
        ("a1,b2", "a1"),
        ("rack[2-3]n[04-05].site", "rack2n04.site"),
    ],
)
def test_launcher_variables_are_derived_from_those_of_srun(
    nodes: str, lead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {
        "STEP_ID": "2",
        "JOB_ID": "4711",
        "PROCID": "13",
        "LOCALID": "5",
        "STEP_NUM_TASKS": "16",
        "STEP_NODELIST": nodes,
    }
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with monkeypatch.context() as script:  # a batch script is not a task
        script.delenv("SLURM_STEP_ID")
        adopt_slurm()
        assert "RANK" not in os.environ
    # Set the variables first, so that monkeypatch removes them at the end of the test.
    monkeypatch.setenv("RANK", "")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK")
    adopt_slurm()
    found = [
        os.environ[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    ]
    assert found == ["13", "16", "5", lead, str(12_000 + 471_102 % 20_000)]
    # A task that sees only one GPU uses it as its first.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    adopt_slurm()
    assert os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    ("codes", "attempts", "code"),
    [([2], 1, 2), ([1, 2, 0], 3, 0), ([1, 2, 2], 3, 1), ([1, 3], 2, 3)],
)
def test_only_the_first_attempt_refuses_the_settings(
    codes: list[int], attempts: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only a restart is refused, the cause is not the settings. It may be a file system that does not answer."""
    done: list[int] = []

    def attempt(*arguments: object) -> set[int]:
        done.append(codes[len(done)])
        if done[-1] == 0:
            folder = tmp_path / "runs" / "tiny"
            folder.mkdir(parents=True)
            mark_launch(folder, command_id(arguments), 0)
            (folder / FINISHED).touch()
        return {done[-1]}

    def command_id(arguments: tuple[object, ...]) -> str:
        command = list(arguments[0])  # type: ignore[call-overload]
        return str(command[command.index("--launch-id") + 1])

    monkeypatch.setattr("disco_ds.launch.launcher.run_once", attempt)
    config = load_config(recipe(tmp_path))
    args = parse_args(["launch", "--config", str(tmp_path / "tiny.yaml"), "--restarts", "9"])
    assert supervise(args, config, {}, SimpleNamespace(count=0)) == code
    assert done == codes[:attempts]


def supervise_with(folder: Path, monkeypatch: pytest.MonkeyPatch, do: Any, *arguments: str) -> int:
    """Supervise attempts that call `do` with the number of the attempt and then fail. Return the exit code."""
    count = itertools.count()

    def attempt(command: list[str], *others: object) -> set[int]:
        mark_launch(folder, command[command.index("--launch-id") + 1])
        do(next(count))
        return {1}

    monkeypatch.setattr("disco_ds.launch.launcher.run_once", attempt)
    config = load_config(folder.parents[1] / "tiny.yaml")
    path = str(folder.parents[1] / "tiny.yaml")
    args = parse_args(["launch", "--config", path, "--restarts", "9", *arguments])
    return supervise(args, config, {}, SimpleNamespace(count=0))


def test_run_resumed_by_a_relative_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere" / "tiny"
    folder.mkdir(parents=True)
    recipe(tmp_path)
    monkeypatch.chdir(folder)
    code = supervise_with(
        folder, monkeypatch, lambda number: (folder / FINISHED).touch(), "--resume", "."
    )
    assert code == 0


def test_checkpoint_written_again_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts 0 to 5 write the checkpoint of the same step again. The following attempts write nothing."""
    recipe(tmp_path)
    folder = tmp_path / "runs" / "tiny"
    meta = folder / CHECKPOINTS / "step-00000002" / META
    meta.parent.mkdir(parents=True)
    seen = []

    def write(number: int) -> None:
        seen.append(number)
        if number < 6:
            meta.write_text("{}")
            os.utime(meta, (number, number))

    assert supervise_with(folder, monkeypatch, write) == 1
    assert seen == list(range(8))
