"""Schedules of runs whose global batch does not change."""

from disco_ds.config import Schedule


def plain(global_batch: int, num_steps: int, first_step: int = 0) -> Schedule:
    return Schedule(
        global_batch,
        num_steps,
        num_steps,
        num_steps * global_batch,
        global_batch,
        first_step,
        first_step * global_batch,
        global_batch,
    )
