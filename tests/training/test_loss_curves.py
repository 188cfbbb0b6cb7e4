"""Over fifty steps, the losses on several ranks are the same as on one rank."""

import pytest
import torch

from disco_ds.config import render_ds_config
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.engine import build_engine, set_lr
from helpers.dist import run_ranks
from helpers.precisions import ds_config
from helpers.step import train_step
from helpers.towers import (
    Batch,
    batches,
    build_towers,
    prepare,
    tiny_config,
    write_tiny,
)


def curve(model: str, loss: str, count: int) -> list[float]:
    """Take fifty steps of AdamW on the same data, with `count` micro-batches per rank. Return the losses."""
    N = comm.size()
    config = tiny_config(
        model,
        ds_config("fp32", 1),
        global_batch=32,
        micro_batch=32 // N // count,
        steps=50,
        optim__name="adamw",
        optim__lr=1e-3,
    )
    engine = build_engine(build_towers(config), config.optim, render_ds_config(config, comm.size()))
    engine.train()
    set_lr(engine, 1e-3)
    values = []
    for step in range(50):
        parts = _split(step, N * count)
        mine = parts[comm.rank() * count : (comm.rank() + 1) * count]
        out = train_step(engine, build_loss(loss), mine, prepare, max_scale=100.0)
        values.append(out.metrics["loss"].item())
    engine.destroy()
    return values


def _split(step: int, parts: int) -> list[Batch]:
    (whole,) = batches(1, 32, seed=step % 8)
    return [{key: value.chunk(parts)[k] for key, value in whole.items()} for k in range(parts)]


def curves(model: str, losses: list[str], counts: list[int]) -> dict[tuple[str, int], list[float]]:
    return {(loss, count): curve(model, loss, count) for loss in losses for count in counts}


def check_curves(model: str, losses: list[str]) -> None:
    (alone,) = run_ranks(curves, 1, model, ["clip"], [1])
    cut = run_ranks(curves, 2, model, losses, [1, 8], timeout_s=500)[0]
    true = torch.tensor(alone["clip", 1], dtype=torch.float64)
    assert true[-1] < 0.9 * true[0], "the run must learn, or the curves say nothing"
    for label, values in cut.items():
        error = ((torch.tensor(values, dtype=torch.float64) - true) / true).abs().max().item()
        assert error <= 1e-5, f"2 ranks, {label}: {error}"


@pytest.mark.slow
def test_loss_curves_are_those_of_one_rank(tmp_path):
    """The losses `clip` and `disco` have equal curves (DisCo-CLIP, Table 2), for any number of micro-batches."""
    check_curves(write_tiny(tmp_path), ["disco_fused"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loss_curves_of_every_infonce_are_those_of_one_rank(tmp_path):
    check_curves(write_tiny(tmp_path), ["clip", "disco", "inf_cl"])
