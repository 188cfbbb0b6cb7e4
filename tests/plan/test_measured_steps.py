"""Step times that `disco-ds plan` predicts, compared with measured step times."""

from functools import cache

import pytest

from disco_ds.models.gpus import find_gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.speed import plan_speed
from disco_ds.plan.towers import Towers, trace
from helpers.towers import tiny_config

# Steps of one rank at ZeRO 1 in bf16 autocast, torch 2.11.0, 2026-11-27 (docs/results.md and tools/lab_notes.md).
# Columns: GPU, model, micro-batch, micro-batches, tokens per caption, compiled, ms
MEASURED = [
    ("H200", "ViT-B-32", 2048, 1, 19.6, True, 161.8),
    ("H200", "ViT-B-32", 2048, 1, 77, True, 237.8),
    ("H200", "ViT-B-16", 768, 1, 19.6, True, 220.9),
    ("H200", "ViT-L-14", 256, 1, 19.6, True, 300.0),
    ("H200", "ViT-B-32", 2048, 1, 77, False, 285.2),
    ("H200", "ViT-B-32", 2048, 8, 77, False, 2950.9),
    ("H200", "ViT-L-14", 256, 1, 77, False, 391.8),
    ("H200", "ViT-L-14", 256, 8, 77, False, 3909.8),
]
QUICK = ("ViT-B-32", 2048, 1, 77)
"""The measured steps that the fast tests check: (model, micro-batch, number of micro-batches, tokens per caption).

They share one trace. All other measured steps are marked as slow.
"""
ROWS = [
    row if row[1:5] == QUICK else pytest.param(*row, marks=pytest.mark.slow) for row in MEASURED
]


@cache
def traced(model: str, m: int, tokens: float) -> Towers:
    autocast = {"torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config = tiny_config(model, autocast, global_batch=m, micro_batch=m)
    return trace(config, m, text_tokens=tokens if tokens < 77 else None)


@pytest.mark.parametrize(("gpu", "model", "m", "count", "tokens", "compiled", "ms"), ROWS)
def test_planned_step_takes_as_long_as_the_measured_one(
    gpu: str, model: str, m: int, count: int, tokens: float, compiled: bool, ms: float
) -> None:
    autocast = {"torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 1}}
    batch = {"global_batch": m * count, "micro_batch": m}
    config = tiny_config(
        model, autocast, **batch, loss__name="disco_fused", model__compile=compiled
    )
    speed = plan_speed(config, 1, traced(model, m, tokens), find_gpu(gpu), Assumptions())
    assert speed is not None
    assert speed.source.startswith("measured")
    assert 1000 * speed.step_s == pytest.approx(ms, rel=0.05)
