"""Where the columns of the similarity matrix come from: gathered once, or passing by on a ring.

A rank has its own rows against the columns of all ranks. Either way gives the sums over its rows and over its own
columns, and the gradients of both; the losses differ in what they do with them. Only losses import this file.
"""

# b local batch, B global = N b, D width, N ranks, n this rank; scales, shifts, moments [2, b]: of rows, of columns

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from disco_ds import comm
from disco_ds.kernels import Impl, Precision, Sums, Tiling, softmax_gradient, softmax_sums
from disco_ds.losses.base import Loss

Wire = Literal["fp32", "fp16", "bf16"]
WIRES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CHUNK = 1024
"""Rows that are worked on at a time where a temporary copy is made of them."""


class TiledLoss(Loss):
    """What tiled losses have in common: how to compute, and what to send.

    Args:   wire: dtype in which features of one side are sent to other ranks, None for their own; tile, precision,
            impl: see kernels.Tiling.
    Raises: ValueError for a value that is none of these.
    """

    def __init__(
        self,
        wire: Wire | None = None,
        tile: Sequence[int] | None = None,
        precision: Precision = "fp32",
        impl: Impl = "auto",
        group: Any = None,
    ):
        super().__init__()
        if wire is not None and wire not in WIRES:
            raise ValueError(f"wire must be one of {', '.join(WIRES)} or null, got {wire!r}")
        self.tiling = Tiling(tile, precision, impl)
        self.wire, self.group = None if wire is None else WIRES[wire], group


class Blocks(Protocol):
    """Collective: every rank must call, in the same order."""

    own: Tensor
    """This rank's columns as all ranks see them, [b, D]."""

    def sums(self, rows: Tensor, scales: Tensor, shift: float | None) -> Sums:
        """Over all columns for own rows, and over all rows for own columns, without pairs. All [b]."""

    def gradient(
        self, rows: Tensor, scales: Tensor, shifts: Tensor, shift: float | None, of_rows: bool, of_columns: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """softmax_gradient of own rows over all columns, and of own columns over all ranks' rows. Each [b, D]."""


class Gathered:
    """Columns of all ranks in one tensor: the fastest where B x D fits, twice if they have a gradient.

    Args:   columns [b, D]; wire: dtype they are gathered in, None for their own; keep: the sums hold on to the
            exponentials, b x B in bf16, so that the gradient need not compute them again.
    """

    def __init__(self, columns: Tensor, tiling: Tiling, wire: torch.dtype | None, group: Any, keep: bool = False):
        self.tiling, self.group, self.wire = tiling, group, wire
        self.columns = self._gather(columns)
        self.first = comm.rank(group) * len(columns)
        self.mine = slice(self.first, self.first + len(columns))
        self.own = self.columns[self.mine]
        self.kept: list[Tensor] | None = [] if keep else None

    def _gather(self, side: Tensor) -> Tensor:
        sent = side if self.wire is None or side.dtype == torch.float64 else side.to(self.wire)
        return comm.gather(sent.detach(), group=self.group) if comm.size(self.group) > 1 else sent.detach()

    def sums(self, rows: Tensor, scales: Tensor, shift: float | None) -> Sums:
        column_scale = comm.gather(scales[1], group=self.group)
        kept = None if shift is None else self.kept
        part = softmax_sums(rows, self.columns, scales[0], column_scale, self.first, shift, self.tiling, kept)
        largest = comm.all_reduce_max(part.columns_max, self.group)
        # Against one shift the sums add up as they are; without one, against the largest of any rank.
        base = comm.all_reduce_max(part.columns, self.group) if shift is None else torch.full_like(largest, shift)
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = comm.all_reduce_sum((part.columns - base.clamp_(min=-1e300)).exp_().to(dtype), self.group)
        columns = total.double().log_().add_(base)
        return Sums(part.rows, columns[self.mine], part.rows_max, largest[self.mine])

    def gradient(
        self,
        rows: Tensor,
        scales: Tensor,
        shifts: Tensor,
        shift: float | None,
        of_rows: bool,
        of_columns: bool,
        moments: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """moments, float64: softmax_gradient's, of own rows and of own columns, are written to it."""
        d_rows = zeros(rows) if of_rows else None
        d_columns = zeros(self.columns) if of_columns else None
        parts = None if moments is None else (moments[0], moments.new_zeros(len(self.columns)))
        column_scale, column_shift = (comm.gather(x[1], group=self.group) for x in (scales, shifts))
        kept = None if shift is None else self.kept
        softmax_gradient(
            rows, self.columns, scales[0], column_scale, shifts[0], column_shift, self.first, shift, self.tiling,
            d_rows, d_columns, kept, parts,
        )  # fmt: skip
        if moments is not None and parts is not None:
            moments[1] = comm.all_reduce_sum(parts[1], self.group)[self.mine]
        return d_rows, None if d_columns is None else comm.reduce_scatter_in_place(d_columns, self.group)


class GatheredBoth(Gathered):
    """Gathers the rows too, for the gradient, of which each rank then computes all of its own: no sums of features are
    sent, at the cost of one more product."""

    def gradient(
        self,
        rows: Tensor,
        scales: Tensor,
        shifts: Tensor,
        shift: float | None,
        of_rows: bool,
        of_columns: bool,
        moments: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        found: list[Tensor | None] = []
        for side, (anchors, wanted) in enumerate(((rows, of_rows), (self.own, of_columns))):
            other_scale, other_shift = (comm.gather(x[1 - side], group=self.group) for x in (scales, shifts))
            into = zeros(anchors) if wanted else None
            if wanted or moments is not None:
                others = self._gather(rows) if side else self.columns
                parts = None if moments is None else (moments[side], moments.new_zeros(len(others)))
                softmax_gradient(
                    anchors, others, scales[side], other_scale, shifts[side], other_shift, self.first, shift,
                    self.tiling, into, None, None, parts,
                )  # fmt: skip
            found.append(into)
        return found[0], found[1]


class Ring:
    """Columns of one rank at a time: nothing of size B is held, whatever the global batch.

    Args: columns [b, D]; wire: dtype they travel in, None for their own.
    """

    def __init__(self, columns: Tensor, tiling: Tiling, wire: torch.dtype | None, group: Any):
        self.tiling, self.group = tiling, group
        sent = columns if wire is None or columns.dtype == torch.float64 else columns.to(wire)
        self.own = sent.detach().contiguous()

    def sums(self, rows: Tensor, scales: Tensor, shift: float | None) -> Sums:
        total, largest = (torch.full((len(rows),), -math.inf, dtype=torch.float64, device=rows.device) for _ in "ab")
        of_columns = comm.Collector(_join_sums, self.group)
        passing = comm.around(scales[1].contiguous(), self.group)
        for block, columns in comm.around(self.own, self.group):
            _, scale = next(passing)
            part = softmax_sums(rows, columns, scales[0], scale, self._first(block), shift, self.tiling)
            torch.logaddexp(total, part.rows, out=total)
            torch.maximum(largest, part.rows_max, out=largest)
            of_columns.add(torch.stack([part.columns, part.columns_max]))
        columns_sum, columns_max = of_columns.result()
        return Sums(total, columns_sum, largest, columns_max)

    def gradient(
        self, rows: Tensor, scales: Tensor, shifts: Tensor, shift: float | None, of_rows: bool, of_columns: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        d_rows = zeros(rows) if of_rows else None
        collector = comm.Collector(Tensor.add_, self.group)
        vectors = comm.around(torch.stack([scales[1].double(), shifts[1]]), self.group)
        for block, columns in comm.around(self.own, self.group):
            _, (scale, shift_of_columns) = next(vectors)
            d_columns = collector.buffer(columns, full_dtype(columns)).zero_() if of_columns else None
            softmax_gradient(
                rows, columns, scales[0], scale, shifts[0], shift_of_columns, self._first(block), shift, self.tiling,
                d_rows, d_columns,
            )  # fmt: skip
            if d_columns is not None:
                collector.add(d_columns)
        return d_rows, collector.result() if of_columns else None

    def _first(self, block: int) -> int | None:
        """Pairs stand in one's own block only."""
        return 0 if block == comm.rank(self.group) else None


def positives(rows: Tensor, columns: Tensor, tiling: Tiling) -> Tensor:
    """Cosine of every pair, [b] float64, a few rows at a time: a copy of the features would not be small.

    Of the factors that the tiles multiply, so that a pair and a copy of it elsewhere have one similarity.
    """
    full = full_dtype(rows)
    pairs = zip(rows.split(CHUNK), columns.split(CHUNK), strict=True)
    return torch.cat(
        [(tiling.factor(r).to(full) * tiling.factor(c).to(full)).sum(1, dtype=torch.float64) for r, c in pairs]
    )


def agree_on_shift(rows: Tensor, columns: Tensor, scale: Tensor, cosines: Tensor, group: Any) -> float | None:
    """One number c for which exp(x - c), its sums and 1 / sums stay within fp32 on every rank; None if there is none.

    Needs top + ln B - 88 <= c <= bottom + 58 with the largest possible and the smallest positive exponent: lower, and
    sums overflow; higher, and the pair itself vanishes beside its reciprocal times Tiling.gain (losses.md section 2).
    0 is preferred: it costs no subtraction. Collective, one all_reduce of four numbers and a wait for them.
    """
    norms = [
        torch.stack([x.float().square().sum(1).max() for x in side.split(CHUNK)]).max() for side in (rows, columns)
    ]
    extremes = comm.all_reduce_max(torch.stack([*norms, -cosines.min().float(), scale.detach().float()[0]]), group)
    row_norm, column_norm, lowest, s = extremes.tolist()
    top, bottom = s * max(row_norm, column_norm), -s * lowest
    low, high = top + math.log(len(rows) * comm.size(group)) - 88, bottom + 58
    # Also None if anything is not a number: the comparison says no, and so it does on every rank.
    return min(max(0.0, low), high) if low <= high else None


def finish(gradient: Tensor | None, others: Tensor, weight: Tensor, factor: Tensor, tiling: Tiling) -> Tensor | None:
    """factor x (gradient / Tiling.gain + weight_i others_i), the pairs' part joined, in place. [b, D]"""
    if gradient is None:
        return None
    for part, other, w in zip(gradient.split(CHUNK), others.split(CHUNK), weight.split(CHUNK), strict=True):
        pair = tiling.factor(other).to(part.dtype) * w[:, None].to(part.dtype)
        part.mul_(1 / tiling.gain()).add_(pair).mul_(factor)
    return gradient


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> over all rows, 0-d float64."""
    parts = [(x.to(y.dtype) * y).sum(dtype=torch.float64) for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True)]
    return torch.stack(parts).sum()


def join_largest(mine: Tensor, theirs: Tensor) -> None:
    torch.maximum(mine, theirs, out=mine)


def _join_sums(mine: Tensor, theirs: Tensor) -> None:
    torch.logaddexp(mine[0], theirs[0], out=mine[0])
    join_largest(mine[1], theirs[1])


def full_dtype(x: Tensor) -> torch.dtype:
    """What sums of its rows are collected in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=full_dtype(x), device=x.device)
