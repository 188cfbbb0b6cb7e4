"""What a run says of itself: progress lines, metrics.jsonl, TensorBoard points on a samples axis.

Rank 0 writes; the reductions are collective. Numbers of the loss arrive already global.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.metrics.timers import Phases

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(__name__)
WriteEvents = Callable[[list[tuple[str, float, int]]], None]
"""DeepSpeed's monitor: (name, value, samples)."""


class Metrics:
    """Times and counts between two log points, and the record written at each.

    Args: folder: of the run; write_events: TensorBoard and what else the ds_config's monitors name, or None;
          first_step: steps already done by the run this one resumes; peak_samples_per_s: what MFU is a part of, None:
          not known. Collective: every rank must call.

    Records that came after the checkpoint of first_step are dropped. A disk that is full costs points of TensorBoard,
    not records and not the run: they wait until there is room.
    """

    def __init__(
        self,
        folder: Path,
        write_events: WriteEvents | None,
        global_batch: int,
        num_steps: int,
        first_step: int = 0,
        peak_samples_per_s: float | None = None,
    ):
        self.write_events = write_events
        self.global_batch, self.num_steps = global_batch, num_steps
        self.peak_samples_per_s = peak_samples_per_s
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
        self.wait_s = self.step_wait_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """Time this rank waited for data in the step at hand."""
        self.wait_s += seconds
        self.step_wait_s = seconds

    def name_broken(self, step: int, names: list[str]) -> None:
        """Add samples that this rank has skipped to its list in the run folder."""
        if names:
            with suppress(OSError), self.broken.open("a", encoding="utf-8") as file:  # counted all the same
                file.writelines(f"step {step}: {name}\n" for name in names)

    def skip(self, seconds: float) -> None:
        """Time that is not to count as training's, such as an evaluation's."""
        self.since += seconds

    def log(self, step: int, values: dict[str, float], index: Tensor, broken: int, skipped: int = 0) -> None:
        """Write one record. Collective.

        Args: step: optimizer steps done; values: loss, scale, lr, grad_norm, ..., equal on every rank; index: this
              rank's sample ids of the step, which become one digest of the global batch, free of order and ranks;
              broken: samples this rank has skipped so far; skipped: batches passed over so far, on every rank.
        """
        now = time.monotonic()
        elapsed, steps = now - self.since, step - self.last_step
        self.phases.note_peak()
        counts = comm.all_reduce_sum(torch.stack([digest(index.cpu()), torch.tensor(broken)]).to(comm.local_device()))
        worst = comm.all_reduce_max(
            torch.tensor([self.wait_s / elapsed, self.phases.peak_bytes], dtype=torch.float64).to(comm.local_device())
        )
        wait, peak = worst.tolist()
        record = {
            "step": step,
            "samples": step * self.global_batch,
            "ids": f"{counts[0].item() & (2**64 - 1):016x}",
            **values,
            "samples_per_s": (pace := steps * self.global_batch / elapsed),
            **({"mfu": pace / self.peak_samples_per_s} if self.peak_samples_per_s else {}),
            "data_wait": wait,
            "peak_memory_bytes": int(peak),
            "broken_samples": int(counts[1]),
            "skipped_batches": skipped,
            **self.phases.read(self.step_wait_s),
        }
        self.since, self.last_step, self.wait_s = now, step, 0.0
        if self.file is not None:
            self._append(record)
            with suppress(OSError):  # a log on a full disk
                print(self._describe(record), flush=True)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Points of their own, such as an evaluation's; rank 0 writes them."""
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
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            logger.warning("%s: %s; the records wait in memory", self.path, error.strerror)

    def _describe(self, record: dict[str, Any]) -> str:
        done = record["step"]
        pace = (time.monotonic() - self.start) / max(done - self.first_step, 1)
        left = timedelta(seconds=round(pace * (self.num_steps - done)))
        norm = record["grad_norm"]
        line = (
            f"step {done:,}/{self.num_steps:,}  loss {record['loss']:.4f}  "
            f"acc {record.get('i2t_accuracy', float('nan')):.1%} / {record.get('t2i_accuracy', float('nan')):.1%}  "
            f"scale {record['scale']:.2f}  lr {record['lr']:.2e}  norm {'skipped' if norm is None else f'{norm:.3f}'}  "
            f"{record['samples_per_s']:,.0f} samples/s  wait {record['data_wait']:.0%}  "
            f"{record['peak_memory_bytes'] / 2**30:.1f} GiB  {left} left"
        )
        if record["broken_samples"]:
            line += f"  {record['broken_samples']} broken samples skipped"
        if record["skipped_batches"]:
            line += f"  {record['skipped_batches']} batches passed over"
        return line

    def _events(self, record: dict[str, Any]) -> None:
        if self.write_events is None:
            return
        samples = int(record["samples"])
        points = [
            (name if "/" in name else f"train/{name}", float(value), samples)
            for name, value in record.items()
            if isinstance(value, int | float) and name not in ("step", "samples")
        ]
        try:
            self.write_events(points)
        except OSError as error:
            logger.warning("TensorBoard gets no more points until the run is resumed: %s", error)
            self.write_events = None


def rewind_tensorboard(monitor: Any, samples: int) -> None:
    """Let what is written from here on take the place of the points at `samples` and later, which a run that was
    interrupted has left. monitor: DeepSpeed's, of the engine."""
    if monitor.tb_monitor is None or monitor.tb_monitor.summary_writer is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = monitor.tb_monitor.summary_writer
    writer.close()
    monitor.tb_monitor.summary_writer = SummaryWriter(writer.log_dir, purge_step=samples)


def digest(index: Tensor) -> Tensor:
    """0-d int64: sum of a 64-bit mix of each id; the same for the same ids, however they are split or ordered."""
    mixed = index.long() + 1
    for _ in range(2):  # after one round sums of few ids still collide
        mixed = mixed * 0x1E3779B97F4A7C15
        mixed = (mixed ^ ((mixed >> 29) & (2**35 - 1))) * 0x3F58476D1CE4E5B9
        mixed = mixed ^ ((mixed >> 32) & (2**32 - 1))
    return mixed.sum()


def _drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove what a resumed run is about to do again, and a line that a crash has cut.

    Evaluations come after the checkpoint of their step, so that step's are removed too. Returns: what stays of `step`.
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
        partial = path.with_suffix(".partial")
        partial.write_text("".join(line for line, _ in kept), encoding="utf-8")
        partial.replace(path)
    return [record for _, record in kept if record["step"] == step and "samples" in record]


def _parse(line: str) -> dict[str, Any]:
    """The record; of an infinite step for a line that a crash has left unreadable."""
    try:
        record = json.loads(line if line.endswith("\n") else "")
        float(record["step"])
        return record
    except (ValueError, KeyError, TypeError):
        return {"step": float("inf")}
