"""Compare one training step of an engine, on one or many ranks, with one graph of the whole batch in float64."""

import copy
from typing import Any

import torch
from torch import Tensor

from disco_ds.config import render_ds_config
from disco_ds.config.ds_config import merge
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.engine import build_engine, set_lr
from disco_ds.training.grad_accum import Rng
from helpers.precisions import PRECISIONS
from helpers.step import train_step
from helpers.towers import (
    Batch,
    batches,
    build_towers,
    distance,
    masters,
    tiny_config,
    write_down,
)

SIZE, COUNTS, LR = 24, (1, 3), 1000.0
"""LR is so large that the rounding of the weights does not matter."""
UNIT = {"fp32": 2**-24, "tf32": 2**-11, "autocast": 2**-8, "bf16": 2**-8, "fp16": 2**-11}
"""Relative error of one rounding: bf16 keeps 8 bits of a number, fp16 and TF32 11."""
ROUNDINGS = 58
"""Number of roundings on the longest path through the tiny towers, forward (29) and backward (29): patches, two norms,
projection, unit rows, and in both blocks norm, qkv, scores, softmax, mix, projection, sum, norm, two products,
activation, sum."""
CASTS = {"float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def one_graph(
    config: Any, chunks: list[Batch], device: torch.device, cast: str, **given: Any
) -> dict[str, Tensor]:
    """Compute the gradient of the full-batch loss with one graph and without an engine.

    Args:
        config: The settings.
        chunks: The micro-batches.
        device: Device of the towers.
        cast: Precision of the towers: fp32, autocast, bf16, fp16 or float64.
        given: `dropout` of the text tower, and `states` of the generators before the forward of each chunk.
    """
    model = (
        build_towers(config, given.get("dropout", 0.0))
        .to(device, CASTS.get(cast, torch.float32))
        .train()
    )
    rows = []
    for number, chunk in enumerate(chunks):
        if "states" in given:
            given["states"][number].restore()
        with torch.autocast(device.type, torch.bfloat16, enabled=cast == "autocast"):
            rows.append(model(chunk["image"].to(device), chunk["text"].to(device)))
    image, text = (torch.cat([row[side] for row in rows]).cpu() for side in (0, 1))
    _, _, scale, bias = rows[-1]
    # In fp16, the gradients of a mean over the batch would be subnormal, so scale the loss.
    factor = 256.0 if cast == "fp16" else 1.0
    (
        factor
        * write_down(
            config.loss.name, image, text, scale.cpu(), None if bias is None else bias.cpu()
        )
    ).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.double().cpu() / factor for name, grad in trained.items()}


def one_step(
    config: Any, chunks: list[Batch], dropout: float = 0.0
) -> tuple[dict[str, Tensor], list[Rng], int]:
    """Take a step. Collective.

    Args:
        config: The settings.
        chunks: This rank's micro-batches.
        dropout: Dropout of the text tower.

    Returns:
        The gradient that the step applies, the states of the generators before the first forward of each chunk, and
        how often an fp16 loss scaler skipped the step before.
    """
    device = comm.local_device()
    states: list[Rng] = []
    skipped = 0

    def prepare(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        if len(states) < len(chunks):
            states.append(Rng())
        return batch["image"].to(device), batch["text"].to(device), batch["index"].to(device)

    loss = build_loss(config.loss.name).to(device)
    engine = build_engine(
        build_towers(config, dropout), config.optim, render_ds_config(config, comm.size())
    )
    engine.train()
    set_lr(engine, LR)
    before = masters(engine)
    # An fp16 loss scaler skips steps until its scale fits.
    while train_step(engine, loss, chunks, prepare, max_scale=1e9).grad_norm is None:
        skipped += 1
        assert skipped < 40
        states.clear()
    after = masters(engine)
    engine.destroy()
    gradient = {name: ((before[name] - after[name]) / LR).double().cpu() for name in before}
    return gradient, states, skipped


def settings(model: str, precision: str, stage: int, count: int, loss: str, **changes: Any) -> Any:
    """Return the settings of a step of SIZE samples, in `count` micro-batches on each rank."""
    ds_config = merge({"zero_optimization": {"stage": stage}}, copy.deepcopy(PRECISIONS[precision]))
    shape = {"global_batch": SIZE, "micro_batch": SIZE // count // comm.size()}
    return tiny_config(model, ds_config, **shape, optim__lr=LR, loss__name=loss, **changes)


def step_errors(
    model: str, cases: list[tuple[str, int, int, str]], **changes: Any
) -> dict[tuple[str, int, int, str], dict[str, float]]:
    """Compare a step of each case with one graph. Collective.

    Returns:
        For each case the error of the step, the error without an engine ("alone"), the allowed error, and the number of
        steps that a loss scaler skipped.
    """
    device, found, rough = comm.local_device(), {}, {}
    first = SIZE // comm.size() * comm.rank()
    for case in cases:
        precision, _, count, loss = case
        config = settings(model, *case, **changes)
        (whole,) = batches(1, SIZE)
        size = config.micro_batch
        chunks = [
            {key: x[start : start + size] for key, x in whole.items()}
            for start in range(first, first + count * size, size)
        ]
        if (precision, loss) not in rough:
            plain = settings(model, *case)  # for example, without compilation
            true = one_graph(plain, [whole], torch.device("cpu"), "float64")
            same = one_graph(plain, [whole], device, precision)
            rough[precision, loss] = true, distance(same, true)
        true, alone = rough[precision, loss]
        # By default, cuDNN's convolutions use TF32.
        unit = UNIT["tf32" if precision == "fp32" and device.type == "cuda" else precision]
        gradient, _, skipped = one_step(config, chunks)
        found[case] = {
            "error": distance(gradient, true),
            "alone": alone,
            "limit": max(1e-5, min(2 * alone, ROUNDINGS * unit)),
            "skipped": skipped,
        }
    return found
