"""`disco-ds doctor` on several hosts and ranks: the comparison of the hosts, and the trial step."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from disco_ds.checks.hosts import check_host
from disco_ds.checks.ranks import check_gradients, run_alone, shrink
from disco_ds.checks.report import Line
from disco_ds.config import Config
from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, LossOutput, list_losses
from disco_ds.losses.base import Loss, register_loss
from helpers.dist import free_port, run_ranks
from helpers.minimal import settings
from helpers.precisions import MATRIX, ds_config

# Hosts


def test_disk_and_driver_of_this_host_are_checked(tmp_path: Path) -> None:
    runs, gpus = check_host(tmp_path / "not" / "yet")
    assert (runs.check, gpus.check) == ("runs folder", "GPUs")
    assert runs.found.startswith(f"{tmp_path}, ")
    if torch.accelerator.device_count() == 0 and not Path("/proc/driver/nvidia").exists():
        assert gpus.status == "warn"
    assert not list(tmp_path.iterdir())


# The step


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
    """Compute the reference of each case, and pickle them.

    Without pickling, torch would pass tensors through shared memory that ends with this process.
    """
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
    assert right.found.endswith(
        "allowed 1.0e-05, the rounding of towers in fp32 and the loss in fp32; disco, ranks 2, micro-batches 2, ZeRO 1"
    )
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
@pytest.mark.timeout(900)
def test_doctor_under_a_launcher_checks_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ports = ["--master_port", str(free_port())]
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", *ports]
    command += ["--module", "disco_ds.doctor", "--config", "quickstart", "--gradients"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "ok    gradients",
        "ok    hosts",
        "ok    samples",
    ):
        assert done.stdout.count(words) == 1
    assert not list(tmp_path.iterdir())
