"""Optimizers for `optim.factory` that check or interrupt a run between two stages."""

import gc
import os
import signal
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from disco_ds.distributed.launcher import Interrupts


def make_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build SGD. Fail if the engine of an earlier stage still exists, because it would keep its memory."""
    left = [each for each in gc.get_objects() if type(each) is DeepSpeedEngine]
    assert not left, "an engine of an earlier stage is alive"
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def make_sgd_after_a_signal(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build SGD. If the run is between two stages, send SIGTERM to this process."""
    if is_between_stages():
        os.kill(os.getpid(), signal.SIGTERM)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def make_sgd_once(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build SGD. If the run is between two stages, fail as if a file could not be read."""
    if is_between_stages():
        raise ValueError("the disk does not answer")
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def is_between_stages() -> bool:
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(getattr(handler, "__self__", None), Interrupts)


KILLED_AT = "KILLED_AT"
"""Environment variable: when AdamWUntilKilled kills its process. A step number, or "border" for between two stages."""


class AdamWUntilKilled(torch.optim.AdamW):
    """AdamW that kills its process where KILLED_AT says: after the update of that step, or between two stages."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__(groups, lr=0.0)
        if os.environ.get(KILLED_AT) == "border" and is_between_stages():
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, closure: Any = None) -> Any:
        super().step()
        steps = {int(state.get("step", 0)) for state in self.state.values()}
        if os.environ.get(KILLED_AT, "") in [str(step) for step in steps]:
            os.kill(os.getpid(), signal.SIGKILL)
