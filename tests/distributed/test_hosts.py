"""Launches on several simulated hosts with DeepSpeed's launcher, pdsh and ssh; reading of hostfiles."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disco_ds.data import resolve_shards
from disco_ds.distributed import comm
from disco_ds.launch.hosts import read_hosts
from disco_ds.training.build import build, open_folder
from helpers.cluster import marked, tool
from helpers.dist import free_port, run_ranks
from helpers.launched import SAME, records
from helpers.minimal import settings
from helpers.paths import ROOT
from helpers.waiting import wait_for

BIN = Path(sys.executable).parent
QUICKSTART = ["--config", "quickstart", "samples=null", "global_batch=128", "micro_batch=64"]
QUICKSTART += [
    "optim.warmup_steps=5",
    "log.every_steps=1",
    "checkpoint.every_steps=0",
    "eval.labeled={}",
]


# Hostfiles and environment files


def test_hostfiles_are_read_by_deepspeed() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    read = {
        path.name: dict(fetch_hostfile(str(path)))
        for path in (ROOT / "hostfiles").iterdir()
        if "env" not in path.name
    }
    assert read == {
        "local": {"localhost": 8},
        "eight_a100.example": {"localhost": 8},
        "two_nodes.example": {"node-1": 8, "node-2": 8},
        "sixty_four_a100.example": {f"node-{number}": 8 for number in range(1, 9)},
    }


def test_deepspeed_env_example_is_what_deepspeed_reads_once_its_comments_are_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "hostfiles").symlink_to(ROOT / "hostfiles")
    example = tmp_path / "hostfiles" / "deepspeed_env.example"
    command = next(line for line in example.read_text().splitlines() if line.startswith("#   grep"))
    subprocess.run(command.lstrip("# "), shell=True, check=True, cwd=tmp_path)
    lines = (tmp_path / ".deepspeed_env").read_text().splitlines()
    assert len(lines) == 4
    assert all(re.fullmatch(r"[A-Z_]+=\S+", line) for line in lines)


def test_working_directory_that_the_launcher_cannot_change_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("one").write_text("localhost slots=4\n")
    Path("two").write_text("first slots=1\nsecond slots=1\n")
    assert read_hosts(Path("one"), "") == {}
    with pytest.raises(ValueError, match=r"working directory .*a folder'.*spaces"):
        read_hosts(Path("two"), "--include second")


# What must be the same on every host


def seen_by_some(folder: Path) -> None:
    """Build a run in working directories that differ between ranks, and in a common one."""
    rank = comm.rank()
    own = folder / f"host-{rank}"
    shards = own / "data"
    own.mkdir()
    os.chdir(own)
    if rank != 1:
        shards.symlink_to(resolve_shards("bundled:emoji/unseen"))
    with ExitStack() as stack, pytest.raises(ValueError) as caught:
        open_folder(settings(name="apart"), None, stack)
    assert "run folder runs/apart (rank 1): " in str(caught.value)
    assert "runs=/shared/runs" in str(caught.value)
    comm.barrier()
    assert not Path("runs/apart").exists()
    with (
        ExitStack() as stack,
        pytest.raises(ValueError, match=r"^data \(rank 1\): "),
    ):
        build(settings(global_batch=32, data={"source": "shards", "shards": "data"}), None, stack)
    os.chdir(folder)
    with ExitStack() as stack:
        assert open_folder(settings(name="shared"), None, stack) == Path("runs/shared")
        comm.barrier()
        assert [path.name for path in Path("runs/shared").iterdir()] == [".lock"]


def test_run_folder_that_is_not_shared_and_data_missing_on_one_rank_are_told_on_all(
    tmp_path: Path,
) -> None:
    run_ranks(seen_by_some, 2, tmp_path)


# Real launches


def front_end(hostfile: str, *arguments: str) -> list[str]:
    port = ["--master_port", str(free_port())]
    return [
        str(BIN / "deepspeed"),
        "--hostfile",
        hostfile,
        *port,
        "--module",
        "disco_ds.train",
        *arguments,
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_missing_or_malformed_hostfile_is_no_silent_local_run(tmp_path: Path, marker: str) -> None:
    def launch(hostfile: str, *overrides: str) -> tuple[int, str]:
        command = front_end(hostfile, "--config", "quickstart", *overrides)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert not (tmp_path / "runs").exists()
        return done.returncode, done.stderr

    texts = {
        "typo": "host slot=8",
        "spaced": "host slots = 8",
        "empty": "",
        "comments": "# host slots=8\n",
    }
    for name, text in (texts | {"twice": "host slots=1\nhost slots=2\n"}).items():
        (tmp_path / name).write_text(text)
        code, said = launch(name)
        assert code == 1
        assert "ValueError: Hostfile" in said
    # If the hostfile is missing, DeepSpeed only warns and would train on this host. `ranks` in the recipe prevents it.
    command = front_end("missing", "--config", "quickstart", "ranks=16")
    command[1:1] = ["--num_accelerators", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert (
        "the recipe expects 16 ranks, but this run has 1. Is the hostfile missing?" in done.stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hosts_train_as_one_and_their_mistakes_are_named(
    tmp_path: Path, possible: None, marker: str
) -> None:
    mounts = Path("/proc/mounts").read_text()

    def launch(*arguments: str) -> tuple[int, str]:
        command = front_end(str(tool.HOSTFILE), *QUICKSTART, "steps=20", *arguments)
        process = cluster.start(
            command, folder=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said, _ = process.communicate(timeout=300)
        return process.returncode, said

    with tool.LocalCluster(hosts=2, slots=1, timeout_s=850) as cluster:
        spaces = namespaces(cluster)
        assert cluster.run(["ssh", "host-2", "hostname"]) == "host-2\n"
        code, said = launch("name=two")
        assert code == 0, said
        assert "host-1: step 20/20" in said
        assert (tmp_path / "runs" / "two" / "finished.json").exists()

        # `deepspeed` passes overrides through the hosts' shells, which expand braces and $(hostname).
        code, said = launch("name=braces", "data.shards=/data/{00000..00003}.tar")
        assert code == 2
        assert "data.shards is given twice" in said
        code, said = launch("name=$(hostname)", "seed=1")
        assert code == 2
        assert 'name: "host-1" on host-1 (rank 0); "host-2" on host-2 (rank 1)\n' in said
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["two"]

        cluster.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "runs")], "host-2")
        code, said = launch("name=apart")
        assert code == 2
        assert "run folder runs/apart (rank 1) on host-2: " in said
        assert not (tmp_path / "runs" / "apart").exists()

        (tmp_path / "data").symlink_to(resolve_shards("bundled:emoji/train"))
        cluster.run(["mount", "-t", "tmpfs", "tmpfs", str((tmp_path / "data").resolve())], "host-2")
        code, said = launch("name=blind", f"data.shards={tmp_path}/data")
        assert code == 2
        assert "data (rank 1) on host-2: " in said

    assert not marked_namespaces(spaces)
    assert Path("/proc/mounts").read_text() == mounts
    command = [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", str(free_port())]
    command += ["--module", "disco_ds.train", *QUICKSTART, "steps=20", "name=one"]
    subprocess.run(command, cwd=tmp_path, timeout=300, check=True, capture_output=True)
    one, two = (
        [{key: record.get(key) for key in SAME} for record in records(tmp_path / "runs" / n)]
        for n in ("one", "two")
    )
    assert len(one) >= 20
    assert one == two, (
        "two hosts must give the same bits as one: the sum of two numbers does not depend on their order"
    )


def namespaces(cluster: Any) -> set[int]:
    kinds = ("net", "mnt", "uts", "pid_for_children")
    return {
        os.stat(f"/proc/{holder.pid}/ns/{kind}").st_ino
        for holder in cluster.holders.values()
        for kind in kinds
    }


def marked_namespaces(spaces: set[int]) -> list[str]:
    """Return the /proc entries of processes that still run in one of these namespaces."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        try:
            if link.stat().st_ino in spaces:
                found.append(str(link))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupt_ends_the_hosts_jobs_and_none_of_this_machine(
    tmp_path: Path, possible: None, marker: str
) -> None:
    """On Ctrl-C, DeepSpeed's front end kills processes by name, but must not reach processes outside of the hosts."""
    python = (BIN / "deepspeed").read_text().splitlines()[0].removeprefix("#!")
    job = ["bash", "-c", f"exec -a '{python} -u -m deepspeed.launcher.launch' sleep 500"]
    with tool.LocalCluster(timeout_s=550) as cluster, subprocess.Popen(job) as outside:
        inside = cluster.start(job, host="host-2")
        command = front_end(str(tool.HOSTFILE), *QUICKSTART, "steps=5000")
        with (tmp_path / "log").open("w") as log:
            process = cluster.start(
                command, folder=tmp_path, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: records(tmp_path / "runs" / "quickstart"))
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: inside.poll() is not None)
        process.wait(timeout=60)
        assert outside.poll() is None
        outside.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cluster_returns_the_commands_exit_code_and_leaves_nothing(
    possible: None, marker: str
) -> None:
    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(tool.__file__), *arguments], stdout=subprocess.PIPE, text=True
        )

    with start(
        "--hosts",
        "3",
        "--slots",
        "4",
        "--",
        "sh",
        "-c",
        f"cat {tool.HOSTFILE}; ssh host-3 hostname; exit 7",
    ) as done:
        assert (
            done.communicate(timeout=60)[0]
            == "host-1 slots=4\nhost-2 slots=4\nhost-3 slots=4\nhost-3\n"
        )
        assert done.returncode == 7
    with start("--timeout", "1", "--", "sleep", "200") as late:
        assert late.wait(timeout=60) == 124
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        # The command starts a daemon on the other host.
        with start(
            "--",
            "sh",
            "-c",
            f"ssh host-2 'export {marker}=1; setsid sleep 200 >/dev/null 2>&1 &'; echo up; sleep 200",
        ) as ended:
            assert ended.stdout is not None
            assert ended.stdout.readline() == "up\n"
            wait_for(
                lambda: (
                    sum(process.cmdline() == ["sleep", "200"] for process in marked(marker)) == 2
                ),
            )
            ended.send_signal(number)
            assert ended.wait(timeout=60) == code
        wait_for(lambda: not marked(marker), 60)  # less than the sleeps take
