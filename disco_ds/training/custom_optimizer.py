"""Custom optimizers (optim.factory): build one, and find out on a small matrix what ZeRO could do with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from disco_ds.config import Config
from disco_ds.config.ds_config import stage
from disco_ds.distributed import comm
from disco_ds.names import load_custom

SHAPE = (128, 256)
"""Shape of the matrix, so large that optimizers do not treat it as an exception."""


class Trial(NamedTuple):
    """What a trial of a custom optimizer has shown."""

    is_elementwise: bool
    """Whether it updates the flat halves of a matrix as it updates the matrix."""
    num_states: float
    """How many numbers it keeps for each trained element."""


def build_custom(factory: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer.

    Raises:
        ValueError: If the factory cannot be imported or does not return a torch optimizer.
    """
    optimizer = load_custom(factory)(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optim.factory={factory} returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    return optimizer


def try_custom(factory: str) -> Trial:
    """Train a matrix and its flat halves for three steps.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step.
    """
    generator = torch.Generator().manual_seed(0)
    value, *gradients = torch.randn(4, *SHAPE, generator=generator).to(comm.local_device())
    whole, num_states = _train(factory, value, gradients)
    # Each half has an optimizer of its own, as under ZeRO each rank does.
    halves = [
        _train(factory, half, [gradient.view(2, -1)[number] for gradient in gradients])[0]
        for number, half in enumerate(value.view(2, -1))
    ]
    return Trial(torch.allclose(whole.view(2, -1), torch.stack(halves), rtol=1e-4), num_states)


def _train(factory: str, value: Tensor, gradients: list[Tensor]) -> tuple[Tensor, float]:
    """Return the trained tensor, and how many numbers the optimizer keeps for each element."""
    parameter = nn.Parameter(value.clone())
    group = {"name": "matrices", "params": [parameter], "names": ["weight"], "lr_factor": 1.0}
    optimizer = build_custom(factory, [group | {"weight_decay": 0.1, "muon": False}])
    optimizer.param_groups[0]["lr"] = 0.01
    for gradient in gradients:
        parameter.grad = gradient.clone()
        try:
            optimizer.step()
        except Exception as error:  # custom code may raise anything
            raise ValueError(
                f"optim.factory={factory}: step() failed: {type(error).__name__}: {error}"
            ) from error
    states = optimizer.state[parameter].values()
    held = sum(state.numel() for state in states if isinstance(state, Tensor) and state.dim())
    return parameter.detach(), held / value.numel()


def check_optimizer(config: Config) -> None:
    """Refuse a custom optimizer that ZeRO would turn into another optimizer.

    Raises:
        ValueError: If it depends on the shapes of the parameters, or cannot be built or make a step.
    """
    factory, level = config.optim.factory, stage(config.deepspeed)
    if factory and not try_custom(factory).is_elementwise and level > 0:
        raise ValueError(
            f"optim.factory={factory} at ZeRO {level} is refused: it updates a matrix and the flat halves "
            "of this matrix differently, but ZeRO's optimizers see flat parts; use deepspeed=zero0"
        )
