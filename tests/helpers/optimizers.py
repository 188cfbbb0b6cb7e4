"""Factories of custom optimizers, as users write them."""

from typing import Any

import torch
from torch.optim import Optimizer


def nadam(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.NAdam(groups, betas=(0.8, 0.9), eps=1e-3, decoupled_weight_decay=True)


def lbfgs(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.LBFGS(groups[0]["params"])


def merged(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.SGD([parameter for group in groups for parameter in group["params"]])


def nothing(groups: list[dict[str, Any]]) -> None:
    """A factory that forgets to return the optimizer."""
