"""Optimizers for `optim.factory` that look at what is left of an earlier stage when they are built."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from disco_ds.distributed.interrupt import Interrupts


def make_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Fail if an engine of an earlier stage is left: it would keep its memory while the next one is built."""
    left = [each for each in gc.get_objects() if type(each) is DeepSpeedEngine]
    assert not left, "an engine of an earlier stage is alive"
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def make_sgd_after_a_signal(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Send SIGTERM to this process if it is between two stages."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(getattr(handler, "__self__", None), Interrupts):
        os.kill(os.getpid(), signal.SIGTERM)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)
