"""Explains why an accelerator is out of memory: in which phase, how much was held, and which settings help."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from deepspeed.accelerator import get_accelerator

from disco_ds.config import Config
from disco_ds.config.ds_config import stage
from disco_ds.distributed import comm
from disco_ds.distributed.device_memory import is_out_of_memory
from disco_ds.losses import build_loss

GIB = 2**30
WAIT_S = 60.0
"""How long a rank that has no explanation to give waits for those that have: its end would end them too."""
PLANNED = {"forward": ("forward",), "loss": ("loss",), "backward and update": ("backward", "update")}
"""Phase of the step -> moments of the plan."""
Remedy = tuple[str, bool]
"""A change of the settings, and whether this recipe can still make it."""


class OutOfMemory(RuntimeError):  # noqa: N818
    """This rank's accelerator was out of memory.

    Args: text: one line; explanation: what was held and what helps; empty where another rank of this host has it.
    """

    def __init__(self, text: str, explanation: Sequence[str] = ()):
        super().__init__(text)
        self.explanation = list(explanation)


@contextmanager
def explained(config: Config, phase: Callable[[], str], report: Callable[[str], object]) -> Iterator[None]:
    """Explain, on one rank of each host, why the body has run out of the accelerator's memory.

    Args:   phase: what the run was doing; report: called with the explanation while the other ranks wait.
    Raises: OutOfMemory on the ranks where that happens.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        where = phase()
        text = f"out of memory in {where}: {_first_line(error)}"
        raise OutOfMemory(text, _once_per_host(partial(_report, config, where, text, error, report))) from error


def _report(config: Config, phase: str, text: str, error: RuntimeError, report: Callable[[str], object]) -> list[str]:
    explanation = list(_explain(config, phase, error))
    report("\n  ".join([f"rank {comm.rank()} is {text}", *explanation]))
    return explanation


def _once_per_host(explain: Callable[[], list[str]]) -> list[str]:
    """Call `explain` on one of this host's ranks, and wait until those of other hosts that began have done so too.

    No rank may leave before: the heartbeat ends all ranks as soon as one reports that it has failed. For the same
    reason those that explain leave last. Not collective.
    Returns: the explanation; empty on the other ranks.
    """
    if comm.size() == 1:
        return explain()
    # Not a collective, which would hang: only ranks without memory come here.
    store = comm.open_store(WAIT_S)

    def count(name: str, more: int = 0) -> int:
        return store.add(f"disco_ds/out_of_memory/{name}", more)

    def wait_while(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while holds() and time.monotonic() < end:
            time.sleep(0.1)

    # The first rank of a host to add its name explains for the others.
    if count(socket.gethostname(), 1) > 1:
        count("waiting", 1)
        wait_while(lambda: count("done") < count("begun"))
        count("left", 1)
        return []
    count("begun", 1)  # before the explanation, which takes seconds: other hosts wait for it
    try:
        return explain()
    finally:
        count("done", 1)
        wait_while(lambda: count("done") < count("begun") or count("left") < count("waiting"))


def _explain(config: Config, phase: str, error: RuntimeError) -> Iterator[str]:
    # A CPU has these figures too: DeepSpeed takes them from psutil.
    device = get_accelerator()
    held, peak, reserved = device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved()
    capacity = device.total_memory()
    yield (
        f"{held / GIB:.2f} GiB are allocated, {peak / GIB:.2f} at most so far; {reserved / GIB:.2f} are reserved by "
        f"torch, of {capacity / GIB:.2f} on {device.current_device_name()}"
    )
    yield from _compare(config, phase, max(peak, held + _requested(error)), capacity)
    # Much that torch has reserved and cannot use: pieces that are too small.
    if phase in PLANNED and reserved - held > 0.1 * capacity:
        yield (
            f"{(reserved - held) / GIB:.2f} GiB are reserved and not used: the memory is fragmented; set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of all ranks"
        )
    yield f"what helps in {phase}, in this order:"
    yield from (f"  {change}" for change, possible in _remedies(config, phase) if possible)


def _compare(config: Config, phase: str, needed: int, capacity: int) -> Iterator[str]:
    """Compare with what disco-ds plan says. Args: needed: bytes that the run has needed at least."""
    from disco_ds.plan.memory import plan_memory
    from disco_ds.plan.towers import trace

    try:
        memory = plan_memory(config, comm.size(), trace(config, config.micro_batch))
    except Exception as problem:  # of any kind: what is known already must still be reported
        yield f"disco-ds plan has no estimate: {problem}"
        return
    totals = {name: sum(parts.values()) for name, parts in memory.moments.items()}
    moments = PLANNED.get(phase, (memory.peak,))
    planned = max(totals[name] for name in moments)
    peak = f"{memory.total / GIB:.2f} GiB at its peak, in {memory.peak}"
    # Either the plan was right and the recipe is too large, or the plan was wrong, or the memory is not there.
    if memory.total > capacity:
        yield f"disco-ds plan: this recipe does not fit: {peak}; `disco-ds plan --fit` writes one that does"
        return
    here = f", {planned / GIB:.2f} in {' and '.join(moments)}" if phase in PLANNED else ""
    if needed > planned:
        wrong = f"it needs at least {(needed - planned) / GIB:.2f} GiB more than planned"
    else:
        wrong = (
            f"what it has asked for is {(planned - needed) / GIB:.2f} GiB below the plan: the memory is fragmented "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), or another process uses this GPU (nvidia-smi)"
        )
    yield f"disco-ds plan: it fits: {peak}{here}; {wrong}"


def _remedies(config: Config, phase: str) -> Iterator[Remedy]:
    """Changes of the settings that need less memory in this phase, the cheapest first."""
    level = stage(config.deepspeed)
    count = config.num_micro_batches(comm.size())
    # Each with whether the recipe can still be changed so.
    smaller = f"micro_batch={max(config.micro_batch // 2, 1)} (now {config.micro_batch})", config.micro_batch > 1
    pixels = "pixels=compressed, or pixels=host", config.pixels == "device" and (count > 1 or phase != "building")
    recompute = "model.activation_checkpointing=true", not config.model.activation_checkpointing
    states: list[Remedy] = [
        (f"deepspeed=zero{level + 1} (now ZeRO {level}), or more ranks", level < 3),
        ("deepspeed=zero3_offload, or more ranks", level == 3),
    ]
    if phase == "forward":
        yield from (smaller, pixels, recompute, *states)
    elif phase == "loss":
        name, tiled = config.loss.name, hasattr(build_loss(config.loss.name, **config.loss.options), "tiling")
        yield "loss.name=disco_fused: it holds no matrix of similarities", name in ("clip", "disco")
        yield "loss.options.tile=[1024, 1024], or a smaller one than now", tiled
        yield "loss.name=inf_cl: it holds no gathered features", name in ("clip", "disco", "disco_fused")
        yield from (pixels, *states)
        yield "a smaller global_batch", True
    elif phase == "backward and update":
        bucket = "deepspeed.zero_optimization.reduce_bucket_size=20000000", level in (1, 2)
        yield from (smaller, recompute, *states, bucket, pixels)
    elif phase == "evaluating":
        yield from (smaller, *states)
    else:
        yield "nvidia-smi: does another process use this GPU?", True
        yield from (*states, pixels, smaller)


def _first_line(error: RuntimeError) -> str:
    """The first line of torch's message, without its advice."""
    return str(error).split(" If reserved but")[0].splitlines()[0] if str(error) else type(error).__name__


def _requested(error: RuntimeError) -> int:
    """Bytes that were requested, where the message names them."""
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.search(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error))
    return int(float(found[1]) * units[found[2]]) if found else 0
