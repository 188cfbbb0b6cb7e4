"""Logger of a run. It writes progress lines, metrics.jsonl, and points for TensorBoard and other trackers.

step_metrics.py defines the content of a record. Reductions over ranks are collective. Only rank 0
writes, except that each rank writes the names of its broken samples to a file.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from disco_ds.config import Schedule
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.metrics.step_metrics import METRICS, Phases, reduce_metrics
from disco_ds.runs.messages import say

METRICS_FILE = "metrics.jsonl"
BUFFER_BYTES = 2**20
"""Size of the buffer for records that cannot be written because the disk is full. Records that do not fit are lost."""
logger = logging.getLogger(__name__)
WriteEvents = Callable[[list[tuple[str, float, int]]], None]
"""A DeepSpeed monitor's `write_events`; it takes a list of (name, value, samples)."""


class MetricsLogger:
    """Measures the time between log points and writes a record at each log point.

    Collective: every rank must create a logger. When a run is resumed at schedule.first_step, the records of later
    steps are removed. The run may repeat the evaluation at this step, whose results are then recorded twice. If the
    disk is full, TensorBoard loses points, records wait in the file's buffer until there is space, and the run
    continues.

    Args:
        folder: The run folder.
        writers: Functions that write to TensorBoard and the other trackers, keyed by the name that messages use
            for the tracker.
        schedule: Converts steps to samples.
        peak_samples_per_s: Returns the samples per second that the devices would reach at their peak FLOP/s, given the
            mean number of tokens per text; None if unknown.
        epoch_samples: Samples per epoch; if None, records contain no epoch.
    """

    def __init__(
        self,
        folder: Path,
        writers: Mapping[str, WriteEvents],
        schedule: Schedule,
        peak_samples_per_s: Callable[[float | None], float] | None = None,
        epoch_samples: int | None = None,
    ):
        self.writers = dict(writers)
        self.schedule = schedule
        self.peak_samples_per_s = peak_samples_per_s
        self.epoch_samples = epoch_samples
        self.phases = Phases()
        self.path = folder / METRICS_FILE
        self.file: BinaryIO | None = None
        self.broken = folder / f"broken-{comm.rank():05d}.txt"
        with comm.all_or_none(f"opening {self.path}"):
            if comm.rank() == 0:
                _forget_after(self.path, schedule.first_step)
                self.file = self.path.open("ab", buffering=BUFFER_BYTES)
        self.start = self.since = time.monotonic()
        self.last_samples = schedule.first_samples
        self.wait_s = self.step_wait_s = self.save_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """Add time that this rank waited for data in the current step."""
        self.wait_s += seconds
        self.step_wait_s = seconds

    def add_save(self, seconds: float) -> None:
        """Add time that this rank waited for a checkpoint to be saved."""
        self.save_s += seconds

    def name_broken(self, step: int, names: list[str]) -> None:
        """Append the names of broken samples that this rank skipped to a file in the run folder."""
        if not names:
            return
        # If the file cannot be written, the samples still count in broken_samples.
        with suppress(OSError), self.broken.open("a", encoding="utf-8") as file:
            file.writelines(f"step {step}: {name}\n" for name in names)

    def skip(self, seconds: float) -> None:
        """Exclude time that was not training, such as an evaluation, from the throughput."""
        self.since += seconds

    def log(self, step: int, metrics: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
        """Write the record of a step. Collective: every rank must call this.

        Args:
            step: Number of completed optimizer steps.
            metrics: This rank's values, keyed by name: numbers, tensors with one element, or None if unknown.
            index: Sample ids of this rank.

        Returns:
            The record, on every rank: step, samples and epoch, the metrics reduced over ranks, those that this logger
            measures, and the measurements of step_metrics.py.
        """
        clock = time.monotonic()
        self.phases.update_peak()
        samples = self.schedule.samples(step)
        seconds = clock - self.since
        samples_per_s = (samples - self.last_samples) / seconds
        mfu = None
        if self.peak_samples_per_s:
            mfu = samples_per_s / self.peak_samples_per_s(metrics["text_tokens"])
        measured = {
            "samples_per_s": samples_per_s,
            "mfu": mfu,
            "data_wait": self.wait_s / seconds,
            "peak_memory_bytes": self.phases.peak_bytes,
        }
        record: dict[str, Any] = {"step": step, "samples": samples}
        if self.epoch_samples:
            record["epoch"] = round(samples / self.epoch_samples, 6)
        record |= reduce_metrics({**metrics, **measured}, index)
        record |= self.phases.read(self.step_wait_s)
        if self.save_s:
            record["time/save_s"] = self.save_s
        self.since = clock
        self.last_samples = samples
        self.wait_s = self.save_s = 0.0
        if self.file is not None:
            self._append(record)
            say(self._describe(record))
        return record

    def write_values(self, step: int, values: dict[str, float]) -> None:
        """On rank 0, write values that are not part of a step's record, such as the results of an evaluation."""
        if self.file is not None and values:
            self._append({"step": step, "samples": self.schedule.samples(step), **values})

    def close(self) -> None:
        """Write the waiting records and close the file. If the disk is still full, these records are lost."""
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            self.file = None

    def _append(self, record: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            self.file.write(json.dumps(record).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            logger.warning("%s: %s; the records wait in memory", self.path, error.strerror)
        points = [
            (name if "/" in name else f"train/{name}", float(value), record["samples"])
            for name, value in record.items()
            if isinstance(value, int | float) and name not in ("step", "samples")
        ]
        for name, write in list(self.writers.items()):
            try:
                write(points)
            except Exception as error:
                logger.warning("%s gets no more points until the run is resumed: %s", name, error)
                del self.writers[name]

    def _describe(self, record: dict[str, Any]) -> str:
        """Return the progress line of a record."""
        schedule, samples = self.schedule, record["samples"]
        sample_s = (time.monotonic() - self.start) / max(samples - schedule.first_samples, 1)
        left = timedelta(seconds=round(sample_s * (schedule.num_samples - samples)))
        words = [f"step {record['step']:,}/{schedule.num_steps:,} ({left} left)"]
        if "epoch" in record:
            words.append(f"epoch {record['epoch']:.2f}")
        for metric in METRICS:
            if metric.show and metric.name in record:
                words.append(metric.show(record[metric.name]))
        dropped = record["dropped_samples"]
        if dropped >= 0.005 * samples:
            words.append(f"{dropped / (dropped + samples):.0%} dropped")
        return "  ".join(filter(None, words))


def rewind_tensorboard(monitor: Any, samples: int) -> None:
    """Hide TensorBoard's points after `samples`, because the resumed run will write them again.

    Points at `samples` stay. The resumed run repeats the evaluation at `samples`, so its points are shown twice.

    Args:
        monitor: The monitor of the DeepSpeed engine.
        samples: Number of samples at the checkpoint.
    """
    if monitor.tb_monitor is None or monitor.tb_monitor.summary_writer is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = monitor.tb_monitor.summary_writer
    writer.close()
    monitor.tb_monitor.summary_writer = SummaryWriter(writer.log_dir, purge_step=samples + 1)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl, without unreadable lines, such as a line that a crash cut off."""
    records = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line if line.endswith("\n") else "")
                records.append(record | {key: int(record[key]) for key in ("step", "samples")})
    return records


def _forget_after(path: Path, step: int) -> None:
    """Remove the records of later steps and unreadable lines from a metrics.jsonl."""
    if path.exists():
        kept = [record for record in read_records(path) if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        # Writing needs room on the disk.
        if text != path.read_text(encoding="utf-8", errors="replace"):
            write_text(path, text)
