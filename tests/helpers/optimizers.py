"""Factories of custom optimizers, as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def nadam(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.NAdam(groups, betas=(0.8, 0.9), eps=1e-3, decoupled_weight_decay=True)


def adafactor(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.Adafactor(groups)


def clipped(groups: list[dict[str, Any]]) -> Optimizer:
    """Clip by the norm of all parameters of this optimizer, which under ZeRO is not that of the model."""
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def clip(optimizer: Optimizer, *given: Any) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def lbfgs(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.LBFGS(groups[0]["params"])


def nothing(groups: list[dict[str, Any]]) -> None:
    """A factory that forgets to return the optimizer."""
