"""Custom optimizers (optim.factory): build one, and test on a small matrix whether ZeRO may split its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.names import load_custom

SHAPE = (128, 256)
"""Shape of the test matrix. It is so large that optimizers do not treat it as a special case."""


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


def is_elementwise(factory: str) -> bool:
    """Return whether three steps on the flat halves of a matrix give the same result as three steps on the matrix.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, *SHAPE, generator=generator).to(comm.local_device())
    # Each half has a separate optimizer, as each rank has under ZeRO.
    halves = [_train(factory, half) for half in tensors.view(4, 2, -1).unbind(1)]
    return torch.allclose(_train(factory, tensors).view(2, -1), torch.stack(halves), rtol=1e-4)


def _train(factory: str, tensors: Tensor) -> Tensor:
    """Train the first tensor with the others as gradients."""
    parameter = nn.Parameter(tensors[0].clone())
    group = {"name": "matrices", "params": [parameter], "names": ["weight"], "lr_factor": 1.0}
    optimizer = build_custom(factory, [group | {"weight_decay": 0.1, "muon": False}])
    optimizer.param_groups[0]["lr"] = 0.01
    for gradient in tensors[1:]:
        parameter.grad = gradient.clone()
        try:
            optimizer.step()
        except Exception as error:  # custom code may raise anything
            raise ValueError(
                f"optim.factory={factory}: step() failed: {type(error).__name__}: {error}"
            ) from error
    return parameter.detach()


def check_optimizer(settings: OptimSettings, level: int) -> None:
    """Refuse a custom optimizer that ZeRO would turn into another optimizer.

    Args:
        settings: Settings of the optimizer.
        level: ZeRO stage, 0 to 3.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step, or if ZeRO is on and the updates
            depend on the shapes of the parameters.
    """
    factory = settings.factory
    if factory and not is_elementwise(factory) and level > 0:
        raise ValueError(
            f"optim.factory={factory} at ZeRO {level} is refused: it updates a matrix and the flat halves "
            "of this matrix differently, but ZeRO's optimizers see flat parts; use deepspeed=zero0"
        )
