"""The exponential moving average (EMA) of the trained weights.

The average is stored as an additional optimizer state. Therefore DeepSpeed shards and saves it, and a run that is
resumed with a different number of ranks or ZeRO stage restores it like every other state. Buffers are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from disco_ds.checkpoints.state import AVERAGE
from disco_ds.config import EmaSettings
from disco_ds.distributed import comm
from disco_ds.distributed.deepspeed_quirks import refresh_weights
from disco_ds.training.engine import Engine

STEPS = "ema_steps"
"""Name of the optimizer state that counts the updates since the average began."""
CHUNK = 2**24
"""Number of rows of a tensor that are swapped at a time. A row of a flat tensor is one element."""


@torch.no_grad()
def update_average(engine: Engine, settings: EmaSettings) -> None:
    """Update the average. Call this after each step that has updated the weights.

    The first call sets the average to the weights. Later calls change it every settings.every_steps steps, with a decay
    that is low at first and rises to settings.decay.
    """
    weights = _find_weights(engine)
    states = [engine.basic_optimizer.state[weight] for weight in weights]
    step = states[0].get(STEPS, 0) + 1
    if AVERAGE not in states[0]:
        for weight, state in zip(weights, states, strict=True):
            state[AVERAGE] = weight.clone()
    elif step % settings.every_steps == 0:
        decay = min(settings.decay, (1 + step) / (10 + step)) ** settings.every_steps
        torch._foreach_lerp_([state[AVERAGE] for state in states], weights, 1 - decay)
    for state in states:
        state[STEPS] = step


def has_average(engine: Engine) -> bool:
    """Return whether the engine has an average."""
    return any(AVERAGE in state for state in engine.basic_optimizer.state.values())


def drop_average(engine: Engine) -> None:
    """Remove the average, if the loaded checkpoint contained one."""
    for state in engine.basic_optimizer.state.values():
        state.pop(AVERAGE, None)
        state.pop(STEPS, None)


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """Give the model the averaged weights during the `with` block. Collective.

    After an error on a single rank, the weights are not restored. Restoring them is a collective operation, which that
    rank would start alone, and the error ends the run anyway.
    """
    _swap(engine)
    try:
        yield
    except comm.AgreedError:
        _swap(engine)
        raise
    _swap(engine)


@torch.no_grad()
def _swap(engine: Engine) -> None:
    """Swap the weights with their average in place, in small pieces. Collective."""
    for weight in _find_weights(engine):
        average = engine.basic_optimizer.state[weight][AVERAGE]
        for mine, other in zip(weight.split(CHUNK), average.split(CHUNK), strict=True):
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)
    refresh_weights(engine)


def _find_weights(engine: Engine) -> list[Tensor]:
    """Return the tensors that the optimizer of this rank updates. They are the keys of its states."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [weight for group in engine.basic_optimizer.param_groups for weight in group["params"]]
