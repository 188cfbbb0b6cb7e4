"""Custom optimizers (optim.factory): build one, and test on two small matrices whether it is the same under ZeRO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.config import OptimSettings
from disco_ds.distributed import comm
from disco_ds.names import load_custom

SHAPE = (128, 256)
"""Shape of a test matrix. It is so large that optimizers do not treat it as a special case."""


def build_custom(factory: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer.

    Raises:
        ValueError: If the factory cannot be imported, or does not return a torch optimizer of these groups.
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
            f"optim.factory={factory} returned an optimizer with other parameter groups: pass it the groups unchanged"
        )
    return optimizer


def is_exact(factory: str, level: int) -> bool:
    """Return whether three steps under ZeRO give the same result as three steps without it.

    Args:
        factory: Setting of the optimizer.
        level: ZeRO stage, 0 to 3.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step.
    """
    generator = torch.Generator().manual_seed(0)
    # The weights and three gradients of two matrices, one in each parameter group.
    tensors = torch.randn(4, 2, *SHAPE, generator=generator).to(comm.local_device())
    whole = _train(factory, tensors, 0)
    if level == 0:
        return True
    # Each of two ranks has a flat half of every matrix.
    halves = [_train(factory, half, level) for half in tensors.view(4, 2, 2, -1).unbind(2)]
    return torch.allclose(whole.view(2, 2, -1), torch.stack(halves, dim=1), rtol=1e-4)


def _train(factory: str, tensors: Tensor, level: int) -> Tensor:
    """Train the first tensors, one in each parameter group, with the others as gradients."""
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
        # DeepSpeed 0.19 builds it again, without the settings of the groups.
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
    """Make a step as DeepSpeed 0.19 does, which under ZeRO calls step() once for each group."""
    if level == 0:
        optimizer.step()
        return
    groups = optimizer.param_groups
    parameters = [group["params"] for group in groups]
    for group, own in zip(groups, parameters, strict=True):
        # At ZeRO 1 and 2, the optimizer has only this group meanwhile. At ZeRO 3, the other groups are empty.
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
    """Refuse a custom optimizer that ZeRO would turn into another optimizer.

    Args:
        settings: Settings of the optimizer.
        level: ZeRO stage, 0 to 3.

    Raises:
        ValueError: If the optimizer cannot be built or cannot make a step, or if ZeRO would change its updates.
    """
    factory = settings.factory
    if factory and not is_exact(factory, level):
        raise ValueError(
            f"optim.factory={factory} at ZeRO {level} is refused: ZeRO calls step() for flat parts of one parameter "
            "group at a time, which would change the updates; use deepspeed=zero0"
        )
