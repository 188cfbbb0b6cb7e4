"""The numbers of ranks that a run may get where hosts are lost (`disco-ds launch --min-hosts`), and their checks."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence

from disco_ds.config import Config
from disco_ds.data import choose_slots
from disco_ds.data.source import load_sources
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.fit import LARGEST
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.towers import trace

MAX_SLOTS = 2**20
"""Limit of data.slots."""


def possible_ranks(slots: Sequence[int], at_least: int) -> list[int]:
    """All numbers of ranks that `at_least` or more of the hosts have together. Args: slots: ranks of each host."""
    sums = {(0, 0)}
    for ranks in slots:
        sums |= {(hosts + 1, total + ranks) for hosts, total in sums}
    return sorted({total for hosts, total in sums if hosts >= at_least})


def check_fewer_hosts(config: Config, slots: Sequence[int], at_least: int, gib: float | None) -> str:
    """Check a run at every number of ranks that `at_least` or more of its hosts have together.

    Args:    slots: ranks of each host; gib: memory of a GPU; None: not known.
    Returns: what was found, in words.
    Raises:  ValueError for ranks that do not divide the batch or the slots of the data order, naming those that work,
             and for memory that does not suffice; also as load_sources raises it.
    """
    if config.ranks not in (None, sum(slots)):
        config.num_micro_batches(sum(slots))  # refuses all other ranks than the recipe's
    sizes = [size for source in load_sources(config.data) for size in source.sizes]
    num_slots = choose_slots(len(sizes), sum(sizes), config.data.slots, ranks=1)
    refuse_undivided(config, slots, at_least, num_slots, min(sum(sizes), MAX_SLOTS))
    ranks = possible_ranks(slots, at_least)
    found = f"{_join(ranks, 'or')} ranks divide batch and slots"
    if gib is None:
        return f"{found}; memory is not planned, as there is no GPU here"
    free = config.model_copy(update={"ranks": None})
    assumed = Assumptions(num_samples=sum(sizes), per_host=max(slots))
    try:
        towers = trace(config, config.micro_batch)
        needs = {n: plan_memory(free, n, towers, assumed).total / GIB for n in ranks}
    except ValueError as error:  # a model or a loss of one's own, of which the plan may know too little
        return f"{found}; memory is not planned: {error}"
    if over := [n for n in ranks if needs[n] > gib]:
        raise ValueError(
            f"--min-hosts {at_least}: with {over[0]} ranks a GPU needs {needs[over[0]]:.1f} GiB, as planned, and has "
            f"{gib:.1f}; lower micro_batch, or raise --min-hosts (`disco-ds plan` has the parts)"
        )
    return f"{found}; a GPU needs up to {max(needs.values()):.1f} GiB of {gib:.1f}, as planned"


def refuse_undivided(config: Config, hosts: Sequence[int], at_least: int, num_slots: int, max_slots: int) -> None:
    """Raises: ValueError where a possible number of ranks does not divide batch or slots, naming those that work."""
    B, m = config.global_batch, config.micro_batch

    def find(at_least: int) -> tuple[list[int], list[int]]:
        ranks = possible_ranks(hosts, at_least)
        return [n for n in ranks if B % (n * m)], [n for n in ranks if num_slots % n]

    batch, slots = find(at_least)
    if not batch and not slots:
        return
    multiple = math.lcm(*possible_ranks(hosts, at_least))
    problems = []
    if batch:
        remedy = _nearest("global_batch", B, multiple * m, LARGEST)
        remedy += f" or micro_batch={math.gcd(m, B // multiple)}" if B % multiple == 0 else ""
        what = f"global_batch {B} is not a multiple of ranks x micro_batch ({m}) at {_join(batch)} ranks"
        problems.append(f"{what}: {remedy}")
    if slots:
        remedy = _nearest("data.slots", num_slots, multiple, max_slots)
        problems.append(f"the data order's {num_slots} slots are not a multiple of {_join(slots)} ranks: {remedy}")
    enough = next((n for n in range(at_least + 1, len(hosts) + 1) if not any(find(n))), None)
    if enough:
        problems.append(f"or --min-hosts {enough}, with which the recipe can stay as it is")
    raise ValueError(f"--min-hosts {at_least}: " + ";\n  ".join(problems))


def _nearest(key: str, value: int, part: int, most: int) -> str:
    below = value // part * part
    works = [number for number in (below, below + part) if 0 < number <= most]
    if not works:
        return f"no {key} up to {most} works for all of them"
    return f"set {key}={min(works, key=lambda number: abs(number - value))}"


def _join(numbers: Sequence[int], word: str = "and") -> str:
    *most, last = map(str, numbers)
    most = [*most[:3], "..."] if len(most) > 8 else most
    return f"{', '.join(most)} {word} {last}" if most else last


def read_gpu_gib() -> float | None:
    """Memory of this host's smallest GPU, without a CUDA context; None where there is none, or it is not NVIDIA's."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return min(map(int, said.split())) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
