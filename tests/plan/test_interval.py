"""The planned interval between saves: against a simulated job, and against the checkpoints that runs write."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from disco_ds.config.load import load_config
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.interval import SaveInterval, plan_interval
from disco_ds.plan.memory import count_checkpoint
from disco_ds.plan.towers import Towers, trace
from disco_ds.run import run_training
from helpers.tiny_run import recipe
from helpers.towers import tiny_config, write_tiny

M = 10**6
TOWERS = Towers(*[0] * 6, trained=150 * M, frozen=50 * M, largest=M, width=512, sample=1)
ZERO1 = {"zero_optimization": {"stage": 1}}


def lost_in_a_job(every_s: float, stall_s: float, lag_s: float, failure_s: float) -> float:
    """Of a simulated job whose failures come at random: the fraction of the time in which no new step was kept."""
    draw = random.Random(0)
    kept = time = 0.0
    for _ in range(20_000):
        until = draw.expovariate(1 / failure_s)
        kept += max(until - lag_s, 0) // (every_s + stall_s) * every_s
        time += until
    return 1 - kept / time


def interval(folder: Path, asynchronous: bool, **assumed: float) -> SaveInterval:
    config = tiny_config(write_tiny(folder), ZERO1, checkpoint__asynchronous=asynchronous)
    return plan_interval(config, 8, TOWERS, Assumptions(**assumed))


@pytest.mark.parametrize(("failure_hours", "save_rate"), [(24, 1.0), (2, 0.2)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_interval_loses_least_in_a_simulated_job(asynchronous, failure_hours, save_rate, tmp_path):
    found = interval(tmp_path, asynchronous, save_rate=save_rate, copy_rate=0.05, failure_hours=failure_hours)
    lag_s = found.write_s if asynchronous else 0.0
    lost = {k: lost_in_a_job(k * found.every_s, found.stall_s, lag_s, 3600 * failure_hours) for k in (0.4, 1, 2.5)}
    assert lost[1] < min(lost[0.4], lost[2.5])
    assert lost[1] == pytest.approx(found.lost, rel=0.2)


def test_interval_is_no_shorter_than_a_save(tmp_path):
    assert interval(tmp_path, asynchronous=False, save_rate=1e-9, failure_hours=1).every_s > 3600
    found = interval(tmp_path, asynchronous=True, save_rate=1e-3, failure_hours=1)
    assert found.every_s == found.write_s > 20 * found.stall_s


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_size_is_that_of_a_checkpoint(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe(tmp_path, deepspeed={"zero_optimization": {"stage": stage}}, steps=1))
    folder = run_training(config)
    written = sum(path.stat().st_size for path in (folder / "checkpoints" / "step-00000001" / "engine").iterdir())
    assert sum(count_checkpoint(config, trace(config, config.micro_batch))) == pytest.approx(written, rel=0.1)
