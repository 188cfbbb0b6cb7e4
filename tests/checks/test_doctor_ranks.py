"""The doctor on several hosts and ranks: the hosts, the step and the bandwidth."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from disco_ds.checks import Line
from disco_ds.checks.hosts import check_hosts, judge, probe
from disco_ds.checks.ranks import check_gradients, run_alone, shrink
from disco_ds.cli.main import main
from disco_ds.config import Config
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput, list_losses
from disco_ds.losses.base import Loss, register_loss
from helpers.dist import free_port, run_ranks
from helpers.doctor import statuses
from helpers.minimal import MINIMAL, settings
from helpers.precisions import MATRIX, ds_config

# Hosts


@pytest.fixture
def own_report(tmp_path: Path) -> dict[str, Any]:
    token = tmp_path / "token"
    token.touch()
    return probe(token)


def test_hosts_without_ssh_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("no ssh here")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", f"-p {free_port()} -o StrictHostKeyChecking=no")
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    Path("recipe.yaml").write_text(yaml.safe_dump(MINIMAL))
    Path("hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    assert main(["doctor", "--config", "recipe.yaml", "--hostfile", "hosts"]) == 1
    told = capsys.readouterr().out
    assert "fail  ssh             127.0.0.1: ssh: connect to host 127.0.0.1 port" in told
    assert "fail  ssh             localhost: ssh: connect to host localhost port" in told
    assert told.count("Connection refused (exit code 255)") == 2
    assert not list(tmp_path.glob(".shared-*"))
    Path("hosts").write_text("127.0.0.1 slot=1\n")
    assert main(["doctor", "--config", "recipe.yaml", "--hostfile", "hosts"]) == 1
    assert (
        "fail  recipe          hosts, line 1: expected `host slots=GPUs`, got '127.0.0.1 slot=1'"
        in capsys.readouterr().out
    )


SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ "$1" = lost ] && echo "ssh: no route to $1" >&2 && exit 255
echo "Welcome to $1"
cd / && exec sh -c "$2"
"""
"""Runs the command on this host, as after a login that prints a line."""


def test_hosts_report_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines = list(check_hosts(tmp_path / "runs", {"answers": 1, "lost": 1}))
    failed = [line.found for line in lines if line.check == "ssh" and line.status == "fail"]
    assert [found for found in failed if "pdsh" not in found] == [
        "lost: ssh: no route to lost (exit code 255)"
    ]
    assert "fail" not in [line.status for line in lines if line.check != "ssh"]
    assert [path.name for path in tmp_path.iterdir()] == ["ssh"], "the token is removed"


def test_report_of_a_host_is_compared_with_this_one(own_report: dict[str, Any]) -> None:
    """A real report, with the GPUs and the driver of another machine."""
    own_report["disk"] = 1e12

    def lines(
        mine: dict[str, Any] | None = None, slots: int = 2, **changes: Any
    ) -> list[tuple[str, str]]:
        return statuses(list(judge("host", own_report | changes, own_report | (mine or {}), slots)))

    assert lines() == [("warn", "GPUs")]
    assert lines(devices=2) == []
    assert lines(devices=1, mine={"devices": 2}) == [("fail", "GPUs")]
    assert lines(driver=True) == [("fail", "GPUs")]
    assert lines(devices=2, disk=1e9) == [("warn", "runs folder")]


# The ranks: the step and the bandwidth


class Local(Loss):
    """InfoNCE without gathering: each rank contrasts its own pairs only."""

    def forward(self, embeddings: Embeddings) -> LossOutput:
        logits = embeddings.scale * embeddings.image @ embeddings.text.T
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return LossOutput(loss, {"loss": comm.all_reduce_sum(loss) / comm.size()})


def small_settings(loss: str, given: dict[str, Any], ranks: int, micro_batches: int) -> Config:
    shape = {"micro_batch": 64, "global_batch": 64 * ranks * micro_batches}
    two_views = (
        {"model": {"two_views": True}, "data": {"augment": {"zoom": 0.1}}}
        if loss == "nt_xent"
        else {}
    )
    return shrink(settings(loss={"name": loss}, deepspeed=given, **shape, **two_views), ranks)


Case = tuple[str, dict[str, Any], int]
"""Loss, ds_config, micro-batches."""


def alone(cases: list[Case], ranks: int) -> bytes:
    """Compute the references, pickled: torch would pass tensors in files that end with this process."""
    register_loss("local")(Local)
    return pickle.dumps(
        [run_alone(small_settings(loss, given, ranks, count)) for loss, given, count in cases]
    )


def on_ranks(cases: list[Case], answers: bytes) -> list[Line]:
    register_loss("local")(Local)
    lines = []
    for (loss, given, count), answer in zip(cases, pickle.loads(answers), strict=True):
        lines += check_gradients(small_settings(loss, given, comm.size(), count), answer)
    return lines


def judge_steps(cases: list[Case], ranks: int = 2) -> list[Line]:
    (answers,) = run_ranks(alone, 1, cases, ranks)
    return run_ranks(on_ranks, ranks, cases, answers)[0]


def test_loss_without_gathering_is_found_by_its_gradient() -> None:
    right, wrong = judge_steps(
        [("disco", ds_config("fp32", 1), 2), ("local", ds_config("fp32", 1), 1)]
    )
    assert right.status == "ok"
    assert right.found.endswith("allowed 1.0e-05; disco, ranks 2, micro-batches 2, ZeRO 1, fp32")
    assert wrong.status == "fail"
    assert float(wrong.found.removeprefix("relative error ").split()[0]) > 0.01


@pytest.mark.slow
def test_step_of_every_precision_and_stage_is_right_and_a_wrong_loss_is_not() -> None:
    lines = judge_steps(
        [
            case
            for pair in MATRIX
            for case in (("disco", ds_config(*pair), 2), ("local", ds_config(*pair), 1))
        ]
    )
    assert [line.status for line in lines] == ["ok", "fail"] * len(MATRIX), lines


@pytest.mark.slow
def test_step_of_every_loss_is_right() -> None:
    lines = judge_steps([(name, ds_config("fp32", 1), 2) for name in list_losses()])
    assert [line.status for line in lines] == ["ok"] * len(list_losses()), lines


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_doctor_under_a_launcher_checks_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ports = ["--master_port", str(free_port())]
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", *ports]
    command += ["--module", "disco_ds.doctor", "--config", "quickstart", "--gradients"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "ok    gradients",
        "ok    bandwidth",
        "ok    samples",
    ):
        assert done.stdout.count(words) == 1
    assert not list(tmp_path.iterdir())
