"""Ways in which loops in the field get contrastive_step wrong (docs/own_loop.md): each a clear error on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.own_loop import contrastive_step, split
from helpers.dist import run_ranks
from helpers.own_loop import PER_RANK, SCALE, WIDTH, Batch, D, ds_config, forward_of, make, my_batch
from helpers.towers import distance, on_boundary_backward


def refused(call: Callable[[], Any]) -> str:
    """What a call says on this rank; every rank must be refused."""
    with pytest.raises(ValueError) as caught:
        call()
    comm.barrier()
    return str(caught.value)


def engine_of(kind: str, stage: int, precision: str, K: int) -> tuple[Any, Callable[[Batch], Any]]:
    model = make(kind).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage, precision, K))
    return engine, forward_of(kind, engine, torch.bfloat16 if precision == "bf16" else torch.float32)


def mistakes_of_engines() -> None:
    loss, batch = build_loss("disco"), my_batch()
    engine, forward = engine_of("image-text", 2, "fp32", 4)
    said = refused(lambda: contrastive_step(engine, loss, batch, forward, micro_batches=2))
    assert "micro_batches is 2, the engine's gradient_accumulation_steps 4" in said
    # The micro-batches of a step that was given up are still in ZeRO 2's buffers.
    engine.backward(sum(x.sum() for x in forward(split(batch, 4)[0])))
    engine.step()
    said = refused(lambda: contrastive_step(engine, loss, batch, forward, micro_batches=4))
    assert "in the middle of a step (1 of 4 micro-batches)" in said
    engine.destroy()
    engine, forward = engine_of("text-text", 0, "bf16", 1)
    said = refused(lambda: contrastive_step(engine, loss, batch, forward, scale=SCALE))
    assert "bf16.enabled at ZeRO 0 is refused" in said
    engine.destroy()


def test_engine_that_would_apply_another_gradient_is_refused() -> None:
    run_ranks(mistakes_of_engines, 2)


class Counting(nn.Module):
    """A BatchNorm, or a draw that torch's generators know nothing of."""

    def __init__(self, norm: bool):
        super().__init__()
        self.tower, self.norm = nn.Linear(WIDTH, D), nn.BatchNorm1d(D) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.tower(x)
        out = out * random.random() + random.random() if self.norm is None else self.norm(out)
        return F.normalize(out, dim=-1)


def mistakes_of_forwards() -> None:
    loss, batch = build_loss("disco"), my_batch()

    def step(model: nn.Module, batch: Batch = batch, **options: Any) -> Any:
        wrapped = DistributedDataParallel(model)
        forward = forward_of("text-text", wrapped, torch.float32)
        return lambda: contrastive_step(wrapped, loss, batch, forward, scale=SCALE, **options)

    said = refused(step(Counting(norm=True), micro_batches=2))
    assert "norm.running_mean changes in forward" in said
    assert torch.isfinite(step(Counting(norm=True))().loss), "one micro-batch is seen once"
    assert torch.isfinite(step(Counting(norm=True).eval(), micro_batches=2)().loss)
    assert "draws random numbers that are not torch's" in refused(step(Counting(norm=False), micro_batches=2))

    n = comm.rank()
    uneven = {"first": batch["first"][: 8 - n], "nested": [batch["nested"][0][: 8 - n]]}
    assert "drop the last uneven batch" in refused(step(make("text-text"), uneven))
    said = refused(step(make("text-text"), uneven, micro_batches=2))
    assert ("a batch of shape (7, " if n else "the batch of another rank does not divide into 2") in said
    narrow = nn.Sequential(make("text-text"), nn.Linear(D, D - n))
    forward = forward_of("text-text", narrow, torch.float32)
    said = refused(lambda: contrastive_step(narrow, loss, batch, forward, scale=SCALE))
    assert "[8, 15, 8, 15] to [8, 16, 8, 16]" in said

    model = make("text-text")
    forward = forward_of("text-text", model, torch.float32)

    def nested(part: Batch) -> Any:
        contrastive_step(model, loss, batch, forward, scale=SCALE)
        return forward(part)

    assert "inside a contrastive_step" in refused(lambda: contrastive_step(model, loss, batch, nested, scale=SCALE))
    contrastive_step(model, loss, batch, forward, scale=SCALE)  # the refusal has left nothing behind
    if n == 0:
        model._contrastive_steps += 1  # type: ignore[operator]  # as a rank whose loader had one batch less is behind
    assert "a rank has left one out" in refused(lambda: contrastive_step(model, loss, batch, forward, scale=SCALE))
    assert "forward returned no scale" in refused(lambda: contrastive_step(model, loss, batch, forward))
    with pytest.raises(ValueError, match="forward returned 1 values"):
        contrastive_step(model, loss, batch, lambda part: (part["first"],))


def test_forward_that_is_another_the_second_time_and_ranks_that_differ_are_refused() -> None:
    run_ranks(mistakes_of_forwards, 2)


def clipped_and_scaled() -> None:
    """A loop of torch: GradScaler, clipping, AdamW, over several steps, beside the same with one micro-batch."""
    ends = []
    for K in (1, 4):
        model = make("image-text").eval()  # without dropout: its draws depend on the micro-batches
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        loss, forward = build_loss("disco"), forward_of("image-text", wrapped, torch.float32)

        def backward(x: Tensor, scaler: torch.amp.GradScaler = scaler) -> None:
            scaler.scale(x).backward()

        for _ in range(3):
            optimizer.zero_grad()
            contrastive_step(wrapped, loss, my_batch(), forward, micro_batches=K, backward=backward)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05
            scaler.step(optimizer)
            scaler.update()
        ends.append({name: value.detach().clone() for name, value in model.named_parameters()})
    assert distance(ends[1], ends[0]) < 1e-5


def test_scaler_and_clipping_of_torch() -> None:
    run_ranks(clipped_and_scaled, 2)


def with_memory() -> None:
    """A loss that keeps state per sample takes it over at each step."""
    model, loss = make("text-text"), build_loss("fastclip_v1")
    loss.set_num_samples(2 * PER_RANK, 4 * PER_RANK)
    index = torch.arange(PER_RANK) + comm.rank() * PER_RANK
    forward = forward_of("text-text", model, torch.float32)
    before = loss.state_dict()
    for _ in range(2):
        contrastive_step(model, loss, my_batch(), forward, micro_batches=2, scale=10.0, index=index)
    after = loss.state_dict()
    assert any(not torch.equal(torch.as_tensor(after[key]), torch.as_tensor(before[key])) for key in before)


def test_loss_with_state_gets_its_samples() -> None:
    run_ranks(with_memory, 2)


def remembers_nothing() -> None:
    """ZeRO 2, where GradCache in other trainers mixes micro-batches of two steps: the second step is the first's."""
    engine, forward = engine_of("text-text", 2, "fp32", 4)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    seen: list[dict[str, Tensor]] = []
    on_boundary_backward(engine, seen.append)
    engine.eval()
    for _ in range(3):
        contrastive_step(engine, build_loss("disco"), my_batch(), forward, micro_batches=4, scale=SCALE)
    engine.destroy()
    assert len(seen) == 3
    assert distance(seen[1], seen[0]) < 1e-6
    assert distance(seen[2], seen[0]) < 1e-6


def test_no_micro_batch_of_an_earlier_step_is_in_the_gradient() -> None:
    run_ranks(remembers_nothing, 2)
