"""Compiled models whose forward is repeated: refused if they draw random numbers, otherwise exact."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from disco_ds.config import render_ds_config
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.models.clip import build_model
from disco_ds.models.compile_check import check_compiled, compile_if_exact, find_draws
from disco_ds.training.build import build
from disco_ds.training.engine import build_engine, set_lr
from disco_ds.training.step import train_step
from helpers.dist import run_ranks
from helpers.towers import batches, distance, masters, prepare, tiny_config, write_tiny

TIMM = {
    "timm_model_name": "vit_tiny_patch16_224",
    "timm_model_pretrained": False,
    "timm_proj": "linear",
    "image_size": 224,
}


def tower(model: str, **changes: Any) -> tuple[Any, Any]:
    config = tiny_config(model, {}, **changes)
    return config, build_model(config.model)


class Attention(nn.Module):
    """Dropout as an argument, which no module tells of."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.p if self.training else 0.0)


def add_attention(model: Any, p: float) -> None:
    model.ln_final = nn.Sequential(model.ln_final, Attention(p))


def test_draws_are_found_wherever_they_are(tmp_path: Path) -> None:
    plain = write_tiny(tmp_path)
    assert find_draws(tower(plain)[1]) == []
    assert find_draws(tower(plain, model__activation_checkpointing=True)[1]) == []
    _, patches = tower(plain, model__patch_dropout=0.5)
    patches.eval()
    assert find_draws(patches) == ["visual.patch_dropout"]
    assert find_draws(tower(plain, model__patch_dropout=0.5, model__lock_image=True)[1]) == [], (
        "it runs once"
    )
    _, model = tower(plain, model__activation_checkpointing=True)
    model.transformer.resblocks[1].mlp.append(nn.Dropout(0.1))
    assert find_draws(model) == ["transformer.resblocks.1.mlp.3"]
    for p, found in ((0.0, []), (0.1, ["ln_final.1"])):
        _, model = tower(plain)
        add_attention(model, p)
        assert find_draws(model) == found


def test_draws_of_a_timm_tower_are_found(tmp_path: Path) -> None:
    for number, (drops, expected) in enumerate(
        [
            ({}, False),
            ({"timm_drop_path": 0.2}, True),
            ({"timm_drop": 0.2}, True),
            ({"patch_dropout": 0.2}, True),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        model = write_tiny(tmp_path / str(number), **TIMM, **drops)
        assert bool(find_draws(tower(model)[1])) == expected, drops


def test_compiled_model_that_draws_is_refused_with_activation_checkpointing(tmp_path: Path) -> None:
    plain = write_tiny(tmp_path)
    draws = {"model__compile": True, "model__patch_dropout": 0.5}
    recompute = {"model__activation_checkpointing": True}
    check_compiled(*tower(plain, **draws, micro_batch=4))
    check_compiled(*tower(plain, model__compile=True, **recompute))
    check_compiled(*tower(plain, model__patch_dropout=0.5, **recompute))
    said = "activation checkpointing.* draws .* visual.patch_dropout.*model.compile=auto or false"
    with pytest.raises(ValueError, match=said):
        check_compiled(*tower(plain, **draws, **recompute))


def test_compiled_model_that_cannot_be_looked_into_is_refused(tmp_path: Path) -> None:
    changes = {"model__compile": True, "model__activation_checkpointing": True}
    config, model = tower(write_tiny(tmp_path), **changes)

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool((x > 0).any()) else x

    model.ln_final = nn.Sequential(model.ln_final, Looks())
    with pytest.raises(ValueError, match="may draw random numbers: tracing it failed"):
        check_compiled(config, model)


def choices(model: str, records: list[str]) -> tuple[list[tuple[bool, bool]], list[str]]:
    """Whether compile_if_exact compiled the towers, by its word and by the module; the log."""
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("disco_ds.models.compile_check").addHandler(handler)
    logging.getLogger("disco_ds.models.compile_check").setLevel(logging.INFO)
    found = []
    for changes, problem in (
        ({}, None),
        ({}, "no C compiler" if comm.rank() == 1 else None),
        ({"model__patch_dropout": 0.5, "micro_batch": 4}, None),
        ({"model__patch_dropout": 0.5, "model__activation_checkpointing": True}, None),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, None),
    ):
        config, module = tower(model, **{"global_batch": 16, "micro_batch": 8, **changes})
        assert config.model.compile == "auto"
        chosen = compile_if_exact(config, module, problem)
        found.append((chosen, module.visual._compiled_call_impl is not None))
    return found, records


def test_auto_compiles_on_all_ranks_or_none_and_the_log_says_why_not(tmp_path: Path) -> None:
    results = run_ranks(choices, 2, write_tiny(tmp_path), [])
    for found, _ in results:
        assert found == [(True, True), (False, False), (True, True), (False, False), (False, False)]
    reasons = [
        "are compiled",
        "no C compiler",
        "are compiled",
        "in visual.patch_dropout",
        "at ZeRO 3",
    ]
    assert all(reason in line for reason, line in zip(reasons, results[0][1], strict=True))
    assert results[1][1] == []


def test_auto_is_eager_on_a_cpu(tmp_path: Path) -> None:
    config, model = tower(write_tiny(tmp_path))
    assert config.model.compile == "auto"
    assert model.visual._compiled_call_impl is None


def refused(model: str, runs: str) -> str:
    changes = {
        "runs": runs,
        "model__compile": True,
        "model__patch_dropout": 0.5,
        "model__activation_checkpointing": True,
        "global_batch": 16,
        "micro_batch": 4,
    }
    config = tiny_config(model, {}, **changes)
    with ExitStack() as stack, pytest.raises(ValueError) as caught:
        build(config, None, stack)
    return str(caught.value)


def test_every_rank_refuses_before_there_is_a_run_folder(tmp_path: Path) -> None:
    said = run_ranks(refused, 2, write_tiny(tmp_path, 49_408), str(tmp_path / "runs"))
    assert len(set(said)) == 1
    assert "activation checkpointing repeats a forward that draws random numbers" in said[0]
    assert not (tmp_path / "runs").exists()


def change(model: str, count: int, compiled: bool, **changes: Any) -> dict[str, torch.Tensor]:
    """What one step of SGD takes from the weights, with twelve samples."""
    zero = {"zero_optimization": {"stage": 1}}
    config = tiny_config(
        model, zero, global_batch=12, micro_batch=12 // count, model__compile=compiled, **changes
    )
    torch.manual_seed(0)
    engine = build_engine(
        build_model(config.model), config.optim, render_ds_config(config, comm.size())
    )
    engine.train()
    set_lr(engine, 1000.0)
    before = masters(engine)
    whole = batches(1, 12)[0]
    parts = [{key: value.chunk(count)[k] for key, value in whole.items()} for k in range(count)]
    torch.manual_seed(1)
    train_step(engine, build_loss("disco"), parts, prepare, max_scale=1e9)
    after = masters(engine)
    engine.destroy()
    return {name: before[name] - after[name] for name in before}


def changes(model: str) -> list[float]:
    eager = change(model, 1, compiled=False)
    whole, cut = (change(model, count, compiled=True) for count in (1, 3))
    return [distance(whole, eager), distance(cut, whole)]


@pytest.mark.slow
def test_compiled_gradients_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    (found,) = run_ranks(changes, 1, write_tiny(tmp_path), timeout_s=500)
    assert max(found) < 1e-5, found
    assert min(found) > 0, "the graphs are different ones"


def changes_with_draws(model: str) -> tuple[list[float], int]:
    draws = {"model__patch_dropout": 0.5}
    plain, eager = change(model, 3, False), change(model, 3, False, **draws)
    compiled = change(model, 3, True, **draws)
    graphs = counters["stats"]["unique_graphs"]
    return [distance(compiled, eager), distance(plain, eager)], graphs


@pytest.mark.slow
def test_compiled_step_with_draws_equals_the_eager_one(tmp_path: Path) -> None:
    """The eager step repeats its draws exactly. Both forwards of a compiled tower run the same graph."""
    ((found, graphs),) = run_ranks(changes_with_draws, 1, write_tiny(tmp_path), timeout_s=500)
    assert found[0] < 1e-5 < 1e-2 < found[1], found
    assert graphs == 2, "one for each tower"
