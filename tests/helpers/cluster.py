"""Simulate several hosts on this machine, and find processes by a marker in their environment."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.dist import free_port
from tools.check import local_cluster as tool


def marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.environ() and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of an environment variable that all processes of a test inherit, and check that all have ended."""
    name = f"DISCO_TEST_{uuid.uuid4().hex}"
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    # DeepSpeed passes variables that begin with PYTHON to the other hosts.
    for key, value in {
        f"PYTHON_{name}": "1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }.items():
        monkeypatch.setenv(key, value)
    yield f"PYTHON_{name}"
    monkeypatch.delenv(f"PYTHON_{name}")
    left = marked(f"PYTHON_{name}")
    for process in left:
        process.kill()
    assert not left


@pytest.fixture
def possible() -> None:
    """Skip the test if hosts cannot be simulated here."""
    if problem := tool.describe_missing():
        pytest.skip(problem)


@contextmanager
def cluster_launch(
    cluster: Any, folder: Path, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `disco-ds launch` on the first host, for all hosts. Its output goes to log.txt."""
    front = ["--hostfile", str(tool.HOSTFILE), "--deepspeed", f"--master_port {free_port()}"]
    with (folder / "log.txt").open("ab") as log:
        words = [sys.executable, "-m", "disco_ds", "launch", *front, *arguments]
        process = cluster.start(
            words, folder=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def of_the_run(name: str) -> list[psutil.Process]:
    """Return the processes of a launch on all hosts, found by the marker `name`.

    These are launchers, ranks, data workers, and the clients of ssh, but not sshd.
    """
    kinds = ("disco_ds", "deepspeed", "multiprocessing", "pdsh")
    return [
        process
        for process in marked(name)
        if any(kind in " ".join(words(process)) for kind in kinds)
    ]


def words(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or [] if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
