"""Heartbeats in training and in an evaluation: the error names the lost rank and the phase in which it was lost."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.cli.main import main
from disco_ds.config import ModelSettings
from disco_ds.models.clip import build_model
from helpers.dist import become_rank, start_ranks
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, write_tiny
from helpers.trained import write_run
from helpers.waiting import sleep_for_ever


def hang_in_forward(number: int, port: int, folder: Path, path: Path) -> None:
    """Run one rank of a real training in which one rank hangs in the second step."""
    become_rank(number, port, folder / f"{number}.log")
    calls = 0

    def before_forward(module: Any, arguments: Any) -> None:
        nonlocal calls
        if type(module).__name__ == "VisionTransformer" and number == 1:
            calls += 1
            # This is in step 2: each step calls the tower three times, because it repeats one of two micro-batches.
            if calls == 5:
                sleep_for_ever()

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    sys.exit(main(["train", "--config", str(path), "timeout_s=20"]))


def die_in_evaluation(number: int, port: int, folder: Path, model: Path) -> None:
    """Run one rank of an evaluation in which one rank is killed."""
    become_rank(number, port, folder / f"{number}.log")

    def before_forward(module: Any, arguments: Any) -> None:
        if type(module).__name__ == "VisionTransformer" and number == 1:
            time.sleep(1.5)  # long enough that a heartbeat with the current progress is sent
            os.kill(os.getpid(), signal.SIGKILL)

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    sets = ["eval.labeled.unseen=bundled:emoji/unseen", "data.image_key=png", "lost_after_s=5"]
    sys.exit(main(["eval", str(model), *sets]))


@pytest.mark.slow
def test_rank_that_an_evaluation_loses_is_named(tmp_path: Path) -> None:
    name = write_tiny(tmp_path, BPE_SIZE)
    model = write_run(tmp_path / "run", build_model(ModelSettings(name=name)), name)
    with start_ranks(die_in_evaluation, 2, tmp_path, model) as ranks:
        for process in ranks:
            process.join(300)
        log = (tmp_path / "0.log").read_text()
        assert [process.exitcode for process in ranks] == [1, -signal.SIGKILL], log
    assert (
        f"rank 0 stops: rank 1 on {socket.gethostname()} (last step 0, evaluating) has sent no heartbeat"
        in log
    )


@pytest.mark.slow
def test_run_names_the_phase_in_which_a_rank_hangs(tmp_path: Path) -> None:
    with start_ranks(hang_in_forward, 2, tmp_path, recipe(tmp_path)) as ranks:
        for process in ranks:
            process.join(300)
        logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
        assert [process.exitcode for process in ranks] == [1, 1], logs
    for log in logs:
        assert f"for rank 1 on {socket.gethostname()} (last step 1, forward)" in log
    stacks = [
        (tmp_path / "runs" / "tiny" / "diagnostics" / f"stacks_rank_{number}.txt").read_text()
        for number in range(2)
    ]
    assert ["sleep_for_ever" in text for text in stacks] == [False, True]
