"""contrastive_step in loops that are not ours: the full batch's gradient under every engine, at any ranks and
micro-batches, dropout replayed."""

from __future__ import annotations

import itertools

import deepspeed
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.own_loop import contrastive_step, split
from helpers.dist import run_ranks
from helpers.own_loop import MODELS, PER_RANK, SCALE, ds_config, forward_of, make, my_batch
from helpers.towers import distance, masters

LR = 1000.0
"""The change of a weight then dwarfs the rounding of the weight it is read from."""


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
