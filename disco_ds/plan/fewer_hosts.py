"""Check a recipe at every number of ranks on which `disco-ds launch --min-hosts` may continue a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from disco_ds.config import Config
from disco_ds.data.sources.load import count_slots, load_sources


def possible_ranks(slots: Sequence[int], at_least: int) -> list[int]:
    """Return every total number of ranks on any selection of `at_least` or more hosts.

    Args:
        slots: Number of ranks on each host.
        at_least: Minimum number of hosts.
    """
    sums = {(0, 0)}
    for ranks in slots:
        sums |= {(hosts + 1, total + ranks) for hosts, total in sums}
    return sorted({total for hosts, total in sums if hosts >= at_least})


def check_fewer_hosts(config: Config, slots: Sequence[int], at_least: int) -> str:
    """Check that the batch and the data order can be divided evenly among every possible number of ranks.

    Args:
        config: The recipe.
        slots: Number of ranks on each host.
        at_least: Minimum number of hosts.

    Returns:
        The numbers of ranks that the run may continue on, as text.

    Raises:
        ValueError: If the global batch or data.slots cannot be divided evenly among one of these numbers of ranks (the
            message contains the required multiples), if the ds_config does not allow a change of the number of ranks,
            or if the data cannot be opened.
    """
    if config.ranks not in (None, sum(slots)):
        config.num_micro_batches(sum(slots))  # raises: the recipe is for another number of ranks
    if (config.deepspeed.get("zero_optimization") or {}).get("round_robin_gradients"):
        raise ValueError(
            "--min-hosts cannot be used with zero_optimization.round_robin_gradients, because such a run can only be "
            "resumed on the same number of ranks; remove that key"
        )
    num_slots = count_slots(config.data, load_sources(config.data), ranks=1)
    ranks = possible_ranks(slots, at_least)
    multiple = math.lcm(*ranks)
    problems = [
        f"global_batch {stage.global_batch} must be a multiple of "
        f"{multiple * stage.micro_batch:,} ({multiple:,} x micro_batch {stage.micro_batch})"
        for stage in config.stage_configs
        if stage.global_batch % (multiple * stage.micro_batch)
    ]
    if num_slots % multiple:
        problems.append(f"data.slots {num_slots} must be a multiple of {multiple:,}")
    if problems:
        raise ValueError(
            f"--min-hosts {at_least}: the run may continue on {_join(ranks)} ranks, so "
            f"{' and '.join(problems)}; or raise --min-hosts"
        )
    return _join(ranks)


def _join(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    if len(first) > 8:
        first = [*first[:3], "..."]
    return f"{', '.join(first)} or {last}" if first else last
