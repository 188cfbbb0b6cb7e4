"""The figures of a record: one table of what is logged, where it comes from, how it is reduced and how it is shown.

docs/logging.md adds one. The times, memory and bytes of a step's phases, which come in one piece, are in timers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from disco_ds.distributed import comm

MASK = 2**64 - 1


@dataclass(frozen=True)
class LogPoint:
    """A logged step, as this rank has it when the step is done."""

    step: int
    """Optimizer steps done."""
    metrics: Mapping[str, Tensor]
    """LossOutput.metrics and trouble.features_spread: 0-d each, the same on every rank."""
    scale: Tensor
    """[1], the scale the loss was computed with."""
    lr: float
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if a loss scaler skipped the step."""
    index: Tensor
    """Sample ids of this rank."""
    bias: Tensor | None = None
    """[1], the bias the loss was computed with; None: the model has none."""
    broken: int = 0
    """Samples that this rank has skipped so far."""
    skipped: int = 0
    """Batches that every rank has skipped so far."""
    model: nn.Module | None = None
    """The model as the engine holds it; at ZeRO 3 its parameters are empty outside of a forward."""


@dataclass(frozen=True)
class Interval:
    """Measurements of this rank since the record before."""

    samples: int
    """Samples of all ranks."""
    seconds: float
    wait_s: float
    """Seconds of waiting for data."""
    peak_bytes: int
    """Highest memory so far."""
    peak_samples_per_s: float | None
    """Samples per second at the devices' peak FLOP/s; None: not known."""


@dataclass(frozen=True)
class Figure:
    """A number that is logged."""

    name: str
    """Its key in metrics.jsonl; in TensorBoard it is train/name."""
    value: Callable[[LogPoint, Interval], Any] | None = None
    """Computes it on this rank; None: it is in LogPoint.metrics."""
    over_ranks: Literal["same", "sum", "max"] = "same"
    """How the ranks' values, which are integers for "sum", become one; "same": they are equal."""
    show: Callable[[Any], str] | None = None
    """Its text in the progress line, which may be empty; None: it is not shown there."""
    record: Callable[[Any], Any] = lambda value: value
    """Converts the value of all ranks to what is recorded."""
    if_known: bool = False
    """Leave it out of the record where it is None, which otherwise becomes null."""
    curve: str = ""
    """Label of its panel in report.png, which draws loss and accuracies in panels of their own; empty: none."""


def _mfu(now: LogPoint, since: Interval) -> float | None:
    if not since.peak_samples_per_s:
        return None
    return since.samples / since.seconds / since.peak_samples_per_s


FIGURES = (
    # One digest of the global batch, whatever its order and however the ranks share it.
    Figure("ids", lambda now, since: digest(now.index.cpu()), "sum", record=lambda value: f"{value & MASK:016x}"),
    Figure("loss", show="loss {:.4f}".format),
    Figure("i2t_accuracy", show="i2t {:.1%}".format),
    Figure("t2i_accuracy", show="t2i {:.1%}".format),
    Figure("scale", lambda now, since: now.scale.item(), show="scale {:.2f}".format, curve="logit scale"),
    Figure("bias", lambda now, since: None if now.bias is None else now.bias.item(), if_known=True),
    # Of a sample of the global batch, see trouble.py.
    Figure("image_cosine"),
    Figure("text_cosine"),
    Figure("image_rank"),
    Figure("text_rank"),
    Figure("lr", lambda now, since: now.lr, show="lr {:.2e}".format, curve="learning rate"),
    Figure(
        "grad_norm",
        lambda now, since: None if now.grad_norm is None else now.grad_norm.item(),
        show=lambda value: "norm skipped" if value is None else f"norm {value:.3f}",
        curve="gradient norm",
    ),
    Figure(
        "samples_per_s",
        lambda now, since: since.samples / since.seconds,
        show="{:,.0f} samples/s".format,
        curve="samples / s",
    ),
    Figure("mfu", _mfu, if_known=True),
    Figure("data_wait", lambda now, since: since.wait_s / since.seconds, "max", show="wait {:.0%}".format),
    Figure(
        "peak_memory_bytes",
        lambda now, since: since.peak_bytes,
        "max",
        show=lambda value: f"{value / 2**30:.1f} GiB",
        record=int,
    ),
    Figure(
        "broken_samples",
        lambda now, since: now.broken,
        "sum",
        show=lambda value: f"{value} broken samples skipped" if value else "",
    ),
    Figure(
        "skipped_batches",
        lambda now, since: now.skipped,
        show=lambda value: f"{value} batches skipped" if value else "",
    ),
)
"""The figures in the order of a record, except that all metrics of the loss follow the ids."""


def compute_figures(now: LogPoint, since: Interval) -> dict[str, Any]:
    """A record's figures by name. Collective: every rank must call, with the same step."""
    own = {figure.name: figure.value(now, since) for figure in FIGURES if figure.value}
    for kind, dtype, reduce in (("sum", torch.int64, comm.all_reduce_sum), ("max", torch.float64, comm.all_reduce_max)):
        names = [figure.name for figure in FIGURES if figure.over_ranks == kind]
        values = torch.stack([torch.as_tensor(own[name], dtype=dtype) for name in names])
        own |= zip(names, reduce(values.to(comm.local_device())).tolist(), strict=True)
    found = {
        figure.name: figure.record(own[figure.name])
        for figure in FIGURES
        if figure.value and not (figure.if_known and own[figure.name] is None)
    }
    losses = {name: value.item() for name, value in now.metrics.items()}
    return {"ids": found.pop("ids"), **losses, **found}


def digest(index: Tensor) -> Tensor:
    """0-d int64: sum of a 64-bit mix of each id; the same for the same ids, however they are split or ordered."""
    mixed = index.long() + 1
    for _ in range(2):  # after one round sums of few ids still collide
        mixed = mixed * 0x1E3779B97F4A7C15
        mixed = (mixed ^ ((mixed >> 29) & (2**35 - 1))) * 0x3F58476D1CE4E5B9
        mixed = mixed ^ ((mixed >> 32) & (2**32 - 1))
    return mixed.sum()
