"""`disco-ds launch` with real processes: what is left behind, what is started again, and what counts as done."""

from __future__ import annotations

import json
import os
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

from disco_ds.cli.launch import Signals, find_run, judge, newest_checkpoint, run_once
from disco_ds.cli.parser import parse_args
from disco_ds.config import load_config
from disco_ds.data import resolve_shards
from disco_ds.distributed.slurm import adopt_slurm
from disco_ds.metrics.run_folder import CHANGES, CHECKPOINTS, CONFIG, FINISHED, LAUNCHED, mark_launch
from disco_ds.training.retention import META
from helpers.checkpoints import flip
from helpers.cluster import cluster_launch, marked, of_the_run, tool, words
from helpers.dist import free_port, run_ranks
from helpers.launched import (
    CASES,
    SAME,
    _launcher,
    alone,
    equal_checkpoints,
    members,
    ranks_of,
    records,
    train_without_launcher,
    wait_for,
    write_recipe,
)
from helpers.towers import BPE_SIZE, write_tiny

LOST_AFTER_S = 10
STEPS = 60

# Parts


RANK = "import time; time.sleep(100)"
FRONT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {rank!r}, "--local_rank=0", {word!r}], start_new_session={apart})
print({says!r}, file=sys.stderr, flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("says", "then", "apart", "codes"),
    [
        ("", "sys.exit(0)", True, {0}),
        ("pdsh@here: host-2: ssh exited with exit code 255", "import time; time.sleep(100)", False, {255}),
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
    """One that returns 0 while its ranks train on elsewhere, and one that waits for ever for a host that is gone.

    What is apart is found by its word, as on other hosts; what is not, such as ssh, by its group.
    """
    monkeypatch.setattr("disco_ds.cli.launch.NAMING_S", 1.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    handlers[signal.SIGUSR1] = signal.getsignal(signal.SIGUSR1)
    word = f"word-{os.getpid()}-{len(codes)}-{len(says)}"
    script = FRONT.format(rank=RANK, word=word if apart else f"{word}-not", says=says, then=then, apart=apart)
    start = time.monotonic()
    try:
        assert run_once([sys.executable, "-c", script], [], word, Signals(), patience_s=60) == codes
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert time.monotonic() - start < 15
    assert not [process for process in psutil.process_iter() if word in " ".join(words(process))]
    if says:
        assert f"{says}\ndisco-ds launch: host-2 is cut off\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("finished", "agreed", "codes", "code"),
    [
        (True, 1, {1, 247}, 0),  # what came after the last step is no failure of the run
        (False, 0, {0}, 1),
        (False, None, {0}, 1),  # deepspeed's answer to a launcher that was killed
        (False, 3, {1}, 3),
        (False, None, {2, 247}, 2),
        (False, None, {1, 3}, 3),
        (False, None, {-9}, 1),
        (None, None, {2}, 2),
    ],
)
def test_judge_looks_at_the_run_folder(
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
    "deep": b"[" * 100_000,
    "binary": b"\xff\xfe\x00",
}


def test_run_is_found_among_the_launch_files_of_other_programs(tmp_path: Path) -> None:
    for name, body in FOREIGN.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / LAUNCHED).write_bytes(body)
    (tmp_path / "folder" / LAUNCHED).mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / LAUNCHED)  # reading would wait for a writer
    assert find_run([tmp_path, tmp_path / "missing"], "our-word") == (None, None)
    for name, word, code in (("our", "our-word", 3), ("theirs", "another", 1)):
        (tmp_path / name).mkdir()
        mark_launch(tmp_path / name, word, code)
    assert find_run([tmp_path], "our-word") == (tmp_path / "our", 3)


def test_newest_checkpoint_is_the_last_complete_one(tmp_path: Path) -> None:
    assert newest_checkpoint(None) == newest_checkpoint(tmp_path) == ""
    for name in ("step-99999999", "step-100000000", "set-aside-step-200000000", ".step-300000000.removed"):
        (tmp_path / CHECKPOINTS / name).mkdir(parents=True)
        (tmp_path / CHECKPOINTS / name / META).touch()
    (tmp_path / CHECKPOINTS / "step-400000000").mkdir()
    assert newest_checkpoint(tmp_path) == "step-100000000"


@pytest.mark.parametrize(
    ("nodes", "lead"),
    [
        ("node003", "node003"),
        ("node[003-006,010]", "node003"),
        ("gpu[7,9],cpu[1-2]", "gpu7"),
        ("a1,b2", "a1"),
        ("rack[2-3]n[04-05].site", "rack2n04.site"),
        ("", "10.0.0.9"),
    ],
)
def test_sruns_variables_become_a_launchers(nodes: str, lead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"STEP_ID": "2", "JOB_ID": "4711", "PROCID": "13", "LOCALID": "5", "NTASKS": "16", "NODELIST": nodes}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (slurm | {"LAUNCH_NODE_IPADDR": "10.0.0.9"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with monkeypatch.context() as script:  # of a batch job: a task of no step
        script.delenv("SLURM_STEP_ID")
        adopt_slurm()
        assert "RANK" not in os.environ
    monkeypatch.setenv("RANK", "")  # so that all are taken back
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK")
    adopt_slurm()
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    assert found == ["13", "16", "5", lead, str(12_000 + 471_102 % 20_000)]
    # A task that sees one GPU of its own has no sixth.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    adopt_slurm()
    assert os.environ["LOCAL_RANK"] == "0"


# One host


def command(arguments: list[str], *more: str) -> list[str]:
    front = f"--num_accelerators 2 --master_port {free_port()}"
    return [sys.executable, "-m", "disco_ds", "launch", "--deepspeed", front, *more, *arguments]


@contextmanager
def launched(arguments: list[str], folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Everything it starts has a marker in its environment; yields the wrapper."""
    name = f"DISCO_TEST_{free_port()}"
    with (folder / "log.txt").open("ab") as log:
        options: dict[str, Any] = {"cwd": folder, "env": alone() | {name: "1"}, "stdout": log, "stderr": log}
        process = subprocess.Popen(command(arguments, *more), start_new_session=True, **options)
    process.marker = name  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        for left in marked(name):
            left.kill()
        process.wait()


def deepspeed_session(process: Any, folder: Path) -> int:
    """The session of the front end that is running."""

    def find() -> int | None:
        return next((p.pid for p in marked(process.marker) if "deepspeed.launcher.runner" in p.cmdline()), None)

    return wait_for(find, "deepspeed", folder)


def same_as_uninterrupted(run: Path, whole: Path) -> None:
    for mine, other in zip(records(run), records(whole), strict=True):
        assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]
    last = f"{CHECKPOINTS}/step-{records(whole)[-1]['step']:08d}"
    equal_checkpoints(run / last, whole / last)


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    arguments = [*write_recipe(folder, CASES["zero1-fp32"]), f"steps={STEPS}", "checkpoint.every_steps=5"]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = folder / "runs" / "cut"
    with launched([*arguments, "name=cut"], folder, "--restarts", "1") as process:
        wait_for(lambda: any(record["step"] >= 15 for record in records(run)), "step 15", folder)
        ranks_of(deepspeed_session(process, folder))[1].kill()
        assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
        assert not marked(process.marker)  # type: ignore[attr-defined]
    assert re.search(r"launch: restart 1 of 1, from runs/cut, step-000000\d\d", log_of(folder))
    same_as_uninterrupted(run, folder / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_launch_goes_on_before_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Flipped while it is the newest one of a run that is killed: what restarts it is left to itself."""
    folder = tmp_path / "run"
    arguments = [*write_recipe(folder, CASES["zero1-fp32"]), "steps=30", "checkpoint.every_steps=10"]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = folder / "runs" / "cut"
    newest = run / CHECKPOINTS / "step-00000020"
    with launched([*arguments, "name=cut"], folder, "--restarts", "1") as process:
        wait_for(newest.exists, "step 20", folder, poll_s=0.005)
        flip(max((newest / "engine").iterdir(), key=lambda file: file.stat().st_size))
        ranks_of(deepspeed_session(process, folder))[1].kill()
        assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
    log = log_of(folder)
    assert "launch: restart 1 of 1, from runs/cut, step-00000020" in log
    assert re.search(r"step-00000020 is damaged: engine/.*; trying the one before it, step-00000010", log)
    assert "runs/cut/checkpoints/step-00000020 is set aside as set-aside-step-00000020" in log
    same_as_uninterrupted(run, folder / "runs" / "whole")
    assert (run / CHECKPOINTS / "set-aside-step-00000020").is_dir()


VICTIMS = ("wrapper", "wrapper, killed", "front end", "launcher", "rank", "data worker")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", VICTIMS)
def test_signal_to_any_process_leaves_no_orphan(victim: str, tmp_path: Path) -> None:
    """SIGTERM, but for the wrapper's own SIGKILL."""
    folder = tmp_path / "run"
    arguments = [*write_recipe(folder, CASES["zero1-fp32"]), "steps=20000", "checkpoint.every_steps=0"]
    run = folder / "runs" / "tiny"
    with launched(arguments, folder) as process:
        wait_for(lambda: len(records(run)) > 3, "step 4", folder)
        session = deepspeed_session(process, folder)
        rank = ranks_of(session)[1]
        targets = {"wrapper": psutil.Process(process.pid), "front end": psutil.Process(session)}
        targets |= {"launcher": _launcher(session), "rank": rank, "data worker": rank.children(recursive=True)[-1]}
        if victim == "data worker":  # it holds the signal back: its trainer ends it
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
        end_s = 20 if victim == "wrapper, killed" else 5  # there nobody waits for them
        mark = process.marker  # type: ignore[attr-defined]
        wait_for(lambda: not marked(mark) and not members(session), "every process to end", folder, end_s)
    print(f"signal to {victim}: exit code {code} after {took:.1f} s")
    saved = list((run / CHECKPOINTS).glob("step-*"))
    # DeepSpeed's front end ends at a signal, and its ranks with it; else the ranks save.
    expected = {"front end": (1, 0), "wrapper, killed": (-signal.SIGKILL, 0)}.get(victim, (3, 1))
    assert (code, len(saved)) == expected, log_of(folder)[-3000:]
    assert took < 30


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mistakes_are_told_once_and_not_restarted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    for given, said in (
        (["lr=1"], "unknown key lr"),
        (["--hostfile", "missing"], "no hostfile missing"),
        (["data.shards=missing"], "missing"),  # the ranks' own
    ):
        with launched([*arguments, *given], folder, "--restarts", "5") as process:
            assert process.wait(timeout=100) == 2, log_of(folder)
        assert said in log_of(folder)
    assert "restart 1" not in log_of(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_of_srun_are_the_ranks_of_one_run(tmp_path: Path) -> None:
    """srun emulated: what it sets, and nothing else."""
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "disco_ds.train", *write_recipe(folder, CASES["zero1-fp32"]), "steps=2"]
    step = {"STEP_ID": "0", "JOB_ID": str(free_port()), "NTASKS": "2", "NODELIST": "localhost"}
    tasks = []
    with (folder / "log.txt").open("ab") as log:
        for number in range(2):
            mine = {f"SLURM_{name}": value for name, value in step.items()}
            mine |= {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            tasks.append(subprocess.Popen(words, cwd=folder, env=alone() | mine, stdout=log, stderr=log))
    try:
        assert [task.wait(timeout=200) for task in tasks] == [0, 0], log_of(folder)[-3000:]
    finally:
        for task in tasks:
            task.kill()
    assert log_of(folder).count("global batch 16 = 2 ranks x") == 1
    assert (folder / "runs" / "tiny" / FINISHED).exists()


# Two hosts


def rank_on(name: str, host: str) -> psutil.Process:
    number = str(int(host.removeprefix("host-")) - 1)
    found = [p for p in of_the_run(name) if p.environ().get("RANK") == number and "disco_ds.train" in words(p)]
    return min(found, key=lambda p: p.create_time())


def fault(kind: str, cluster: Any, name: str) -> None:
    if kind == "killed":
        rank_on(name, "host-2").kill()
    else:
        cluster.run(["ip", "link", "set", "port-2", "down"], "switch")


def cluster_recipe(folder: Path) -> list[str]:
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    return [*arguments, f"steps={STEPS}", "checkpoint.every_steps=5", f"lost_after_s={LOST_AFTER_S}"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overrides_arrive_on_both_hosts_as_typed(tmp_path: Path, possible: None, marker: str) -> None:
    folder = tmp_path / "run"
    _, name = write_recipe(folder, CASES["zero1-fp32"])
    recipe = f"a $HOME's {{1,2}} {name}"
    (folder / name).rename(folder / recipe)
    typed = [
        "data.shards=" + str(resolve_shards("bundled:emoji/unseen")) + "/{00000..00001}.tar",
        "data.captions={'{json[caption]}':1,\"{txt}\":2e-1}",
        "eval.caption_key=$(touch ran) `touch ran` $HOME ~ * ? %h %n %% {a,b}",
        "eval.label_key=x;touch ran&touch ran|cat>ran<ran#! \\ \\n''\"{a,b}",
        "name=Füße 猫",
    ]
    run = folder / "runs" / "Füße 猫"
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=550) as cluster:
        with cluster_launch(cluster, folder, "--config", recipe, *typed, f"steps={STEPS}") as process:
            wait_for(lambda: records(run) or process.poll() is not None, "the first step", folder)
            for host in ("host-1", "host-2"):
                command = words(rank_on(marker, host))
                got = parse_args(["train", *command[command.index("disco_ds.train") + 1 :]])
                assert (got.config, got.overrides) == (recipe, [*typed, f"steps={STEPS}"]), host
            assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
        settings = load_config(run / CONFIG)
        assert settings == load_config(folder / recipe, [*typed, f"steps={STEPS}"])
        assert not (folder / "ran").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["killed", "cut"])
def test_lost_host_ends_the_launch_and_the_run_goes_on(
    kind: str,
    tmp_path: Path,
    possible: None,
    marker: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    arguments = cluster_recipe(folder)
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    arguments, run = [*arguments, "name=cut"], folder / "runs" / "cut"
    times = {}
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=1100) as cluster:
        # The hosts' own keep-alives are away: the launch has to bring its own.
        cluster.run(["sed", "-i", "/ServerAlive/d", "/etc/ssh/ssh_config"])
        with cluster_launch(cluster, folder, *arguments) as process:
            wait_for(lambda: any(record["step"] >= 15 for record in records(run)), "step 15", folder)
            start = time.monotonic()
            fault(kind, cluster, marker)
            named = "error on host-1: rank 0 stops: rank 1 on host-2 (last step "
            wait_for(lambda: named in log_of(folder), "the lost rank's name", folder, LOST_AFTER_S + 10)
            times["named"] = time.monotonic() - start
            assert process.wait(timeout=60) == 1
            times["returned"] = time.monotonic() - start
            wait_for(lambda: not of_the_run(marker), "every process to end", folder, 20)
            times["nothing left"] = time.monotonic() - start
        assert max(times.values()) < 30, times
        cluster.run(["ip", "link", "set", "port-2", "up"], "switch")
        with cluster_launch(cluster, folder, *arguments, "--resume", "latest", "--restarts", "1") as process:
            wait_for(lambda: any(record["step"] >= 35 for record in records(run)), "step 35", folder)
            start = time.monotonic()
            fault(kind, cluster, marker)
            if kind == "cut":
                wait_for(lambda: "launch: waiting for host-2" in log_of(folder), "the wait", folder, 60)
                cluster.run(["ip", "link", "set", "port-2", "up"], "switch")
            wait_for(lambda: "launch: restart 1 of 1, from runs/cut, step-000000" in log_of(folder), "it", folder, 60)
            times["restarted"] = time.monotonic() - start
            assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
            assert not of_the_run(marker)
    with capsys.disabled():
        print(f"\nhost-2 {kind}: " + ", ".join(f"{what} after {took:.1f} s" for what, took in times.items()))
    same_as_uninterrupted(run, folder / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("returns", [False, True], ids=["for good", "returns"])
def test_run_goes_on_without_a_lost_host(
    returns: bool, tmp_path: Path, possible: None, marker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three hosts have the same samples and losses, in three micro-batches of a rank instead of two."""
    folder = tmp_path / "run"
    arguments = [*cluster_recipe(folder), "global_batch=24", "data.slots=6"]
    arguments.append(f"model.name={write_tiny(folder, BPE_SIZE)}")  # without dropout, whose draws differ by the ranks
    run_ranks(train_without_launcher, 3, folder, [*arguments, "name=whole"])
    arguments, run = [*arguments, "ranks=3", "name=cut"], folder / "runs" / "cut"
    arguments += ["--restarts", "2", "--min-hosts", "2", "--patience", str(LOST_AFTER_S)]
    times = {}
    with (
        tool.LocalCluster(hosts=3, slots=1, timeout_s=850) as cluster,
        cluster_launch(cluster, folder, *arguments) as process,
    ):
        wait_for(lambda: any(record["step"] >= 15 for record in records(run)), "step 15", folder)
        start = time.monotonic()
        cluster.run(["ip", "link", "set", "port-3", "down"], "switch")
        if not returns:
            cluster.holders["host-3"].kill()
        left_out = "launch: going on with 2 of 3 hosts: host-3 does not answer"
        wait_for(lambda: left_out in log_of(folder), "host-3 to be left out", folder, 90)
        times["restarted"] = time.monotonic() - start
        last = records(run)[-1]["step"]
        wait_for(lambda: records(run)[-1]["step"] > last, "a step of two hosts", folder, 90)
        times["trained on"] = time.monotonic() - start
        if returns:
            cluster.run(["ip", "link", "set", "port-3", "up"], "switch")
            wait_for(lambda: records(run)[-1]["step"] >= last + 11, "a checkpoint of two hosts", folder, 90)
            rank_on(marker, "host-2").kill()
        assert process.wait(timeout=300) == 0, log_of(folder)[-3000:]
        wait_for(lambda: not of_the_run(marker), "every process to end", folder, 20)
    ranks = re.findall(r"global batch 24 = (\d) ranks x 4 micro-batch x (\d) ", log_of(folder))
    assert ranks == [("3", "2"), ("2", "3"), *([("3", "2")] if returns else [])]
    changes = [json.loads(line) for line in (run / CHANGES).read_text().splitlines()]
    assert [(change["setting"], change["new"]) for change in changes] == [("ranks", int(n)) for n, _ in ranks[1:]]
    pairs = list(zip(records(run), records(folder / "runs" / "whole"), strict=True))
    assert all((mine["step"], mine["ids"]) == (other["step"], other["ids"]) for mine, other in pairs)
    off = max(abs(mine["loss"] - other["loss"]) for mine, other in pairs)
    with capsys.disabled():
        took = ", ".join(f"{what} after {seconds:.1f} s" for what, seconds in times.items())
        print(f"\nhost-3 lost: {took}; losses differ by {off:.1e} at most")
    assert off < 1e-5
