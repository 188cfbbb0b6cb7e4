"""The table of logged metrics (name, source, reduction over ranks, display), and time and memory of a step's phases.

docs/logging.md shows how to add a metric. The phases are measured on logged steps only, which wait for the GPU after
each phase. Their measurements are the columns of Table 4 in the DisCo-CLIP paper, plus numbers that reveal a slow rank.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

import psutil
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.profiler import record_function

from disco_ds.distributed import comm


@dataclass(frozen=True)
class LogPoint:
    """This rank's values after a logged step, from which the log record is computed."""

    step: int
    """Number of completed optimizer steps."""
    metrics: Mapping[str, Tensor]
    """The values of LossOutput.metrics and of anomalies.features_spread, each 0-d and the same on every rank."""
    scale: Tensor
    """[1], the scale that the loss was computed with."""
    lr: float
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if a loss scaler skipped the step."""
    index: Tensor
    """Sample ids of this rank."""
    bias: Tensor | None = None
    """[1], the bias that the loss was computed with; None if the model has none."""
    broken: int = 0
    """Number of broken samples that this rank has skipped so far."""
    text_tokens: float | None = None
    """Mean number of tokens per text on this rank. None if the text tower also processes padding."""
    dropped: int = 0
    """Number of samples that data.filter, data.uids or data.transforms have excluded on this rank so far."""
    skipped: int = 0
    """Number of batches that the run has skipped so far."""
    model: nn.Module | None = None
    """The module inside the engine; at ZeRO 3 its parameters are empty outside of a forward pass."""


@dataclass(frozen=True)
class Interval:
    """Measurements of this rank since the previous log record."""

    samples: int
    """Number of samples that all ranks together have trained on since the previous log record."""
    seconds: float
    wait_s: float
    """Seconds that this rank has waited for data since the previous log record."""
    peak_bytes: int
    """Peak memory of this rank since its process started, in bytes."""
    peak_samples_per_s: Callable[[float | None], float] | None
    """Returns the samples per second that the devices would reach at their peak FLOP/s, given the mean number of tokens
    per text; None if unknown."""


@dataclass(frozen=True)
class Metric:
    """One logged number."""

    name: str
    """Key of the metric in metrics.jsonl; its tag in TensorBoard is train/NAME."""
    value: Callable[[LogPoint, Interval], Any] | None = None
    """Computes the metric on this rank; None if the metric is an entry of LogPoint.metrics."""
    over_ranks: Literal["same", "sum", "max", "mean"] = "same"
    """Reduction over ranks; "same" for a value that is equal on all ranks."""
    show: Callable[[Any], str] | None = None
    """Formats the metric for the progress line, possibly as an empty string; None if it is not shown."""


def _mfu(now: LogPoint, since: Interval) -> float | None:
    if not since.peak_samples_per_s:
        return None
    return since.samples / since.seconds / since.peak_samples_per_s(now.text_tokens)


METRICS = (
    Metric("loss", show="loss {:.4f}".format),
    Metric("i2t_accuracy", show="i2t {:.1%}".format),
    Metric("t2i_accuracy", show="t2i {:.1%}".format),
    Metric("scale", lambda now, since: now.scale, show="scale {:.2f}".format),
    Metric("bias", lambda now, since: now.bias),
    Metric("lr", lambda now, since: now.lr, show="lr {:.2e}".format),
    Metric(
        "grad_norm",
        lambda now, since: now.grad_norm,
        show=lambda value: "norm skipped" if value is None else f"norm {value:.3f}",
    ),
    Metric(
        "samples_per_s",
        lambda now, since: since.samples / since.seconds,
        show="{:,.0f} samples/s".format,
    ),
    Metric("mfu", _mfu, "mean"),
    Metric("text_tokens", lambda now, since: now.text_tokens, "mean"),
    Metric(
        "data_wait",
        lambda now, since: since.wait_s / since.seconds,
        "max",
        show="wait {:.0%}".format,
    ),
    Metric(
        "peak_memory_bytes",
        lambda now, since: since.peak_bytes,
        "max",
        show=lambda value: f"{value / 2**30:.1f} GiB",
    ),
    Metric(
        "broken_samples",
        lambda now, since: now.broken,
        "sum",
        show=lambda value: f"{value} broken samples skipped" if value else "",
    ),
    Metric("dropped_samples", lambda now, since: now.dropped, "sum"),
    Metric(
        "skipped_batches",
        lambda now, since: now.skipped,
        show=lambda value: f"{value} batches skipped" if value else "",
    ),
)
"""The metrics in the order of the progress line."""


def compute_metrics(now: LogPoint, since: Interval) -> dict[str, Any]:
    """Compute the metrics of a log record, keyed by name. Unknown values are None.

    The entry `ids` is a digest of the sample ids of the global batch. It is the same for any number of ranks.

    Collective: every rank must call this at the same step.
    """
    values: dict[str, Any] = dict(now.metrics)
    values |= {metric.name: metric.value(now, since) for metric in METRICS if metric.value}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.item()
    ids = int(digest(now.index.cpu()))
    ranks = comm.gather_objects({"ids": ids, **values})
    reduce: dict[str, Callable[..., Any]] = {"sum": sum, "max": max, "mean": fmean}
    for metric in METRICS:
        if metric.over_ranks != "same" and values[metric.name] is not None:
            values[metric.name] = reduce[metric.over_ranks](rank[metric.name] for rank in ranks)
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
        if not _on_cpu():
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
