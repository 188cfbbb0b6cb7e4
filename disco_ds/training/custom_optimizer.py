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
    halves = [_train(factory, half)[0] for half in tensors.view(4, 2, -1).unbind(1)]
    return torch.allclose(_train(factory, tensors)[0].view(2, -1), torch.stack(halves), rtol=1e-4)


def keeps_state_in_groups(factory: str) -> bool:
    """Return whether a step changes the settings of a parameter group, for example counts steps there.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step.
    """
    _, before, after = _train(factory, torch.ones(2, *SHAPE, device=comm.local_device()))
    return before != after


def _train(factory: str, tensors: Tensor) -> tuple[Tensor, str, str]:
    """Train the first tensor with the others as gradients.

    Returns:
        The trained tensor, and the settings of its parameter group before and after.
    """
    parameter = nn.Parameter(tensors[0].clone())
    group = {"name": "matrices", "params": [parameter], "names": ["weight"], "lr_factor": 1.0}
    optimizer = build_custom(factory, [group | {"weight_decay": 0.1, "muon": False}])
    settings = optimizer.param_groups[0]
    settings["lr"] = 0.01
    before = str({key: value for key, value in settings.items() if key != "params"})
    for gradient in tensors[1:]:
        parameter.grad = gradient.clone()
        try:
            optimizer.step()
        except Exception as error:  # custom code may raise anything
            raise ValueError(
                f"optim.factory={factory}: step() failed: {type(error).__name__}: {error}"
            ) from error
    after = str({key: value for key, value in settings.items() if key != "params"})
    return parameter.detach(), before, after


def check_optimizer(settings: OptimSettings, level: int) -> None:
    """Refuse a custom optimizer that ZeRO would turn into another optimizer.

    Args:
        settings: Settings of the optimizer.
        level: ZeRO stage, 0 to 3.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step; if ZeRO is on and the updates
            depend on the shapes of the parameters; or at ZeRO 3, if the optimizer keeps state in its groups.
    """
    factory = settings.factory
    if factory and not is_elementwise(factory) and level > 0:
        raise ValueError(
            f"optim.factory={factory} at ZeRO {level} is refused: it updates a matrix and the flat halves "
            "of this matrix differently, but ZeRO's optimizers see flat parts; use deepspeed=zero0"
        )
    # DeepSpeed 0.19 calls step() once for each part of the parameters, and every call changes all groups.
    if factory and level == 3 and keeps_state_in_groups(factory):
        raise ValueError(
            f"optim.factory={factory} at ZeRO 3 is refused: it keeps state, such as the number of steps, in its "
            "parameter groups, which DeepSpeed would change several times per step; use deepspeed=zero2"
        )
