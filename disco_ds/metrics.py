"""What a run says of itself: progress lines, metrics.jsonl, TensorBoard points on a samples axis.

Rank 0 writes; the reductions are collective. Numbers of the loss arrive already global.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from disco_ds import comm

METRICS_FILE = "metrics.jsonl"
WriteEvents = Callable[[list[tuple[str, float, int]]], None]
"""DeepSpeed's monitor: (name, value, samples)."""


class Metrics:
    """Times and counts between two log points, and the record written at each.

    Args: folder: of the run; write_events: TensorBoard and what else the ds_config's monitors name, or None;
          first_step: steps already done by the run this one resumes. Collective: every rank must call.
    """

    def __init__(
        self, folder: Path, write_events: WriteEvents | None, global_batch: int, num_steps: int, first_step: int = 0
    ):
        self.write_events = write_events
        self.global_batch, self.num_steps = global_batch, num_steps
        self.path = folder / METRICS_FILE
        self.file: IO[str] | None = None
        with comm.together(f"opening {self.path}"):
            if comm.rank() == 0:
                _drop_after(self.path, first_step)
                self.file = self.path.open("a", encoding="utf-8")
        self.start = self.since = time.monotonic()
        self.first_step = self.last_step = first_step
        self.wait_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """Time this rank waited for data in the step at hand."""
        self.wait_s += seconds

    def skip(self, seconds: float) -> None:
        """Time that is not to count as training's, such as an evaluation's."""
        self.since += seconds

    def log(self, step: int, values: dict[str, float], index: Tensor, broken: int) -> None:
        """Write one record. Collective.

        Args: step: optimizer steps done; values: loss, scale, lr, grad_norm, ..., equal on every rank; index: this
              rank's sample ids of the step, which become one digest of the global batch, free of order and ranks;
              broken: samples this rank has skipped so far.
        """
        now = time.monotonic()
        elapsed, steps = now - self.since, step - self.last_step
        peak = get_accelerator().max_memory_allocated() if get_accelerator().device_name() != "cpu" else _peak_rss()
        counts = comm.all_reduce_sum(torch.stack([digest(index.cpu()), torch.tensor(broken)]).to(comm.local_device()))
        worst = comm.all_reduce_max(
            torch.tensor([self.wait_s / elapsed, float(peak)], dtype=torch.float64).to(comm.local_device())
        )
        wait, peak = worst.tolist()
        record = {
            "step": step,
            "samples": step * self.global_batch,
            "ids": f"{counts[0].item() & (2**64 - 1):016x}",
            **values,
            "samples_per_s": steps * self.global_batch / elapsed,
            "data_wait": wait,
            "peak_memory_bytes": int(peak),
            "broken_samples": int(counts[1]),
        }
        self.since, self.last_step, self.wait_s = now, step, 0.0
        if self.file is not None:
            self._write(record)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Points of their own, such as an evaluation's; rank 0 writes them."""
        if self.file is not None:
            record = {"step": step, "samples": step * self.global_batch, **values}
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            self._events(record)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self.file is not None
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        self._events(record)
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
        print(line, flush=True)

    def _events(self, record: dict[str, Any]) -> None:
        if self.write_events is None:
            return
        samples = int(record["samples"])
        points = [
            (name if "/" in name else f"train/{name}", float(value), samples)
            for name, value in record.items()
            if isinstance(value, int | float) and name not in ("step", "samples")
        ]
        self.write_events(points)


def digest(index: Tensor) -> Tensor:
    """0-d int64: sum of a 64-bit mix of each id; the same for the same ids, however they are split or ordered."""
    mixed = index.long() + 1
    for _ in range(2):  # after one round sums of few ids still collide
        mixed = mixed * 0x1E3779B97F4A7C15
        mixed = (mixed ^ ((mixed >> 29) & (2**35 - 1))) * 0x3F58476D1CE4E5B9
        mixed = mixed ^ ((mixed >> 32) & (2**32 - 1))
    return mixed.sum()


def _drop_after(path: Path, step: int) -> None:
    """Remove records of steps that a resumed run is about to do again, and a line a crash has cut."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
    if kept != lines:
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)


def _step_of(line: str) -> float:
    """Infinite for a line that a crash has left unreadable."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
