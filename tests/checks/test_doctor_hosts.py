"""The doctor on two simulated hosts, one of which is broken in several ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import disco_ds
from helpers.dist import free_port
from helpers.tool import load_tool

tool = load_tool("local_cluster")
BIN = Path(sys.executable).parent
RECIPE = ["--config", "quickstart", "data.prefetch=64", "ranks=2"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Any:
    if problem := tool.describe_missing():
        pytest.skip(problem)
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=850) as hosts:
        yield hosts


def ask_doctor(cluster: Any, folder: Path, *arguments: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "disco_ds",
        "doctor",
        "--hostfile",
        str(tool.HOSTFILE),
        *RECIPE,
        *arguments,
    ]
    process = cluster.start(
        command, folder=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process.wait(timeout=200), process.communicate()[0]


def test_two_equal_hosts_pass_and_what_differs_is_named(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(disco_ds.__file__).parent
    work = tmp_path / "work"
    (work / "runs").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    code, told = ask_doctor(cluster, work)
    assert code == 0, told
    for words in (
        "ssh             2 hosts answer",
        "environment ",
        "runs folder",
    ):
        assert f"ok    {words}" in told, told

    def breaks(command: str, *expected: str) -> None:
        cluster.run(["sh", "-ec", command], "host-2")
        code, told = ask_doctor(cluster, work)
        assert code == int(any(words.startswith("fail") for words in expected)), told
        for words in expected:
            assert words in told, told

    (tmp_path / "other.py").write_text(f"{(package / '__init__.py').read_text()}\n# older\n")
    breaks(
        f"mount --bind {tmp_path}/other.py {package}/__init__.py",
        "fail  environment     host-2: code ",
    )
    breaks(f"umount {package}/__init__.py", "ok    environment")
    breaks(
        f"mount -t tmpfs tmpfs {work}/runs", "fail  runs folder     host-2 does not see this host's"
    )
    breaks(f"umount {work}/runs", "ok    runs folder")
    breaks(f"mount -t tmpfs tmpfs {tmp_path}", "fail  ssh             host-2: ", "cd: ", "work")
    cluster.run(["ip", "link", "set", "port-2", "down"], tool.SWITCH)
    code, told = ask_doctor(cluster, work)
    assert code == 1
    assert "fail  ssh             host-2: ssh: connect to host host-2 port 22: " in told


def test_slow_link_is_a_warning_and_the_step_is_still_right(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(disco_ds.__file__).parent.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [
        str(BIN / "deepspeed"),
        "--hostfile",
        str(tool.HOSTFILE),
        "--master_port",
        str(free_port()),
    ]
    command += ["--module", "disco_ds.doctor", *RECIPE, "--gradients"]

    def launch() -> str:
        process = cluster.start(
            command, folder=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert "ok    settings        equal on 2 ranks" in said, said
        assert "ok    gradients" in said, said
        return said

    limited = [
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "400mbit",
        "burst",
        "256k",
        "latency",
        "400ms",
    ]
    try:
        cluster.run(limited, "host-2")
    except RuntimeError as error:
        pytest.skip(f"links cannot be made slow here: {error}")
    said = launch()
    assert "warn  bandwidth" in said
    assert "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME" in said
