"""Check a recipe at every number of ranks that `disco-ds launch --min-hosts` may lead to."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence

from disco_ds.config import Config
from disco_ds.data.sources.load import count_slots, load_sources
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.towers import trace


def possible_ranks(slots: Sequence[int], at_least: int) -> list[int]:
    """Return every total number of ranks that `at_least` or more of the hosts can have.

    Args:
        slots: Number of ranks on each host.
        at_least: Minimum number of hosts.
    """
    sums = {(0, 0)}
    for ranks in slots:
        sums |= {(hosts + 1, total + ranks) for hosts, total in sums}
    return sorted({total for hosts, total in sums if hosts >= at_least})


def check_fewer_hosts(
    config: Config, slots: Sequence[int], at_least: int, gib: float | None
) -> str:
    """Check a run at every possible number of ranks on `at_least` or more of its hosts.

    Args:
        config: The recipe.
        slots: Number of ranks on each host.
        at_least: Minimum number of hosts.
        gib: Memory per GPU in GiB; None if unknown.

    Returns:
        The result, as a sentence.

    Raises:
        ValueError: If a number of ranks does not divide the batch or the slots of the data order
            (the message has the required multiples), if the memory does not suffice, or if the data
            cannot be opened.
    """
    if config.ranks not in (None, sum(slots)):
        config.num_micro_batches(sum(slots))  # raises: the recipe is for another number of ranks
    sources = load_sources(config.data)
    num_samples = sum(sum(source.sizes) for source in sources)
    ranks = possible_ranks(slots, at_least)
    _refuse_undivided(config, ranks, at_least, count_slots(config.data, sources, ranks=1))
    result = f"the batch and the data slots are divisible by {_join(ranks)} ranks"
    if gib is None:
        return f"{result}; memory is not checked because this host has no NVIDIA GPU"
    free = config.model_copy(update={"ranks": None})
    assumed = Assumptions(num_samples=num_samples, per_host=max(slots))
    try:
        towers = trace(config, config.micro_batch)
        needs = {n: plan_memory(free, n, towers, assumed).total / GIB for n in ranks}
    except ValueError as error:
        # For example a custom model that cannot be traced, or a custom loss of unknown cost.
        return f"{result}; memory is not checked: {error}"
    worst = max(needs, key=lambda n: needs[n])
    if needs[worst] > gib:
        raise ValueError(
            f"--min-hosts {at_least}: with {worst} ranks a GPU needs about {needs[worst]:.1f} GiB "
            f"and has {gib:.1f}; lower micro_batch, or raise --min-hosts (`disco-ds plan` shows "
            "where the memory goes)"
        )
    return f"{result}; a GPU needs up to about {needs[worst]:.1f} of {gib:.1f} GiB"


def _refuse_undivided(config: Config, ranks: list[int], at_least: int, num_slots: int) -> None:
    """Refuse a recipe whose batch or slots are not divisible by every possible number of ranks."""
    multiple = math.lcm(*ranks)
    problems = []
    if config.global_batch % (multiple * config.micro_batch):
        problems.append(
            f"global_batch {config.global_batch} must be a multiple of "
            f"{multiple * config.micro_batch:,} ({multiple:,} x micro_batch {config.micro_batch})"
        )
    if num_slots % multiple:
        problems.append(f"data.slots {num_slots} must be a multiple of {multiple:,}")
    if problems:
        raise ValueError(
            f"--min-hosts {at_least}: the run may continue on {_join(ranks)} ranks, so "
            f"{' and '.join(problems)}; or raise --min-hosts"
        )


def _join(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    if len(first) > 8:
        first = [*first[:3], "..."]
    return f"{', '.join(first)} or {last}" if first else last


def read_gpu_gib() -> float | None:
    """Return the memory of this host's smallest NVIDIA GPU in GiB, or None if there is none.

    This function creates no CUDA context.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return min(map(int, result.stdout.split())) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
