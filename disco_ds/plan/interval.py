"""How often to save: between saves that stall the run and failures that make it repeat steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disco_ds.config import Config
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import count_checkpoint
from disco_ds.plan.towers import Towers


@dataclass(frozen=True)
class SaveInterval:
    """When to save, for a given time between failures."""

    num_bytes: int
    """Size of a checkpoint, without a loss's state per sample."""
    write_s: float
    """Time until a checkpoint is on the disk."""
    stall_s: float
    """How long a save stops the training: until the state is copied, or without checkpoint.asynchronous written."""
    every_s: float
    """Time between two saves."""
    lost: float
    """Fraction of the time that goes to saves and to steps that are repeated; restarts come on top."""


def plan_interval(config: Config, ranks: int, towers: Towers, assumed: Assumptions) -> SaveInterval:
    """The interval by Daly's estimate, a refinement of Young's sqrt(2 stall x time between failures).

    It is no shorter than a checkpoint takes to be written.

    Args:    assumed: with failure_hours.
    Source:  Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A higher order
             estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37.
    """
    assert assumed.failure_hours is not None
    failure_s, num_bytes = 3600 * assumed.failure_hours, sum(count_checkpoint(config, towers))
    write_s = num_bytes / (1e9 * assumed.save_rate)
    stall_s = num_bytes / ranks / (1e9 * assumed.copy_rate) if config.checkpoint.asynchronous else write_s
    ratio, every_s = stall_s / (2 * failure_s), failure_s
    if ratio < 1:
        every_s = math.sqrt(2 * stall_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
    every_s = max(every_s, write_s)
    # A failure repeats half an interval, and what was done since a copy that was not yet written.
    repeated_s = every_s / 2 + (write_s if config.checkpoint.asynchronous else 0.0)
    return SaveInterval(num_bytes, write_s, stall_s, every_s, stall_s / every_s + repeated_s / failure_s)
