"""The planned interval between saves: against a simulated job, and against the checkpoints that runs write."""

from __future__ import annotations

import random

import pytest

from disco_ds.config.load import load_config
from disco_ds.plan.interval import count_checkpoint, plan_interval
from disco_ds.plan.towers import Towers, trace
from disco_ds.run import run_training
from helpers.tiny_run import recipe
from helpers.towers import tiny_config, write_tiny

M = 10**6
TOWERS = Towers(*[0] * 6, trained=150 * M, frozen=50 * M, largest=M, width=512, sample=1)
ZERO1 = {"zero_optimization": {"stage": 1}}


def fraction_lost(every_s: float, stall_s: float, failure_s: float) -> float:
    """Of a simulated job whose failures come at random: the time in which no new step was kept."""
    draw = random.Random(0)
    kept = time = 0.0
    for _ in range(20_000):
        until = draw.expovariate(1 / failure_s)
        rounds = int(until // (every_s + stall_s))
        kept += rounds * every_s
        time += until
    return 1 - kept / time


@pytest.mark.parametrize(("failure_h", "rate"), [(24, 1e9), (2, 2e8)])
def test_interval_loses_least_in_a_simulated_job(failure_h, rate, tmp_path):
    found = plan_interval(tiny_config(write_tiny(tmp_path), ZERO1), TOWERS, rate, 3600 * failure_h)
    lost = {k: fraction_lost(k * found.every_s, found.stall_s, 3600 * failure_h) for k in (0.4, 1, 2.5)}
    assert lost[1] < min(lost[0.4], lost[2.5])
    assert lost[1] == pytest.approx(found.lost, rel=0.2)


def test_saves_longer_than_the_time_between_failures_have_an_interval_too(tmp_path):
    found = plan_interval(tiny_config(write_tiny(tmp_path), ZERO1), TOWERS, save_rate=1.0, failure_s=60)
    assert found.every_s == 60


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_size_is_that_of_a_checkpoint(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe(tmp_path, deepspeed={"zero_optimization": {"stage": stage}}, steps=1))
    folder = run_training(config)
    written = sum(path.stat().st_size for path in (folder / "checkpoints" / "step-00000001" / "engine").iterdir())
    assert count_checkpoint(config, trace(config, config.micro_batch)) == pytest.approx(written, rel=0.1)
