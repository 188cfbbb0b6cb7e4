"""The records of a run: progress lines, metrics.jsonl, and TensorBoard points on an axis of samples.

What a record holds is in figures.py. Its reductions over ranks are collective; rank 0 writes.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.metrics.figures import FIGURES, Interval, LogPoint, compute_figures
from disco_ds.metrics.run_log import say
from disco_ds.metrics.timers import Phases

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(__name__)
WriteEvents = Callable[[list[tuple[str, float, int]]], None]
"""Of a monitor of DeepSpeed's: (name, value, samples)."""


class Metrics:
    """Keeps the times between two log points, and writes a record at each. Collective: every rank must make one.

    Records that came after the checkpoint of first_step are dropped. On a full disk TensorBoard loses points, while
    records wait in memory until there is room; the run goes on.

    Args: folder: of the run; writers: of TensorBoard and the ds_config's other monitors, by the name for messages;
          first_step: steps done by the run that this one resumes; peak_samples_per_s: see Interval; num_samples:
          of an epoch; None: records name none.
    """

    def __init__(
        self,
        folder: Path,
        writers: Mapping[str, WriteEvents],
        global_batch: int,
        num_steps: int,
        first_step: int = 0,
        peak_samples_per_s: float | None = None,
        num_samples: int | None = None,
    ):
        self.writers = dict(writers)
        self.global_batch, self.num_steps = global_batch, num_steps
        self.peak_samples_per_s, self.num_samples = peak_samples_per_s, num_samples
        self.phases = Phases()
        self.path = folder / METRICS_FILE
        self.file: io.FileIO | None = None
        self.broken = folder / f"broken-{comm.rank():05d}.txt"
        self.unwritten = b""
        with comm.all_or_none(f"opening {self.path}"):
            if comm.rank() == 0:
                last = _drop_after(self.path, first_step)
                self.file = io.FileIO(self.path, "a")
                for record in last:  # rewind_tensorboard has dropped its points
                    self._events(record)
        self.start = self.since = time.monotonic()
        self.first_step = self.last_step = first_step
        self.wait_s = self.step_wait_s = self.save_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """Count time that this rank has waited for data in the current step."""
        self.wait_s += seconds
        self.step_wait_s = seconds

    def add_save(self, seconds: float) -> None:
        """Count time that this rank has waited for a save since the last record."""
        self.save_s += seconds

    def name_broken(self, step: int, names: list[str]) -> None:
        """Add the names of broken samples, which this rank has skipped, to its list in the run folder."""
        if names:
            with suppress(OSError), self.broken.open("a", encoding="utf-8") as file:  # counted all the same
                file.writelines(f"step {step}: {name}\n" for name in names)

    def skip(self, seconds: float) -> None:
        """Leave time that is not training, such as an evaluation's, out of the pace."""
        self.since += seconds

    def log(self, now: LogPoint) -> dict[str, Any]:
        """Write one record, whose figures are those of figures.py and the times of the phases. Collective.

        Returns: it, on every rank.
        """
        clock, since_step = time.monotonic(), now.step - self.last_step
        self.phases.note_peak()
        since = Interval(
            samples=since_step * self.global_batch,
            seconds=clock - self.since,
            wait_s=self.wait_s,
            peak_bytes=self.phases.peak_bytes,
            peak_samples_per_s=self.peak_samples_per_s,
        )
        record: dict[str, Any] = {"step": now.step, "samples": now.step * self.global_batch}
        if self.num_samples:
            record["epoch"] = round(record["samples"] / self.num_samples, 6)
        record |= compute_figures(now, since)
        record |= self.phases.read(self.step_wait_s)
        if self.save_s:
            record["time/save_s"] = self.save_s
        self.since, self.last_step, self.wait_s, self.save_s = clock, now.step, 0.0, 0.0
        if self.file is not None:
            self._append(record)
            say(self._describe(record))
        return record

    def note(self, step: int, values: dict[str, float]) -> None:
        """Write values that come at other times than the figures, such as an evaluation's. Rank 0 writes."""
        if self.file is not None and values:
            self._append({"step": step, "samples": step * self.global_batch, **values})

    def close(self) -> None:
        if self.file is not None:
            self._flush()
            self.file.close()
            self.file = None

    def _append(self, record: dict[str, Any]) -> None:
        self.unwritten += json.dumps(record).encode() + b"\n"
        self._flush()
        self._events(record)

    def _flush(self) -> None:
        assert self.file is not None
        size, left = os.fstat(self.file.fileno()).st_size, self.unwritten
        try:
            while left:  # a nearly full disk may take a part of a line
                left = left[self.file.write(left) :]
            self.unwritten = b""
        except OSError as error:
            if len(left) < len(self.unwritten):
                self.file.truncate(size)
            logger.warning("%s: %s; the records wait in memory", self.path, error.strerror)

    def _describe(self, record: dict[str, Any]) -> str:
        """The progress line of a record."""
        done = record["step"]
        step_s = (time.monotonic() - self.start) / max(done - self.first_step, 1)
        left = timedelta(seconds=round(step_s * (self.num_steps - done)))
        shown = (figure.show(record[figure.name]) for figure in FIGURES if figure.show and figure.name in record)
        epoch = f"epoch {record['epoch']:.2f}" if "epoch" in record else ""
        return "  ".join(filter(None, [f"step {done:,}/{self.num_steps:,} ({left} left)", epoch, *shown]))

    def _events(self, record: dict[str, Any]) -> None:
        samples = int(record["samples"])
        points = [
            (name if "/" in name else f"train/{name}", float(value), samples)
            for name, value in record.items()
            if isinstance(value, int | float) and name not in ("step", "samples")
        ]
        for name, write in list(self.writers.items()):
            try:
                write(points)
            except OSError as error:
                logger.warning("%s gets no more points until the run is resumed: %s", name, error)
                del self.writers[name]


def rewind_tensorboard(monitor: Any, samples: int) -> None:
    """Drop the points at `samples` and later, which an interrupted run has left, so that new ones take their place.

    Args: monitor: the DeepSpeed engine's.
    """
    if monitor.tb_monitor is None or monitor.tb_monitor.summary_writer is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = monitor.tb_monitor.summary_writer
    writer.close()
    monitor.tb_monitor.summary_writer = SummaryWriter(writer.log_dir, purge_step=samples)


def _drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the records of steps that a resumed run repeats, and a last line that a crash has cut off.

    An evaluation comes after the checkpoint of its step, so the one at `step` is repeated too.
    Returns: the records of `step` that stay.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    records = [(line, _parse(line)) for line in lines]
    kept = [
        (line, record)
        for line, record in records
        if record["step"] < step or (record["step"] == step and not any(name.startswith("eval/") for name in record))
    ]
    if len(kept) < len(lines):
        write_text(path, "".join(line for line, _ in kept))
    return [record for _, record in kept if record["step"] == step and "samples" in record]


def _parse(line: str) -> dict[str, Any]:
    """The record of a line; for one that a crash has left unreadable, a record of an infinite step."""
    try:
        record = json.loads(line if line.endswith("\n") else "")
        float(record["step"])
        return record
    except (ValueError, KeyError, TypeError):
        return {"step": float("inf")}
