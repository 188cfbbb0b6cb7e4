"""The anomaly rules on synthetic numbers: what they report, what they ignore, and their state in a checkpoint."""

import json
import logging
import math
import random
import time
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from disco_ds.metrics.anomalies import (
    MIN_HISTORY,
    SAMPLE,
    WINDOW,
    AnomalyDetector,
    effective_rank,
    features_spread,
)

Notes = list[tuple[int, dict[str, float]]]


def watching(skip: bool = False, **changes: Any) -> tuple[AnomalyDetector, Notes]:
    notes: Notes = []
    given: dict[str, Any] = {"warmup_steps": 10, **changes}
    return AnomalyDetector(
        lambda step, values: notes.append((step, values)), skip=skip, **given
    ), notes


def falling(step: int, draw: random.Random) -> float:
    """Return the loss of a healthy run: it falls from ln(4096), with 2% noise."""
    return (2 + 6.3 * math.exp(-step / 150)) * (1 + draw.gauss(0, 0.02))


def test_healthy_run_is_silent() -> None:
    for seed in range(5):
        trouble, notes = watching(skip=True)
        draw = random.Random(seed)
        for step in range(1, 1001):
            assert not trouble.check_spike("loss", step, falling(step, draw))
            # The noise of a norm is multiplicative, and the norm grows while the first features separate.
            assert not trouble.check_spike(
                "grad_norm", step, (0.5 + min(step / 200, 1)) * math.exp(draw.gauss(0, 0.25))
            )
        assert notes == []


@pytest.mark.parametrize(("name", "factor"), [("loss", 1.6), ("grad_norm", 5.0)])
def test_spike_is_found_and_named_once(
    name: str, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    trouble, notes = watching()
    draw = random.Random(0)
    for step in range(1, 301):
        high = factor if step in (200, 201, 250) else 1
        assert not trouble.check_spike(name, step, high * falling(1000 + step, draw)), (
            "without skip, no batch may be skipped"
        )
    assert [step for step, _ in notes] == [200, 250], "two spikes in a row must be logged once"
    assert all(values.keys() == {f"anomaly/{name}_spike"} for _, values in notes)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert said[0].startswith(f"step 200: {name.replace('grad_', 'gradient ')} ")
    assert "far above the median of the last 64 steps, 2" in said[0]


def test_first_steps_tell_nothing() -> None:
    trouble, _ = watching(skip=True)
    assert not any(trouble.check_spike("loss", step, 10.0**step) for step in range(MIN_HISTORY))


def test_every_skipped_batch_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trouble, _ = watching(skip=True)
    for step in range(1, 40):
        trouble.check_spike("loss", step, 2.0)
    assert trouble.check_spike("loss", 40, 3.0)
    assert trouble.check_spike("loss", 40, 3.0)
    assert caplog.text.count("; the batch is skipped") == 2


def test_level_that_stays_is_no_spike() -> None:
    """If a higher level counted as a spike forever, a run whose loss has risen would skip all of its data."""
    trouble, _ = watching(skip=True)
    draw = random.Random(0)
    for step in range(WINDOW):
        trouble.check_spike("loss", step, 2 + draw.gauss(0, 0.02))
    skipped = [trouble.check_spike("loss", step, 5 + draw.gauss(0, 0.02)) for step in range(WINDOW)]
    count = sum(skipped)
    assert WINDOW // 2 - 2 <= count <= WINDOW // 2 + 1
    assert all(skipped[:count])


def test_negative_losses_and_norms_of_0_have_spikes_too() -> None:
    trouble, _ = watching(skip=True)
    draw = random.Random(0)
    assert not any(
        trouble.check_spike("loss", step, -0.5 + draw.gauss(0, 0.01)) for step in range(WINDOW)
    )
    assert trouble.check_spike("loss", WINDOW, -0.2)
    assert not any(trouble.check_spike("grad_norm", step, 0.0) for step in range(WINDOW)), (
        "norms that are always 0 have no spike"
    )
    assert trouble.check_spike("grad_norm", WINDOW, 1e-3)
    assert not trouble.check_spike("loss", WINDOW, -0.9), "a lower loss is not a spike"


def test_state_goes_on_to_the_bit() -> None:
    draw = random.Random(3)
    values = [(0.7 + draw.random() / 3) * (50 if draw.random() < 0.05 else 1) for _ in range(400)]
    records = [record(step, 1.2 - value, 100 * value) for step, value in enumerate(values)]

    def go(trouble: AnomalyDetector, steps: range) -> list[bool]:
        for step in steps:
            trouble.check_record(records[step])
        return [trouble.check_spike("grad_norm", step, values[step]) for step in steps]

    whole, notes = watching(skip=True)
    expected = go(whole, range(400))
    assert 5 < sum(expected) < 40
    first, before = watching(skip=True)
    found = go(first, range(150))
    second, after = watching(skip=True, state=json.loads(json.dumps(first.state_dict())))
    assert found + go(second, range(150, 400)) == expected
    assert sorted(map(str, before + after)) == sorted(map(str, notes))
    assert second.state_dict() == whole.state_dict()


def record(step: int, cosine: float = 0.3, rank: float = 60.0) -> dict[str, Any]:
    sides = {"image_cosine": cosine, "image_rank": rank, "text_cosine": 0.2, "text_rank": 70.0}
    return {"step": step, **sides}


@pytest.mark.parametrize("now", [{"cosine": 0.7}, {"rank": 28.0}])
def test_collapse_is_measured_by_the_best_of_the_run(
    now: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    trouble, notes = watching(warmup_steps=10)
    trouble.check_record(record(5, cosine=0.0, rank=128.0))  # during warmup
    trouble.check_record(record(60, cosine=0.0, rank=128.0))  # after warmup, but within WINDOW
    for step in (70, 80):
        trouble.check_record(record(step))
    assert notes == []
    trouble.check_record(record(90, **now))
    trouble.check_record(record(95, **now))
    assert [(step, *values) for step, values in notes] == [(90, "anomaly/image_collapse")]
    assert caplog.text.count("step 90: the image features collapse: ") == 1
    assert "step 95" not in caplog.text


def test_effective_rank_counts_equal_directions() -> None:
    assert effective_rank(torch.eye(16)).item() == pytest.approx(16)
    assert effective_rank(torch.eye(16)[:4].repeat(8, 1)).item() == pytest.approx(4)
    assert effective_rank(torch.ones(8, 3)).item() == pytest.approx(1, abs=1e-3)
    rows = torch.randn(20, 7, generator=torch.Generator().manual_seed(0))
    shares = torch.linalg.svdvals(rows.double())
    shares /= shares.sum()
    assert effective_rank(rows).item() == pytest.approx(
        (-(shares * shares.log()).sum()).exp().item()
    )


def test_spread_is_of_all_pairs_in_the_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    image, text = (
        F.normalize(torch.randn(200, 32, generator=generator) + shift, dim=1)
        for shift in (0.0, 2.0)
    )
    values = features_spread(image, text)
    cosines = text[:SAMPLE] @ text[:SAMPLE].T
    pairs = cosines[~torch.eye(SAMPLE, dtype=torch.bool)]
    assert values["text_cosine"].item() == pytest.approx(pairs.mean().item(), abs=1e-5)
    assert abs(values["image_cosine"].item()) < 0.02
    assert values["text_rank"] < values["image_rank"] <= 32
    lone = features_spread(image[:1], text[:1])
    assert all(math.isfinite(value) for value in lone.values()), (
        "a batch of one sample must give finite values"
    )


def test_rules_take_no_time() -> None:
    """At log.every_steps=10, all rules together must take less CPU time than 20,000 additions.

    That is about 1.3 ms on a fast core, 0.7% of a step of 200 ms. The additions are timed between
    the rules, so that a slow or busy machine slows both.
    """
    trouble, _ = watching()
    draw = random.Random(0)
    values = [1 + draw.random() for _ in range(1000)]
    image, text = (F.normalize(torch.randn(SAMPLE, 512), dim=1) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # otherwise, the CPU time of idle threads would count
    features_spread(image, text)
    additions = []
    for first in range(0, len(values), 200):
        start = time.process_time()
        total = 0
        for number in range(100_000):
            total += number
        addition = (time.process_time() - start) / 100_000
        start = time.process_time()
        for step, value in enumerate(values[first : first + 200], first):
            trouble.check_spike("loss", step, value)
            trouble.check_spike("grad_norm", step, value)
            if step % 10 == 0:
                spread = features_spread(image, text)
                trouble.check_record(
                    {"step": step} | {name: x.item() for name, x in spread.items()}
                )
        additions.append((time.process_time() - start) / 200 / addition)
    torch.set_num_threads(threads)
    print(f"additions in the time of a step's rules: {[round(x) for x in additions]}")
    assert min(additions) < 20_000  # the least: other processes on the core's caches only add
