"""Mistakes with contrastive_step in custom training loops (docs/custom_loop.md) cause clear errors on every rank.

Also: batches that are rejected or skipped leave no trace.
"""

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.custom_loop import contrastive_step, find_device, split
from helpers.custom_loop import (
    PER_RANK,
    SCALE,
    WIDTH,
    Batch,
    D,
    ds_config,
    forward_of,
    make,
    my_batch,
)
from helpers.dist import run_ranks
from helpers.towers import distance, on_boundary_backward


def refused(call: Callable[[], Any]) -> str:
    """Return the error message of a call on this rank. The call must be refused on every rank. Collective."""
    with pytest.raises(ValueError) as caught:
        call()
    comm.barrier()
    return str(caught.value)


def engine_of(
    kind: str,
    stage: int,
    precision: str,
    K: int,
    zero: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Any, Callable[[Batch], Any]]:
    model = make(kind).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ds_config(stage, precision, K, **(zero or {})) | changes
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, forward_of(
        kind, engine, torch.bfloat16 if precision == "bf16" else torch.float32
    )


def mistakes_of_engines() -> None:
    loss, batch = build_loss("disco"), my_batch()
    engine, forward = engine_of("image-text", 2, "fp32", 4)
    said = refused(lambda: contrastive_step(engine, loss, batch, forward, micro_batches=2))
    assert "micro_batches is 2" in said
    assert "gradient_accumulation_steps is 4" in said
    # If a step is abandoned, its first micro-batches remain in ZeRO 2's buffers.
    engine.backward(sum(x.sum() for x in forward(split(batch, 4)[0][0])))
    engine.step()
    said = refused(lambda: contrastive_step(engine, loss, batch, forward, micro_batches=4))
    assert "in the middle of a step (1 of 4 micro-batches)" in said
    engine.destroy()
    engine, forward = engine_of("text-text", 0, "bf16", 1)
    said = refused(lambda: contrastive_step(engine, loss, batch, forward, scale=SCALE))
    assert "bf16.enabled at ZeRO 0 is refused" in said
    engine.destroy()
    # With these settings, the gradient would be N times too large, or a step would have K updates.
    for stage, changes in (
        (0, {"gradient_allreduce_op": "sum"}),
        (2, {"managed_gradient_accumulation": False}),
    ):
        engine, forward = engine_of("text-text", stage, "fp32", 4, **changes)
        said = refused(
            partial(contrastive_step, engine, loss, batch, forward, micro_batches=4, scale=SCALE)
        )
        assert f"ds_config key {next(iter(changes))} is not supported" in said
        engine.destroy()
    # DeepSpeed would free the gradient of a parameter that is larger than the bucket while it is still being reduced.
    zero = {"overlap_comm": True, "reduce_bucket_size": 100}
    engine, forward = engine_of("text-text", 2, "fp32", 4, zero, gradient_allreduce_op="mean")
    contrastive_step(engine, loss, batch, forward, micro_batches=4, scale=SCALE)
    assert engine.optimizer.reduce_bucket_size == 24 * D
    engine.destroy()


class Counting(nn.Module):
    """A model with a BatchNorm if `norm`, otherwise with random numbers that do not come from torch's generators."""

    def __init__(self, norm: bool):
        super().__init__()
        self.tower, self.norm = nn.Linear(WIDTH, D), nn.BatchNorm1d(D) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.tower(x)
        out = out * random.random() + random.random() if self.norm is None else self.norm(out)
        return F.normalize(out, dim=-1)


def reject_a_batch() -> None:
    """Take a step that is applied, and check that a step whose gradient is not finite leaves BatchNorm alone."""
    model = Counting(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ds_config(0, "fp32", 1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss, forward = build_loss("disco"), forward_of("text-text", engine, torch.float32)
    contrastive_step(engine, loss, my_batch(), forward, scale=SCALE)
    spoilt = my_batch() | {"first": my_batch()["first"] * float("inf")}
    with pytest.raises(FloatingPointError):
        contrastive_step(engine, loss, spoilt, forward, scale=SCALE)
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    # Only the two forward passes of the applied step, image and text, are counted.
    assert model.norm.num_batches_tracked == 2  # type: ignore[union-attr]


def mistakes_of_forwards() -> None:
    loss, batch = build_loss("disco"), my_batch()

    def step(model: nn.Module, batch: Batch = batch, **options: Any) -> Any:
        wrapped = DistributedDataParallel(model)
        forward = forward_of("text-text", wrapped, torch.float32)
        return lambda: contrastive_step(wrapped, loss, batch, forward, scale=SCALE, **options)

    said = refused(step(Counting(norm=True), micro_batches=2))
    assert "module.norm is a BatchNorm1d" in said
    assert torch.isfinite(step(Counting(norm=True))().loss), (
        "with one micro-batch, BatchNorm sees each sample once"
    )
    assert torch.isfinite(step(Counting(norm=True).eval(), micro_batches=2)().loss)
    assert "draws random numbers from a generator other than torch's" in refused(
        step(Counting(norm=False), micro_batches=2)
    )

    n = comm.rank()
    uneven = {"first": batch["first"][: 8 - n], "nested": [batch["nested"][0][: 8 - n]]}
    assert "drop the last uneven batch" in refused(step(make("text-text"), uneven))
    said = refused(step(make("text-text"), uneven, micro_batches=2))
    assert ("tensors with [7] samples cannot" if n else "the batch of another rank cannot") in said
    said = refused(step(make("text-text"), micro_batches=2 + 2 * n))
    assert said == "micro_batches differs between ranks, from 2 to 4"
    narrow = nn.Sequential(make("text-text"), nn.Linear(D, D - n))
    forward = forward_of("text-text", narrow, torch.float32)
    said = refused(lambda: contrastive_step(narrow, loss, batch, forward, scale=SCALE))
    assert f"rank {n} has images [8, {16 - n}]" in said

    model = make("text-text")
    forward = forward_of("text-text", model, torch.float32)

    said = refused(lambda: contrastive_step(model, loss, batch, forward, scale=SCALE + n))
    assert f"the logit scale differs between ranks, from {SCALE:g} to {SCALE + 1:g}" in said
    # A few steps without averaging make as small a difference.
    assert "the logit scale differs" in refused(
        lambda: contrastive_step(model, loss, batch, forward, scale=SCALE * (1 + n / 10_000))
    )
    # After the refusal, a correct step must still work.
    contrastive_step(model, loss, batch, forward, scale=SCALE)
    ids = torch.zeros(8, dtype=torch.int64) if n else None
    assert "group_id differ between ranks" in refused(
        lambda: contrastive_step(model, loss, batch, forward, scale=SCALE, group_id=ids)
    )

    def forward_with_bias(part: Any) -> Any:
        return *forward(part)[:2], torch.tensor([SCALE]), torch.tensor([-10.0 - n])

    said = refused(lambda: contrastive_step(model, build_loss("siglip"), batch, forward_with_bias))
    assert "the logit bias differs between ranks, from -11 to -10" in said
    with pytest.raises(ValueError, match="logit_bias as the fourth value"):
        contrastive_step(model, build_loss("siglip"), batch, forward, scale=SCALE)
    assert "forward returned no scale" in refused(
        lambda: contrastive_step(model, loss, batch, forward)
    )
    with pytest.raises(ValueError, match="forward must return a tuple"):
        contrastive_step(model, loss, batch, lambda part: (part["first"],))
    # The returned tensor has two rows, which must not be taken for the two sides.
    with pytest.raises(ValueError, match="it returned a Tensor"):
        contrastive_step(model, loss, batch, lambda part: part["first"][:2])
    static = DistributedDataParallel(make("text-text"), static_graph=True)
    forward = forward_of("text-text", static, torch.float32)
    assert "static_graph" in refused(
        lambda: contrastive_step(static, loss, batch, forward, micro_batches=2, scale=1.0)
    )
    contrastive_step(static, loss, batch, forward, scale=SCALE)


class Residual(nn.Module):
    """A pre-norm encoder. While `draws` is set, its dropout draws from a separate generator."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(4)
        )
        self.generator, self.draws = torch.Generator().manual_seed(5), True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            if self.draws and self.training:
                out = out * (torch.rand(out.shape, generator=self.generator) > 0.05) / 0.95
            x = x + out
        return x


def step_alone(model: nn.Module, width: int, K: int = 2, steps: int = 1) -> None:
    """Take steps in this process with one model for both sides."""
    sides = torch.randn(8, width, generator=torch.Generator().manual_seed(1)).split(4)

    def forward(part: Batch) -> Any:
        return tuple(F.normalize(model(part[name]), dim=-1) for name in ("first", "second"))

    batch = {"first": sides[0], "second": sides[1]}
    for _ in range(steps):
        contrastive_step(model, build_loss("disco"), batch, forward, micro_batches=K, scale=SCALE)


@pytest.mark.parametrize("width", [64, 1024])
def test_dropout_that_is_not_replayed_is_refused_at_any_width(width: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(
        ValueError, match="draws random numbers from a generator other than torch's"
    ):
        step_alone(Residual(width), width)


def test_forward_is_checked_in_each_mode_until_a_step_has_succeeded() -> None:
    torch.manual_seed(0)
    model = Residual(8).eval()
    step_alone(model, 8)  # in eval mode, nothing is drawn
    model.train()
    for _ in range(2):  # the loop catches the error and continues
        with pytest.raises(ValueError, match="the second time"):
            step_alone(model, 8)
    step_alone(model, 8, K=1)  # with one micro-batch, no forward is repeated
    with pytest.raises(ValueError, match="the second time"):
        step_alone(model, 8, K=4)
    model.draws = False
    step_alone(model, 8)
    model.draws = True
    step_alone(model, 8)


def test_device_is_the_accelerator_that_the_parameters_are_on() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(2, 2, device="cuda:1"), nn.Linear(2, 2, device="cpu"))
        assert find_device(model) == torch.device("cuda:1")
        assert find_device(nn.Identity()) == torch.device("cpu")


def unaveraged() -> None:
    """Check models whose gradients nothing averages, so that each rank would train a different model."""
    loss, batch = build_loss("disco"), my_batch()

    def warned(model: nn.Module, forward: Callable[[Batch], Any], K: int = 2) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # torch 2.14 deprecates collectives that DeepSpeed calls.
            warnings.simplefilter("ignore", FutureWarning)
            contrastive_step(model, loss, batch, forward, micro_batches=K)
        return [str(item.message) for item in caught]

    first = comm.rank() == 0  # only rank 0 warns
    plain = make("image-text")
    assert [
        item[:40] for item in warned(plain, forward_of("image-text", plain, torch.float32))
    ] == ["the gradients of a plain module are not "] * first
    parts = make("image-text")
    for part in parts.children():
        fully_shard(part)
    assert len(warned(parts, forward_of("image-text", parts, torch.float32))) == first
    for K in (1, 2):
        ddp = DistributedDataParallel(make("image-text"))
        assert not warned(ddp, forward_of("image-text", ddp, torch.float32), K)
        sharded = fully_shard(make("image-text"))
        assert not warned(sharded, forward_of("image-text", sharded, torch.float32), K)


def mistakes() -> None:
    mistakes_of_engines()
    mistakes_of_forwards()
    unaveraged()


def test_mistakes_are_refused_or_warned_of_on_every_rank() -> None:
    run_ranks(mistakes, 2)


def clipped_and_scaled() -> None:
    """Check that a loop with GradScaler, clipping and AdamW gives the same weights with 1 and 4 micro-batches."""
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


def skipped_by_a_scaler() -> None:
    """Check that a loss commits its state, except if GradScaler skips the update, as one rank's gradient overflows."""
    model, loss = make("text-text"), build_loss("fastclip_v1")
    wrapped = DistributedDataParallel(model)
    loss.set_num_samples(2 * PER_RANK, 4 * PER_RANK)
    index = torch.arange(PER_RANK) + comm.rank() * PER_RANK
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=4.0),
    )
    forward = forward_of("text-text", wrapped, torch.float32)
    before = str(loss.state_dict())
    for factor, changes in ((float("inf"), False), (1.0, True)):
        weights = [parameter.detach().clone() for parameter in model.parameters()]

        def backward(x: Tensor, factor: float = factor if comm.rank() else 1.0) -> None:
            scaler.scale(x * factor).backward()

        optimizer.zero_grad()
        contrastive_step(
            wrapped,
            loss,
            my_batch(),
            forward,
            micro_batches=2,
            scale=10.0,
            index=index,
            backward=backward,
        )
        scaler.step(optimizer)
        scaler.update()
        updated = not all(map(torch.equal, weights, model.parameters()))
        assert (updated, str(loss.state_dict()) != before) == (changes, changes)


def remembers_nothing() -> None:
    """Check that three equal steps at ZeRO 2 have equal gradients.

    With GradCache in other trainers, ZeRO 2 mixes the micro-batches of two steps.
    """
    engine, forward = engine_of("text-text", 2, "fp32", 4)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    seen: list[dict[str, Tensor]] = []
    on_boundary_backward(engine, seen.append)
    engine.eval()
    for _ in range(3):
        contrastive_step(
            engine, build_loss("disco"), my_batch(), forward, micro_batches=4, scale=SCALE
        )
    engine.destroy()
    assert len(seen) == 3
    assert distance(seen[1], seen[0]) < 1e-6
    assert distance(seen[2], seen[0]) < 1e-6


def steps_in_turn() -> None:
    reject_a_batch()
    clipped_and_scaled()
    skipped_by_a_scaler()
    remembers_nothing()


def test_steps_in_turn_leave_only_what_they_should() -> None:
    run_ranks(steps_in_turn, 2)
