"""`disco-ds doctor` on two simulated hosts that are first equal and then different."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import disco_ds
from helpers.dist import free_port
from tools.check import local_cluster as tool

RECIPE = ["--config", "quickstart", "data.prefetch=64", "ranks=2"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Any:
    if problem := tool.describe_missing():
        pytest.skip(problem)
    with tool.LocalCluster(hosts=2, slots=1, timeout_s=850) as hosts:
        yield hosts


def ask_doctor(cluster: Any, folder: Path, *arguments: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(tool.HOSTFILE)]
    command += ["--master_port", str(free_port()), "--module", "disco_ds.doctor", *RECIPE]
    process = cluster.start(
        [*command, *arguments],
        folder=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    told, _ = process.communicate(timeout=300)
    return process.returncode, told


def test_two_equal_hosts_pass_and_what_differs_is_named(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(disco_ds.__file__).parent
    work = tmp_path / "work"
    (work / "runs").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, told = ask_doctor(cluster, work, "--gradients")
    assert code == 0, told
    for words in ("hosts           same settings and code", "gradients"):
        assert f"ok    {words}" in told, told

    (tmp_path / "other.py").write_text(f"{(package / '__init__.py').read_text()}\n# older\n")
    for command, expected in (
        (f"mount --bind {tmp_path}/other.py {package}/__init__.py", "different code"),
        (f"umount {package}/__init__.py; mount -t tmpfs tmpfs {work}/runs", "(rank 1) on host-2: "),
    ):
        cluster.run(["sh", "-ec", command], "host-2")
        code, told = ask_doctor(cluster, work)
        assert code == 1, told
        (line,) = [line for line in told.splitlines() if "fail  hosts" in line]
        found = told[told.index(line) :]
        assert expected in found, told
        assert "on host-2" in found, told
