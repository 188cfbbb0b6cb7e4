"""The table of logged metrics (name, reduction over ranks, display), and time and memory of a step's phases.

docs/logging.md shows how to add a metric. The phases are measured on logged steps only, which wait for the GPU after
each phase. Their measurements are the columns of Table 4 in the DisCo-CLIP paper, plus numbers that reveal a slow rank.
"""

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean, median
from typing import Any, NamedTuple

import psutil
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import record_function

from disco_ds.distributed import comm


class Metric(NamedTuple):
    """How one logged number is reduced over ranks and displayed."""

    name: str
    """Key of the metric in metrics.jsonl; its tag in TensorBoard is train/NAME."""
    over_ranks: Callable[..., Any] | None = None
    """Combines the values of all ranks into one; None for a value that is equal on all ranks."""
    show: Callable[[Any], str] | None = None
    """Formats the metric for the progress line, possibly as an empty string; None if it is not shown."""


METRICS = (
    Metric("loss", show="loss {:.4f}".format),
    Metric("i2t_accuracy", show="i2t {:.1%}".format),
    Metric("t2i_accuracy", show="t2i {:.1%}".format),
    Metric("scale", show="scale {:.2f}".format),
    Metric("lr", show="lr {:.2e}".format),
    Metric(
        "grad_norm",
        show=lambda value: "norm skipped" if value is None else f"norm {value:.3f}",
    ),
    Metric("samples_per_s", show="{:,.0f} samples/s".format),
    Metric("mfu", fmean),
    Metric("text_tokens", fmean),
    Metric("data_wait", max, "wait {:.0%}".format),
    Metric("peak_memory_bytes", max, lambda value: f"{value / 2**30:.1f} GiB"),
    Metric(
        "broken_samples",
        sum,
        lambda value: f"{value} broken samples skipped" if value else "",
    ),
    Metric("dropped_samples", sum),
    Metric(
        "skipped_batches",
        show=lambda value: f"{value} batches skipped" if value else "",
    ),
)
"""The metrics that are shown or that differ between ranks, in the order of the progress line."""


def reduce_metrics(local: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    """Combine the metrics of all ranks into those of a log record, as METRICS specifies. An unknown value stays None.

    The entry `ids` is a digest of the sample ids of the global batch. It is the same for any number of ranks.

    Collective: every rank must call this at the same step.

    Args:
        local: This rank's metrics, keyed by name: numbers, tensors with one element, or None.
        index: Sample ids of this rank.
    """
    values = {name: x.item() if isinstance(x, Tensor) else x for name, x in local.items()}
    ids = int(digest(index.cpu()))
    ranks = comm.gather_objects({"ids": ids, **values})
    for metric in METRICS:
        if metric.over_ranks and values.get(metric.name) is not None:
            values[metric.name] = metric.over_ranks(rank[metric.name] for rank in ranks)
    total = sum(rank["ids"] for rank in ranks)
    return {"ids": f"{total % 2**64:016x}", **values}


def digest(index: Tensor) -> Tensor:
    """Return the sum of the 64-bit hashes of sample ids, 0-d int64.

    The sum depends neither on the order of the ids nor on how they are distributed over ranks.
    """
    mixed = index.long() + 1
    for _ in range(2):  # after a single round, sums of a few ids still collide
        mixed = mixed * 0x1E3779B97F4A7C15
        mixed = (mixed ^ ((mixed >> 29) & (2**35 - 1))) * 0x3F58476D1CE4E5B9
        mixed = mixed ^ ((mixed >> 32) & (2**32 - 1))
    return mixed.sum()


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
        self._measured: dict[str, float] = {}

    def timer(self, sampled: bool) -> Timer:
        """Return the context manager that wraps each phase of the next step. It measures time only if `sampled`."""
        self._measured.clear()
        return self._measure if sampled else record_function

    def update_peak(self) -> int:
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
        self.update_peak()
        get_accelerator().reset_peak_memory_stats()
        start = _now()
        with record_function(name):
            yield
        self._measured[f"time/{PHASES[name]}_s"] = _now() - start
        peak = self.update_peak()
        if not _on_cpu():
            self._measured[f"memory/{PHASES[name]}_bytes"] = peak

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
        if not self._measured:
            return {}
        local = {"time/data_wait_s": wait_s, **self._measured}
        local["memory/host_bytes"] = psutil.Process().memory_info().rss
        if not _on_cpu():
            local["memory/reserved_bytes"] = get_accelerator().max_memory_reserved()
        ranks = comm.gather_objects(local)
        values = {}
        for name in local:
            reduce = fmean if name.startswith("time/") else max
            values[name] = reduce([rank[name] for rank in ranks])
        # A rank waits for its data in the forward phase. At ZeRO 3 that phase has collectives, so the
        # other ranks wait in it too, and the slowest rank stands out less.
        arrivals = [rank["time/forward_s"] for rank in ranks]
        values["ranks/slowest_s"] = max(arrivals)
        values["ranks/slowest"] = arrivals.index(max(arrivals))
        values["ranks/median_s"] = median(arrivals)
        return values


def _on_cpu() -> bool:
    return get_accelerator().device_name() == "cpu"


def _now() -> float:
    """Wait for the accelerator, and return the time in seconds."""
    get_accelerator().synchronize()
    return time.perf_counter()
