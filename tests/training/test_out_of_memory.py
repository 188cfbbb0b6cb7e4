"""Runs that run out of GPU memory: the message and the exit code of each rank."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.cli.main import main
from disco_ds.distributed import comm
from disco_ds.distributed.comm import is_out_of_memory
from helpers.dist import become_rank, start_ranks
from helpers.tiny_run import expect, recipe

TEXT = (
    "CUDA out of memory. Tried to allocate 900.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
NAMED = f"on {socket.gethostname()}"


def enter(
    number: int, port: int, folder: Path, path: Path, phase: str, faulty: tuple[int, ...]
) -> None:
    """Run one rank. The ranks in `faulty` run out of memory in this phase of the second step, or in the evaluation."""
    become_rank(number, port, folder / f"{phase}-{number}.log")
    calls = 0

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(TEXT)

    def before_forward(module: Any, arguments: Any) -> None:
        nonlocal calls
        if type(module).__name__ != "VisionTransformer" or number not in faulty:
            return
        if not module.training and phase == "evaluating" and calls:
            fail()
        calls += module.training
        if calls == 5 and phase == "forward":
            fail()
        if calls == 6 and phase == "backward and update":
            arguments[0].requires_grad_().register_hook(fail)

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    sys.exit(
        main(
            [
                "train",
                "--config",
                str(path),
                f"name={phase.split()[0]}",
                "global_batch=16",
                "lost_after_s=20",
            ]
        )
    )


def run_out(folder: Path, phase: str, faulty: tuple[int, ...]) -> list[str]:
    """Run two ranks, of which those in `faulty` run out of memory in this phase. Return the output of each rank."""
    with start_ranks(enter, 2, folder, folder / "tiny.yaml", phase, faulty) as ranks:
        for process in ranks:
            process.join(300)
        logs = [(folder / f"{phase}-{number}.log").read_text() for number in range(2)]
        assert [process.exitcode for process in ranks] == [1, 1], logs
    assert not any("Traceback" in logs[number] for number in faulty), logs
    return logs


def test_rank_without_memory_explains_and_the_others_name_it(tmp_path):
    recipe(tmp_path)
    other, told = run_out(tmp_path, "forward", (1,))
    expect(
        told,
        f"error {NAMED}: rank 1 is out of memory in forward: CUDA out of memory. Tried to allocate 900.00 GiB.",
    )
    expect(told, "disco-ds plan --config NAME --ranks 2")
    expect(
        other,
        f"rank 0 stops: rank 1 {NAMED} (last step 1, forward) failed: OutOfMemoryError: out of memory in forward",
    )


@pytest.mark.slow
def test_every_rank_without_memory_says_so(tmp_path):
    recipe(tmp_path)
    logs = run_out(tmp_path, "backward and update", (0, 1))
    for number, log in enumerate(logs):
        expect(
            log,
            f"error {NAMED}: rank {number} is out of memory in backward and update: CUDA out of memory.",
        )


@pytest.mark.slow
def test_out_of_memory_in_evaluation_is_told(tmp_path):
    recipe(tmp_path, eval={"labeled": {"unseen": "bundled:emoji/unseen"}})
    other, told = run_out(tmp_path, "evaluating", (1,))
    expect(told, "rank 1 is out of memory in evaluating: ")
    expect(other, f"rank 1 {NAMED} (last step 4, evaluating) failed: OutOfMemoryError")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        torch.distributed.DistBackendError(
            "NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"
        ),
    ],
)
def test_libraries_own_texts_are_understood(error):
    assert is_out_of_memory(error)
    assert not comm.is_communication_error(error)
