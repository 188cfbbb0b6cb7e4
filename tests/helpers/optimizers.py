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


def merged(groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.SGD([parameter for group in groups for parameter in group["params"]])


def failing(groups: list[dict[str, Any]]) -> Optimizer:
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def fail(*given: Any) -> None:
        raise RuntimeError("no step")

    optimizer.register_step_pre_hook(fail)
    return optimizer


class Counter(torch.optim.SGD):
    """Its learning rate depends on the number of calls of step()."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] /= self.calls
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def nothing(groups: list[dict[str, Any]]) -> None:
    """A factory that forgets to return the optimizer."""
