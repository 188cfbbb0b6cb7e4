"""contrastive_step in loops that are not ours: the full batch's gradient under every engine, at any ranks and
micro-batches, dropout replayed; one test for each way in which loops in the field get it wrong (docs/own_loop.md)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.own_loop import contrastive_step, split
from helpers.dist import run_ranks
from helpers.towers import distance, masters, on_boundary_backward

PER_RANK, WIDTH, D = 8, 12, 16
LR = 1000.0
"""The change of a weight then dwarfs the rounding of the weight it is read from."""
Batch = dict[str, Any]


class Drop(nn.Module):
    """Dropout whose mask is the same in every precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, device=x.device) > 0.3) / 0.7 if self.training else x


class Checkpointed(nn.Sequential):
    """Recomputes its activations in backward, dropout included."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), Drop(), nn.LayerNorm(24), nn.Linear(24, D))


class TwoTowers(nn.Module):
    """Image and text, with the learned scale inside, as ZeRO 3 needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = encoder(), encoder()
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sides = (F.normalize(tower(x).float(), dim=-1) for tower, x in ((self.first, first), (self.second, second)))
        return *sides, self.log_scale.float().exp()


class BiEncoder(nn.Module):
    """One tower for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.tower(x).float(), dim=-1)


MODELS: dict[str, type[nn.Module]] = {"image-text": TwoTowers, "text-text": BiEncoder}
SCALE = 9.0


def forward_of(kind: str, model: nn.Module, dtype: torch.dtype, autocast: bool = False) -> Callable[[Batch], Any]:
    def forward(batch: Batch) -> tuple[Tensor, ...]:
        sides = batch["first"].to(dtype), batch["nested"][0].to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(*sides) if kind == "image-text" else tuple(model(side) for side in sides)

    return forward


def make(kind: str, variant: str = "") -> nn.Module:
    torch.manual_seed(7)
    model = MODELS[kind]()
    towers = ("tower",) if kind == "text-text" else ("first", "second")
    if variant == "checkpointing":
        for name in towers:
            setattr(model, name, Checkpointed(*getattr(model, name)))
    elif variant == "lora":
        from peft import LoraConfig, get_peft_model  # slow to import

        lora = LoraConfig(r=2, target_modules=["0", "4"], lora_dropout=0.2, init_lora_weights=False)
        for name in towers:
            setattr(model, name, get_peft_model(getattr(model, name), lora))
    return model


def my_batch() -> Batch:
    generator = torch.Generator().manual_seed(40 + comm.rank())
    first, second = (torch.randn(PER_RANK, WIDTH, generator=generator) for _ in range(2))
    return {"first": first, "nested": [second], "name": "kept"}


def reference(kind: str, K: int, dtype: torch.dtype, autocast: bool, variant: str = "") -> dict[str, Tensor]:
    """The gradient of the global batch: every rank keeps the graphs of its own micro-batches, in the order and with
    the random numbers of the step, and takes the other ranks' features as they are; the parts are summed up."""
    model = make(kind, variant).to(dtype).train()
    forward = forward_of(kind, model, dtype, autocast)
    torch.manual_seed(100 + comm.rank())
    parts = [forward(part) for part in split(my_batch(), K)]
    own = [torch.cat([part[side] for part in parts]).double() for side in (0, 1)]
    scale = parts[-1][2].double() if kind == "image-text" else torch.tensor([SCALE], dtype=torch.float64)
    n = comm.rank()
    sides = []
    for mine in own:
        rows = list(comm.gather(mine.detach()).split(PER_RANK))
        rows[n] = mine
        sides.append(torch.cat(rows))
    logits = scale * sides[0] @ sides[1].T
    labels = torch.arange(len(logits))
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # LoRA's base
            continue
        assert parameter.grad is not None
        total = comm.all_reduce_sum(parameter.grad.double())
        found[name] = total / comm.size() if name == "log_scale" else total  # every rank has the scale's whole gradient
    return found


def ds_config(stage: int, precision: str, K: int, **changes: Any) -> dict[str, Any]:
    N = comm.size()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | changes
    return {
        "train_batch_size": PER_RANK * N,
        "train_micro_batch_size_per_gpu": PER_RANK // K,
        "gradient_accumulation_steps": K,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
    }


def step_of(engine: str, kind: str, precision: str, K: int, variant: str = "") -> dict[str, Tensor]:
    """The gradient that one contrastive_step leaves, or applies."""
    model = make(kind, variant).train()
    loss = build_loss("disco_fused", tile=(8, 8))
    autocast = precision == "bf16" and not engine.startswith("zero")
    if engine.startswith("zero"):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        offload = {"offload_optimizer": {"device": "cpu"}} if variant == "offload" else {}
        config = ds_config(int(engine[4]), precision, K, **offload) | {"zero_force_ds_cpu_optimizer": False}
        wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        before, dtype = masters(wrapped), torch.bfloat16 if precision == "bf16" else torch.float32
    elif engine == "ddp":
        wrapped, dtype = DistributedDataParallel(model), torch.float32
    else:
        for part in (*model.children(),) if kind == "image-text" else ():
            fully_shard(part)
        wrapped, dtype = fully_shard(model), torch.float32
    torch.manual_seed(100 + comm.rank())
    forward = forward_of(kind, wrapped, dtype, autocast)
    out = contrastive_step(wrapped, loss, my_batch(), forward, micro_batches=K, scale=SCALE)
    assert out.metrics["loss"].shape == ()
    if engine.startswith("zero"):
        after = masters(wrapped)
        wrapped.destroy()
        return {name: (before[name] - after[name]).double() / LR for name in before}
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    full = {name: grad.full_tensor() if engine == "fsdp2" else grad for name, grad in grads.items()}
    return {name: value.double() for name, value in full.items()}


ENGINES = ("zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2")
GROUPS = (ENGINES[:2], ENGINES[2:4], ENGINES[4:])


def run_matrix(engines: tuple[str, ...], variant: str = "") -> list[str]:
    failed = []
    for engine, kind, precision, K in itertools.product(engines, MODELS, ("fp32", "bf16"), (1, 4)):
        if (engine, precision) == ("zero0", "bf16"):
            continue  # refused, see test_combination_that_deepspeed_gets_wrong_is_refused
        true = reference(kind, K, torch.float32, False, variant)
        allowed = 1e-6
        if precision == "bf16":
            whole = engine.startswith("zero")
            rounded = reference(kind, K, torch.bfloat16 if whole else torch.float32, not whole, variant)
            allowed = 2 * distance(rounded, true)
        error = distance(step_of(engine, kind, precision, K, variant), true)
        if not error <= allowed:
            failed.append(f"{engine} {kind} {precision} K={K}: {error:.2e} > {allowed:.2e}")
    return failed


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("engines", GROUPS, ids=" ".join)
def test_gradient_is_of_the_full_batch(engines: tuple[str, ...], size: int) -> None:
    for failed in run_ranks(run_matrix, size, engines):
        assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "engines"),
    [("offload", ENGINES[1:4]), *((variant, part) for variant in ("checkpointing", "lora") for part in GROUPS)],
)
def test_gradient_is_of_the_full_batch_also_with(variant: str, engines: tuple[str, ...]) -> None:
    for failed in run_ranks(run_matrix, 2, engines, variant):
        assert not failed, "\n".join(failed)


def test_batch_of_any_tree_is_split_along_its_first_dimension() -> None:
    tree = {"a": torch.arange(4), "b": [torch.ones(4, 2), (torch.zeros(4),)], "c": "same", "d": None}
    first, second = split(tree, 2)
    assert first["a"].tolist() == [0, 1]
    assert second["a"].tolist() == [2, 3]
    assert second["b"][0].shape == (2, 2)
    assert isinstance(first["b"][1], tuple)
    assert (first["c"], first["d"]) == ("same", None)
    with pytest.raises(ValueError, match=r"\(4, 2\) does not divide into 3"):
        split([torch.ones(4, 2)], 3)


# Ways to get it wrong


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
