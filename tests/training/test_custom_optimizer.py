"""Custom optimizers: optimizers with elementwise updates work at every ZeRO stage, other optimizers only at ZeRO 0."""

from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.config import OptimSettings, render_ds_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.training.engine import backward_and_step, build_engine, set_lr
from disco_ds.training.optimizer import build_optimizer
from helpers.dist import run_ranks
from helpers.optimizers import nadam
from helpers.towers import batches, distance, masters, tiny_config, write_tiny


def test_custom_optimizer_above_zero_0_must_be_elementwise(tmp_path: Path) -> None:
    def render(stage: int, **optim: Any) -> None:
        optim |= {"factory": "timm.optim:Adopt", "lr": 1e-3, "warmup_steps": 0}
        zero = {"zero_optimization": {"stage": stage}}
        render_ds_config(tiny_config(write_tiny(tmp_path), zero, optim=optim), 1)

    render(0)
    render(1, elementwise=True)
    with pytest.raises(ValueError, match=r"timm.optim:Adopt at ZeRO 1 .* optim.elementwise=true"):
        render(1)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("helpers.optimizers:nothing", "returned a NoneType"),
        ("helpers.optimizers:lbfgs", "unchanged parameter groups"),
        ("helpers.optimizers:merged", "unchanged parameter groups"),
        ("helpers.optimizers:nadamm", "did you mean nadam"),
        ("torch.optim:Adagrad", "rebuilds Adagrad"),
    ],
)
def test_unusable_factory_is_refused_by_name(factory: str, words: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"name": str(number), "params": [p]} for number, p in enumerate(parameters)]
    with pytest.raises(ValueError, match=words):
        build_optimizer(groups, OptimSettings(factory=factory, elementwise=True))


def train(model_file: str) -> list[str]:
    """Compare three steps on two ranks with plain torch in one process. Return descriptions of the failures."""

    def surrogate(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        batch = batches(2, 4, seed=step)[rank]
        image, text, scale, _ = model(batch["image"], batch["text"])
        return (image * text).sum() + (rank + 1) * image[:, 0].sum() + scale.sum() / 100

    failures = []
    for stage in range(4):
        config = tiny_config(
            model_file,
            {"zero_optimization": {"stage": stage}},
            global_batch=8,
            micro_batch=4,
            optim={
                "factory": "helpers.optimizers:nadam",
                "elementwise": True,
                "lr": 1.0,
                "warmup_steps": 0,
            },
        )
        torch.manual_seed(0)
        model = build_model(config.model)
        plain = build_model(config.model)
        plain.load_state_dict(model.state_dict())
        optimizer = nadam(
            [
                {
                    "params": [p],
                    "weight_decay": 0.2 * (p.ndim > 1 and not n.endswith("positional_embedding")),
                }
                for n, p in plain.named_parameters()
            ]
        )
        engine = build_engine(model, config.optim, render_ds_config(config, comm.size()))
        for step in range(3):
            set_lr(engine, 1e-2)
            backward_and_step(engine, iter([surrogate(engine, comm.rank(), step)]))
            optimizer.zero_grad()
            ((surrogate(plain, 0, step) + surrogate(plain, 1, step)) / 2).backward()
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
        error = distance(masters(engine), {n: p.detach() for n, p in plain.named_parameters()})
        if error > 1e-6:
            failures.append(f"ZeRO {stage}: off by {error}")
        engine.destroy()
    return failures


@pytest.mark.slow
def test_elementwise_optimizer_is_itself_at_every_stage(tmp_path: Path) -> None:
    for failures in run_ranks(train, 2, write_tiny(tmp_path)):
        assert not failures, "\n".join(failures)


def test_offload_that_needs_another_optimizer_is_refused(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": "/tmp"}
    cases = [
        ({"name": "adamw"}, nvme, "offload to nvme is refused"),
        ({"name": "adamw"}, {"device": "cpu", "ratio": 0.5}, "offload_optimizer .*ratio below 1"),
    ]
    for optim, offload, words in cases:
        zero = {"stage": 3, "offload_optimizer": offload}
        config = tiny_config(
            write_tiny(tmp_path),
            {"zero_optimization": zero},
            optim={**optim, "lr": 1e-3, "warmup_steps": 0},
        )
        with pytest.raises(ValueError, match=words):
            render_ds_config(config, 1)
