"""contrastive_step in custom loops computes the gradient of the full batch, with every engine and with dropout."""

import copy
import itertools
import re
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.custom_loop import contrastive_step, split
from helpers.custom_loop import (
    MODELS,
    PER_RANK,
    SCALE,
    WIDTH,
    D,
    ds_config,
    forward_of,
    make,
    my_batch,
)
from helpers.dist import run_ranks
from helpers.paths import ROOT
from helpers.towers import distance, masters, write_down

LR = 1000.0
"""LR is so large that the rounding of the weights does not matter."""


def reference(
    kind: str, K: int, dtype: torch.dtype, autocast: bool, variant: str = ""
) -> dict[str, Tensor]:
    """Compute the gradient of the global batch without contrastive_step. Collective.

    Each rank forwards its micro-batches in the order and with the random numbers of the step, and keeps their graphs.
    The features of the other ranks are constants. The gradients of all ranks are then added.
    """
    model = make(kind, variant).to(dtype).train()
    forward = forward_of(kind, model, dtype, autocast)
    torch.manual_seed(100 + comm.rank())
    parts = [forward(part) for part in split(my_batch(), K)[0]]
    own = [torch.cat([part[side] for part in parts]).double() for side in (0, 1)]
    scale = (
        parts[-1][2].double()
        if kind == "image-text"
        else torch.tensor([SCALE], dtype=torch.float64)
    )
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
        if not parameter.requires_grad:  # a weight that LoRA does not train
            continue
        assert parameter.grad is not None
        total = comm.all_reduce_sum(parameter.grad.double())
        # Every rank has the complete gradient of the scale, so average it.
        found[name] = total / comm.size() if name == "log_scale" else total
    return found


def step_of(engine: str, kind: str, precision: str, K: int, variant: str = "") -> dict[str, Tensor]:
    """Run one contrastive_step, and return the gradient that it leaves in the parameters or applies to them."""
    model = make(kind, variant).train()
    loss = build_loss("disco_fused", tile=(8, 8))
    autocast = precision == "bf16" and not engine.startswith("zero")
    if engine.startswith("zero"):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        offload = {"offload_optimizer": {"device": "cpu"}} if variant == "offload" else {}
        config = ds_config(int(engine[4]), precision, K, **offload) | {
            "zero_force_ds_cpu_optimizer": False
        }
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
Case = tuple[str, str, str, int]
"""(engine, model, precision, micro-batches)."""


def all_cases(engines: tuple[str, ...]) -> list[Case]:
    cases = itertools.product(engines, MODELS, ("fp32", "bf16"), (1, 4))
    # bf16 at ZeRO 0 is refused, see test_engine_that_would_apply_another_gradient_is_refused.
    return [case for case in cases if (case[0], case[2]) != ("zero0", "bf16")]


def run_cases(cases: list[Case], variant: str = "") -> list[str]:
    failed = []
    for engine, kind, precision, K in cases:
        true = reference(kind, K, torch.float32, False, variant)
        allowed = 1e-6
        if precision == "bf16":
            whole = engine.startswith("zero")
            rounded = reference(
                kind, K, torch.bfloat16 if whole else torch.float32, not whole, variant
            )
            allowed = 2 * distance(rounded, true)
        error = distance(step_of(engine, kind, precision, K, variant), true)
        if not error <= allowed:
            failed.append(f"{engine} {kind} {precision} K={K}: {error:.2e} > {allowed:.2e}")
    return failed


def check(size: int, cases: list[Case], variant: str = "") -> None:
    for failed in run_ranks(run_cases, size, cases, variant):
        assert not failed, "\n".join(failed)


def test_gradient_is_of_the_full_batch() -> None:
    check(
        2,
        [
            *(("zero1", kind, "fp32", K) for kind, K in (("image-text", 4), ("text-text", 1))),
            *(("zero3", kind, "fp32", 4) for kind in MODELS),
            ("zero0", "text-text", "fp32", 4),
            ("zero2", "image-text", "bf16", 4),
            *((engine, "image-text", "fp32", 4) for engine in ("ddp", "fsdp2")),
            *((engine, "text-text", "bf16", 4) for engine in ("ddp", "fsdp2")),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_gradient_is_of_the_full_batch_in_every_engine(size: int) -> None:
    check(size, all_cases(ENGINES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "engines"),
    [("offload", ENGINES[1:4]), ("checkpointing", ENGINES), ("lora", ENGINES)],
)
def test_gradient_is_of_the_full_batch_also_with(variant: str, engines: tuple[str, ...]) -> None:
    check(2, all_cases(engines), variant)


def tokens(texts: Sequence[str]) -> Tensor:
    return torch.tensor([[sum(map(ord, word)) * 7 % 97 for word in text.split()] for text in texts])


QUESTIONS = tokens([f"question {i} about {i * i}" for i in range(16)])
ANSWERS = tokens([f"answer {i} is {i * 3}" for i in range(16)])
BATCHES: dict[str, tuple[Any, Callable[[Any], tuple[Any, Any]]]] = {
    "dict": ({"q": QUESTIONS, "a": ANSWERS}, lambda part: (part["q"], part["a"])),
    "UserDict": (UserDict(q=QUESTIONS, a=ANSWERS), lambda part: (part["q"], part["a"])),
    "list, by torch's collate": (
        default_collate(list(zip(QUESTIONS, ANSWERS, strict=True))),
        lambda part: (part[0], part[1]),
    ),
    "tuple of dicts": (
        ({"ids": QUESTIONS}, {"ids": ANSWERS, "mask": None}),
        lambda part: (part[0]["ids"], part[1]["ids"]),
    ),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("disco_fused", {}),
        ("siglip", {}),
        ("disco_fused", {"same_group": "positives"}),
        ("siglip", {"same_group": "ignored"}),
    ],
)
@pytest.mark.parametrize("form", BATCHES)
def test_gradient_is_of_the_full_batch_in_any_form(
    form: str, name: str, options: dict[str, str]
) -> None:
    batch, sides = BATCHES[form]
    torch.manual_seed(0)
    tower = nn.EmbeddingBag(97, D)
    scale, bias = torch.tensor([5.0]), torch.tensor([-2.0])
    seen = []

    def forward(part: Any) -> tuple[Tensor, ...]:
        features = [F.normalize(tower(side), dim=-1) for side in sides(part)]
        seen.append(len(features[0]))
        return *features, scale, bias

    group_id = torch.arange(16) % 7
    out = contrastive_step(
        tower, build_loss(name, **options), batch, forward, micro_batches=4, group_id=group_id
    )
    assert set(seen) == {4}
    true = copy.deepcopy(tower).double()
    true.zero_grad()
    rows = [F.normalize(true(side), dim=-1) for side in (QUESTIONS, ANSWERS)]
    same = group_id[:, None] == group_id
    expected = write_down(name, *rows, scale.double(), bias.double(), same, **options)
    expected.backward()
    assert abs(out.metrics["loss"].item() - expected.item()) < 1e-6
    assert distance({"weight": tower.weight.grad}, {"weight": true.weight.grad}) < 1e-6


def train_as_in_the_manual() -> float:
    class MyClip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.unused = nn.Linear(4, D), nn.Linear(4, 4)
            self.logit_scale = nn.Parameter(torch.ones(1))

        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
            return self.tower(image), self.tower(text), self.logit_scale.exp()

    page = (ROOT / "docs" / "custom_loop.md").read_text()
    (code,) = re.findall(r"```python\n(model = DistributedDataParallel.*?)```", page, re.DOTALL)
    assert "`MyClip.forward` returns `self.logit_scale.exp()`" in page
    code = code.replace("MyClip()", "clip, find_unused_parameters=True")
    clip = MyClip()
    optimizer = torch.optim.SGD(clip.parameters(), lr=0.1)
    loader = [{"image": torch.randn(8, 4), "text": torch.randn(8, 4)} for _ in range(2)]
    names = {"F": F, "build_loss": build_loss, "contrastive_step": contrastive_step, "torch": torch}
    names |= {"DistributedDataParallel": DistributedDataParallel, "clip": clip}
    exec(code, names | {"optimizer": optimizer, "loader": loader})
    return clip.logit_scale.item()


def test_example_of_the_manual_runs_with_unused_parameters() -> None:
    assert run_ranks(train_as_in_the_manual, 1)[0] != 1


def test_batch_of_any_tree_is_split_along_its_first_dimension() -> None:
    tree = {
        "a": torch.arange(4),
        "b": [torch.ones(4, 2), (torch.zeros(4),)],
        "d": None,
    }
    (first, second), rows = split(tree, 2)
    assert rows == 4
    assert first["a"].tolist() == [0, 1]
    assert second["a"].tolist() == [2, 3]
    assert second["b"][0].shape == (2, 2)
    assert isinstance(first["b"][1], tuple)
    assert first["d"] is None
    (first, _), _ = split(Named(torch.ones(4, 2), None), 2)
    assert (type(first), first.features.shape, first.number) == (Named, (2, 2), None)


class Named(NamedTuple):
    features: Tensor
    number: None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([torch.ones(4, 2)], r"\[4\] samples cannot be divided evenly into 3"),
        ({"q": torch.tensor(3.0)}, "a Tensor in the batch cannot be divided"),
        ({"q": torch.ones(0)}, r"\[0\] samples cannot"),
        ({"q": [], "a": None}, r"\[\] samples cannot"),
        ({"q": ["a question"] * 3}, "a str in the batch cannot"),
        ({"q": QUESTIONS[:12], "a": torch.ones(9)}, r"\[9, 12\] samples cannot"),
        ({"q": {"a": np.ones(9)}}, "a ndarray in the batch cannot"),
    ],
)
def test_batch_that_does_not_divide_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(batch, 3)


def test_forward_that_returns_rows_of_other_samples_is_refused() -> None:
    """If a side of the batch is a list of samples, it is mistaken for a list of fields.

    Each forward then gets all samples, but only a part of the tokens of each sample.
    """
    tower = nn.EmbeddingBag(97, D)

    def forward(part: Any) -> tuple[Tensor, Tensor]:
        first, second = (F.normalize(tower(torch.stack(side)), dim=-1) for side in part)
        return first, second

    batch = list(QUESTIONS), list(ANSWERS)
    with pytest.raises(ValueError, match="returned 32 rows for 2 micro-batches of 2 samples"):
        contrastive_step(tower, build_loss("disco"), batch, forward, micro_batches=2, scale=SCALE)
    contrastive_step(tower, build_loss("disco"), batch, forward, scale=SCALE)
    index = torch.arange(8)
    with pytest.raises(ValueError, match=r"\[8, 16\] samples cannot"):
        contrastive_step(
            tower,
            build_loss("disco"),
            {"q": QUESTIONS},
            forward,
            micro_batches=2,
            scale=SCALE,
            index=index,
        )


@pytest.mark.slow
def test_compiled_towers_replay_their_dropout() -> None:
    """The forward passes with and without a graph are compiled separately, but must draw the same masks."""
    torch.manual_seed(0)
    tower = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, D)
    ).train()
    compiled = torch.compile(tower)
    batch = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    first: list[Tensor] = []

    def forward(part: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        sides = tuple(F.normalize(compiled(side), dim=-1) for side in part)
        first.extend(side.detach() for side in sides if len(first) < 8)
        return sides

    torch.manual_seed(3)
    contrastive_step(
        compiled, build_loss("disco_fused"), batch, forward, micro_batches=4, scale=SCALE
    )
    got = {name: parameter.grad.clone() for name, parameter in tower.named_parameters()}
    tower.zero_grad()
    torch.manual_seed(3)
    parts = [[F.normalize(compiled(side), dim=-1) for side in part] for part in split(batch, 4)[0]]
    rows = [torch.cat([part[side] for part in parts]) for side in (0, 1)]
    write_down("disco_fused", *rows, torch.tensor([SCALE]), None).backward()
    true = {name: parameter.grad for name, parameter in tower.named_parameters()}
    assert (
        distance(
            {"rows": torch.cat(first)},
            {"rows": torch.cat([side for part in parts for side in part])},
        )
        < 1e-6
    )
    assert distance(got, true) < 1e-5
