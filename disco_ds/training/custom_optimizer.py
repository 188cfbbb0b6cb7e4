"""Custom optimizers (optim.factory): build one, and test on two small matrices whether ZeRO changes its updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.names import load_custom

SHAPE = (128, 256)
"""Shape of a test matrix. It is large enough that optimizers do not treat the matrix as a special case."""


def build_custom(factory: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer.

    Raises:
        ValueError: If the factory cannot be imported, or does not return a torch optimizer for these groups.
    """
    optimizer = load_custom(factory)(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optim.factory={factory} returned a {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    if [group.get("name") for group in optimizer.param_groups] != [
        group["name"] for group in groups
    ]:
        raise ValueError(
            f"optim.factory={factory} returned an optimizer with other parameter groups; the factory must pass its "
            "argument to the optimizer unchanged"
        )
    return optimizer


def is_exact(factory: str, level: int) -> bool:
    """Return whether three steps under ZeRO give the same result as three steps without it.

    Args:
        factory: Value of optim.factory.
        level: ZeRO stage, 0 to 3.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step.
    """
    generator = torch.Generator().manual_seed(0)
    # tensors[0] contains the weights of two matrices, and tensors[1:] three gradients of each matrix.
    tensors = torch.randn(4, 2, *SHAPE, generator=generator).to(comm.local_device())
    whole = _train(factory, tensors, 0)
    if level == 0:
        return True
    # Simulate two ranks, each with a flat half of every matrix.
    halves = [_train(factory, half, level) for half in tensors.view(4, 2, 2, -1).unbind(2)]
    return torch.allclose(whole.view(2, 2, -1), torch.stack(halves, dim=1), rtol=1e-4)


def _train(factory: str, tensors: Tensor, level: int) -> Tensor:
    """Train the matrices tensors[0] with the gradients tensors[1:], and return the trained matrices.

    Each matrix has a separate parameter group.
    """
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors[0]]
    options = {"lr": 0.01, "weight_decay": 0.1, "lr_factor": 1.0, "muon": False}
    optimizer = build_custom(
        factory,
        [
            {"name": f"matrix {number}", "names": ["weight"], "params": [parameter], **options}
            for number, parameter in enumerate(parameters)
        ],
    )
    if level and isinstance(optimizer, torch.optim.Adagrad):
        # DeepSpeed 0.19 rebuilds Adagrad without the settings of the groups.
        optimizer = torch.optim.Adagrad(parameters, **optimizer.defaults)
    for gradients in tensors[1:]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        try:
            _step(optimizer, level)
        except Exception as error:  # custom code may raise anything
            raise ValueError(
                f"optim.factory={factory}: step() failed: {type(error).__name__}: {error}"
            ) from error
    return torch.stack([parameter.detach() for parameter in parameters])


def _step(optimizer: torch.optim.Optimizer, level: int) -> None:
    """Make one update as DeepSpeed 0.19 does: under ZeRO, it calls step() once for each parameter group."""
    if level == 0:
        optimizer.step()
        return
    groups = optimizer.param_groups
    parameters = [group["params"] for group in groups]
    for group, own in zip(groups, parameters, strict=True):
        # During step(), the optimizer has only this group at ZeRO 1 and 2. At ZeRO 3, the other groups are empty.
        if level < 3:
            optimizer.param_groups = [group]
        else:
            for each in groups:
                each["params"] = []
            group["params"] = own
        optimizer.step()
    optimizer.param_groups = groups
    for group, own in zip(groups, parameters, strict=True):
        group["params"] = own


def check_optimizer(settings: OptimSettings, level: int) -> None:
    """Refuse a custom optimizer whose updates ZeRO would change.

    Args:
        settings: Settings of the optimizer.
        level: ZeRO stage, 0 to 3.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step, or if ZeRO would change its updates.
    """
    factory = settings.factory
    if factory and not is_exact(factory, level):
        raise ValueError(
            f"optim.factory={factory} at ZeRO {level} is refused: ZeRO calls step() for one parameter group at "
            "a time and with flat parts of its parameters, which would change the updates; use deepspeed=zero0"
        )
