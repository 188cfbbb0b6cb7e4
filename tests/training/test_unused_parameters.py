"""If towers do not use all parameters in every micro-batch (LayerDrop), the gradient equals that of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disco_ds.config import render_ds_config
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.training.engine import build_engine
from helpers.dist import run_ranks
from helpers.precisions import ds_config
from helpers.step import train_step
from helpers.towers import (
    Batch,
    batches,
    build_towers,
    norm,
    prepare,
    tiny_config,
    write_down,
    write_tiny,
)

COUNT, STEPS = 4, 3


class LayerDrop(nn.Module):
    """A block that is skipped at random in half of the forward passes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.block(x, **options) if torch.rand(()) < 0.5 else x


def build(config: Any) -> nn.Module:
    model: Any = build_towers(config)
    model.visual.transformer.resblocks[1] = LayerDrop(model.visual.transformer.resblocks[1])
    return model.train()


def true_norm(config: Any, chunks: list[Batch], states: list[Tensor]) -> float:
    """Return the norm of the full batch's gradient, computed with one graph in one process."""
    model = build(config)
    features = []
    for chunk, state in zip(chunks, states, strict=True):
        torch.set_rng_state(state)
        features.append(model(chunk["image"], chunk["text"]))
    images, texts, scales, _ = zip(*features, strict=True)
    write_down("disco", torch.cat(images), torch.cat(texts), scales[0], None).backward()
    return norm({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def norms(path: str) -> None:
    for stage in range(4):
        config = tiny_config(path, ds_config("fp32", stage), micro_batch=8, global_batch=64)
        everything = batches(STEPS * 2 * COUNT, 8)
        model = build(config)
        engine = build_engine(model, config.optim, render_ds_config(config, 2))
        engine.train()
        # ZeRO 3 needs the same layers on every rank, so all ranks draw the same numbers.
        torch.manual_seed(5)
        for step in range(STEPS):
            whole = everything[step * 2 * COUNT :][: 2 * COUNT]
            mine = whole[comm.rank() * COUNT :][:COUNT]
            states: list[Tensor] = []

            def recording(batch: Batch, states: list[Tensor] = states) -> Any:
                states.append(torch.get_rng_state())
                return prepare(batch)

            # The learning rate is 0, so the weights stay as they are.
            out = train_step(engine, build_loss("disco"), mine, recording, max_scale=1e9)
            after = torch.get_rng_state()
            true = true_norm(config, whole, 2 * states[:COUNT])
            torch.set_rng_state(after)
            assert out.grad_norm is not None
            assert abs(out.grad_norm.item() / true - 1) < 1e-5, (stage, step, out.grad_norm, true)
        engine.destroy()


@pytest.mark.slow
def test_gradient_of_towers_that_skip_layers_is_that_of_one_process(tmp_path: Any) -> None:
    run_ranks(norms, 2, write_tiny(tmp_path))
