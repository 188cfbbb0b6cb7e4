"""Measure time and memory of a step's phases, on logged steps only.

The measurements are the columns of Table 4 in the DisCo-CLIP paper, plus numbers that reveal a slow rank. On a
CPU, the times come from the clock. On a GPU, they come from CUDA events. The events are read when the step is
logged, because logging waits for the GPU anyway.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
from deepspeed.accelerator import get_accelerator
from torch.profiler import record_function

from disco_ds.distributed import comm

PHASES = {"step/forward": "forward", "step/loss": "loss", "step/backward and update": "update"}
"""Name of a phase in training/step.py -> name in log records.

`loss` includes the loss's collectives. `update` includes the forward passes that GradAccum repeats.
"""
Timer = Callable[[str], AbstractContextManager[Any]]


class Phases:
    """Measures time and memory of a step's phases on one rank, in the steps for which this is requested."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Highest memory use of the accelerator so far, or of this process if there is no accelerator."""
        self._spans: list[tuple[str, Any, Any, int]] = []

    def timer(self, sampled: bool) -> Timer:
        """Return the context manager that wraps each phase of the next step. It measures time only if `sampled`."""
        self._spans.clear()
        return self._measure if sampled else record_function

    def note_peak(self) -> int:
        """Return the current peak memory in bytes, and update peak_bytes.

        On a GPU, the current peak counts from the start of the last measured phase. On a CPU, it counts from the start
        of the process.
        """
        if _on_cpu():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            peak = get_accelerator().max_memory_allocated()
        self.peak_bytes = max(self.peak_bytes, peak)
        return peak

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        self.note_peak()
        if not _on_cpu():
            get_accelerator().reset_peak_memory_stats()
        start = _now()
        with record_function(name):
            yield
        self._spans.append((PHASES[name], start, _now(), self.note_peak()))

    def read(self, wait_s: float) -> dict[str, float]:
        """Return the measurements of this step; an empty dict if the step was not sampled. Collective.

        Args:
            wait_s: Seconds that this rank waited for the step's data. time/forward_s includes them.

        Returns:
            time/...: Seconds, mean over ranks, so that the phases add up to the step.
            memory/...: Bytes, maximum over ranks.
            ranks/slowest: The rank with the longest forward phase. The other ranks wait for this rank.
            ranks/slowest_s: Seconds of the forward phase on that rank.
            ranks/median_s: Seconds of the forward phase, median over ranks.
        """
        if not self._spans:
            return {}
        mine = {"time/data_wait_s": wait_s}
        for name, start, end, peak in self._spans:
            if _on_cpu():
                mine[f"time/{name}_s"] = end - start
            else:
                mine[f"time/{name}_s"] = start.elapsed_time(end) / 1000
                mine[f"memory/{name}_bytes"] = peak
        mine["memory/host_bytes"] = psutil.Process().memory_info().rss
        if not _on_cpu():
            mine["memory/reserved_bytes"] = get_accelerator().max_memory_reserved()
        ranks = comm.gather_objects(mine)
        values = {}
        for name in mine:
            reduce = statistics.fmean if name.startswith("time/") else max
            values[name] = reduce([rank[name] for rank in ranks])
        # A rank waits for its data in the forward phase. At ZeRO 3 that phase has collectives, so the
        # other ranks wait in it too, and the slowest rank stands out less.
        arrivals = [rank["time/forward_s"] for rank in ranks]
        values["ranks/slowest_s"] = max(arrivals)
        values["ranks/slowest"] = arrivals.index(max(arrivals))
        values["ranks/median_s"] = statistics.median(arrivals)
        return values


def _on_cpu() -> bool:
    return get_accelerator().device_name() == "cpu"


def _now() -> Any:
    """Return the time. On a CPU, it is a number of seconds. On a GPU, it is an event recorded in the current stream."""
    if _on_cpu():
        return time.perf_counter()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event
