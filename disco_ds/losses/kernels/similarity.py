"""Softmax over a block of similarities that is never in memory as a whole.

This file computes the sums of exponentials and the gradients. Positive pairs are left out of the sums, and out of the
weights with which the gradient adds up rows, because this is more accurate. If the probability p of a positive pair is
close to 1, computing 1 - p loses digits; computing it from the sum over the other entries does not (docs/losses.md
section 2).
"""

# n rows, m columns, D width; x_ij = row_scale_i <row i, column j>, y_ij = column_scale_j <row i,
# column j>

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from disco_ds.losses.kernels import torch_tiles
from disco_ds.losses.kernels.availability import uses_triton
from disco_ds.losses.kernels.tiles import Tile, Tiling, full_dtype, pairs_offset


@dataclass(frozen=True)
class Groups:
    """The groups to which the rows and columns of a block belong. Entries within a group are not negatives.

    A pair that is alone in its group has the group number -1 as a row and -2 as a column, so the two never match.
    """

    rows: Tensor
    """[n] int32, the group number of each row."""
    columns: Tensor
    """[m] int32, the group number of each column."""
    share: Tensor | None
    """[n] float64, 1 / size of the row's group, if all entries within a group are positives. None: entries within a
    group are ignored, except on the diagonal."""

    def with_owner(self, owner: int) -> Groups:
        """Return a copy with all rows, but only the columns that belong to the rank `owner`."""
        n = len(self.rows)
        return replace(self, columns=self.columns[owner * n : (owner + 1) * n])


@dataclass(frozen=True)
class Positives:
    """Some rows and columns of a block, and which of their entries are positives outside the block's diagonal.

    Here, n and m are the numbers of these rows and columns.
    """

    i: Tensor
    """[n], indices of the rows in the block."""
    j: Tensor
    """[m], indices of the columns in the block."""
    r: Tensor
    """[n, D], the rows, as returned by Tiling.factor."""
    c: Tensor
    """[m, D], the columns, as returned by Tiling.factor."""
    logits: Tensor
    """[n, m], x in full precision."""
    found: Tensor
    """[n, m] bool, True at positives."""
    share: Tensor
    """[n, 1], 1 / size of the row's group, in full precision."""

    def add_gradient(
        self, W: Tensor, tiling: Tiling, d_rows: Tensor | None, d_columns: Tensor | None
    ) -> None:
        """Add gain x W @ columns to d_rows, and gain x W^T @ rows to d_columns, with W set to 0 except at positives."""
        W = tiling.round(W.mul_(tiling.gain()).masked_fill_(~self.found, 0))
        for total, at, a, b in ((d_rows, self.i, W, self.c), (d_columns, self.j, W.T, self.r)):
            if total is not None:
                out = total.new_empty(len(a), b.shape[1])
                total.index_add_(0, at, tiling.product(a, b, out))

    def raise_maxima(self, largest: Sequence[Tensor]) -> None:
        """Update a block's maxima over positives with self.logits. `largest` is empty if maxima are not computed."""
        logits = self.logits.masked_fill(~self.found, -math.inf)
        for total, at, dim in zip(largest, (self.i, self.j), (1, 0), strict=False):
            total[1, at] = torch.maximum(total[1, at], logits.amax(dim).double())


@dataclass(frozen=True)
class Block:
    """Rows, columns and the parameters of their similarities. The functions in `tiles` compute the similarities."""

    rows: Tensor
    """[n, D], as returned by Tiling.hold."""
    columns: Tensor
    """[m, D], as returned by Tiling.hold."""
    row_scale: Tensor
    """[n], positive."""
    column_scale: Tensor
    """[m], positive."""
    first: int | None
    """Row i and column i + first are a positive pair; None for a block without positive pairs."""
    shift: Tensor | None
    """[1] float64, only for blocks whose scales are all equal. It is chosen so that exp(x - shift) and its sums do not
    overflow fp32. With a shift, each element takes one exponential. None: the largest exponent of each row and each
    column is subtracted, which takes two exponentials for each element."""
    tiling: Tiling
    groups: Groups | None = None
    """The groups of the rows and columns. None if all entries outside the diagonal are negatives, for example because
    no two pairs share a group. A block with groups needs equal scales."""

    @property
    def tiles(self) -> ModuleType:
        """Return the module with the operations on one tile: torch_tiles or triton_tiles."""
        if uses_triton(self.tiling, self.rows):
            from disco_ds.losses.kernels import triton_tiles

            return triton_tiles
        return torch_tiles

    def start_maxima(self) -> list[Tensor]:
        """Return the initial maxima, -inf in float64, in the shapes of Sums.rows_max and Sums.columns_max."""
        count = 1 + self.has_positives
        return [
            torch.full((count, len(x)), -math.inf, dtype=torch.float64, device=x.device)
            for x in (self.rows, self.columns)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of scales, similarities and gradients: fp32, or float64 for float64 features."""
        return full_dtype(self.rows)

    def scratch(self) -> Tensor:
        """Allocate memory for the largest tile: in full precision for torch, in the operand dtype for Triton."""
        dtype = self.dtype
        if self.tiles is not torch_tiles:
            dtype = self.tiling.factor_dtype(self.rows)
        n, D = self.rows.shape
        rows, columns = self.tiling.size(n, len(self.columns), D, self.rows.device)
        return torch.empty(rows * columns, dtype=dtype, device=self.rows.device)

    def cut(self, written: bool = True) -> Iterator[tuple[slice, slice]]:
        """Yield the row and column range of every tile of the block. `written`: each tile is written to memory."""
        n, D = self.rows.shape
        return self.tiling.cut(n, len(self.columns), D, self.rows.device, written)

    def tile(self, i: slice, j: slice, scratch: Tensor | None) -> Tile:
        """Return the tile of rows i and columns j, with its memory in `scratch`."""
        r = self.tiling.factor(self.rows[i])
        c = self.tiling.factor(self.columns[j])
        out = None if scratch is None else scratch[: len(r) * len(c)].view(len(r), len(c))
        groups = None
        if self.groups is not None:
            groups = self.groups.rows[i], self.groups.columns[j]
        return Tile(r, c, pairs_offset(i, j, self.first), self.tiling, out, groups)

    @property
    def has_positives(self) -> bool:
        """Return whether pairs of the same group are positives of each other."""
        return self.groups is not None and self.groups.share is not None

    def positives(self) -> Iterator[Positives]:
        """Yield the positives outside the diagonal, which the block's tiles leave out.

        Only rows and columns whose group occurs on both sides of the block are multiplied. In most batches, these are
        few. They are sorted by group, so that the positives of a large group are in few tiles.
        """
        groups = self.groups
        if groups is None or groups.share is None:
            return
        rows = _find_meeting(groups.rows, groups.columns)
        columns = _find_meeting(groups.columns, groups.rows)
        height, width = self.tiling.tile or (2048, 2048)
        for i, j in product(rows.split(height), columns.split(width)):
            of_rows, of_columns = groups.rows[i], groups.columns[j]
            if not len(i) or of_rows[-1] < of_columns[0] or of_columns[-1] < of_rows[0]:
                continue
            r = self.tiling.factor(self.rows[i])
            c = self.tiling.factor(self.columns[j])
            x = self.tiling.product(r, c.T, r.new_empty(len(i), len(j), dtype=self.dtype))
            x *= self.row_scale[0]
            found = of_rows[:, None] == of_columns
            if self.first is not None:
                found &= i[:, None] + self.first != j
            share = groups.share[i, None].to(self.dtype)
            yield Positives(i, j, r, c, x, found, share)


def _find_meeting(numbers: Tensor, others: Tensor) -> Tensor:
    """Return the indices of those group numbers that also occur in `others`, sorted by group number."""
    places = torch.isin(numbers, others).nonzero()[:, 0]
    return places[numbers[places].argsort(stable=True)]


@dataclass
class Sums:
    """Logarithms of sums, and maxima, over a block without its diagonal; float64, -inf for empty rows or columns.

    If the pairs of a group are positives of each other, the sums include these positives.
    """

    rows: Tensor
    """[n], logarithm of the sum of exp(x) over each row."""
    columns: Tensor
    """[m], logarithm of the sum of exp(y) over each column."""
    rows_max: Tensor | None
    """Largest x of each row: rows_max[0] [n] among negatives. If the pairs of a group are positives of each
    other, rows_max[1] [n] is the largest x among positives outside the diagonal. None if maxima were not computed."""
    columns_max: Tensor | None
    """Largest y of each column: columns_max[0] [m] among negatives. If the pairs of a group are positives of each
    other, columns_max[1] [m] is the largest y among positives outside the diagonal. None if maxima were not
    computed."""
    positives: Tensor | None = None
    """[n], for each row, the sum of x over positives outside the diagonal. None if only the diagonal is positive."""


def raise_maxima(
    largest: Sequence[Tensor], tile: tuple[slice, slice], tops: Sequence[Tensor]
) -> None:
    """Update a block's maxima with those of one tile. `largest` is empty if maxima are not computed."""
    for total, part, new in zip(largest, tile, tops, strict=False):
        torch.maximum(total[0, part], new.double(), out=total[0, part])


def softmax_sums(block: Block, maxima: bool = True) -> Sums:
    """Sum exponentials over each row and each column, computing the similarities only once.

    Args:
        block: The similarities.
        maxima: Also find the largest exponents.

    Source: docs/losses.md sections 1 to 3.
    """
    n = len(block.rows)
    m = len(block.columns)
    device = block.rows.device
    shift = block.shift
    tiles = block.tiles
    # Without a shift, the running sums are logarithms, to which logaddexp adds the sums of each tile.
    empty = -math.inf if shift is None else 0.0
    row_sum = torch.full((n,), empty, dtype=torch.float64, device=device)
    column_sum = torch.full((m,), empty, dtype=torch.float64, device=device)
    largest = block.start_maxima() if maxima else []
    row_scale = block.row_scale.to(block.dtype)
    column_scale = block.column_scale.to(block.dtype)
    # Triton computes the sums without writing the tile to memory, so only torch needs memory for a tile.
    scratch = block.scratch() if tiles is torch_tiles else None
    for i, j in block.cut(written=scratch is not None):
        tile = block.tile(i, j, scratch)
        if shift is None:
            in_rows, in_columns, *tops = tiles.log_sums(tile, row_scale[i], column_scale[j], maxima)
            torch.logaddexp(row_sum[i], in_rows.double(), out=row_sum[i])
            torch.logaddexp(column_sum[j], in_columns.double(), out=column_sum[j])
        else:
            in_rows, in_columns, *tops = tiles.exp_sums(tile, row_scale[:1], shift, maxima)
            row_sum[i] += in_rows
            column_sum[j] += in_columns
        raise_maxima(largest, (i, j), tops)
    if shift is not None:
        row_sum.log_().add_(shift)
        column_sum.log_().add_(shift)
    sums = Sums(row_sum, column_sum, *(largest or (None, None)))
    if block.has_positives:
        sums.positives = torch.zeros_like(row_sum)
        for some in block.positives():
            some.raise_maxima(largest)
            sums.positives[some.i] += some.logits.where(some.found, 0).sum(1)
            x = some.logits.masked_fill_(~some.found, -math.inf)
            for total, at, dim in ((row_sum, some.i, 1), (column_sum, some.j, 0)):
                total[at] = torch.logaddexp(total[at], x.logsumexp(dim).double())
    return sums


@dataclass
class Weights:
    """The weights of a block, tile by tile: the sum of its softmaxes over rows and columns, multiplied by `weight`.

    They are weight x (exp(x_ij - row_shift_i) + exp(y_ij - column_shift_j)), and 0 on the diagonal and at ignored
    entries.
    """

    block: Block
    """The similarities. Those of a teacher have as many rows and columns as the student's."""
    row_shift: Tensor
    """[n] float64. For a teacher, the logarithm of the sum of exp(logit) over each row, including the positive pair."""
    column_shift: Tensor
    """[m] float64, the same for each column."""
    weight: float = 1.0
    """Weight of this teacher, above 0."""
    weighted_columns: Tensor | None = None
    """[n, D'], receives gain x V @ the teacher's columns. V is this teacher's part of the V in softmax_gradient.

    None if not needed.
    """

    def __post_init__(self) -> None:
        block = self.block
        self.tiles = block.tiles
        self.row_scale = block.row_scale.to(block.dtype)
        self.column_scale = block.column_scale.to(block.dtype)
        # With a shift, the terms of the weights, times the gain, are exp(x - shift) a and exp(x - shift) beta. One
        # exponential serves both.
        lift = math.log(block.tiling.gain() * self.weight)
        lifted = [x - lift for x in (self.row_shift, self.column_shift)]
        shift = block.shift
        self.a, self.beta = (
            x.to(block.dtype) if shift is None else (shift - x).exp_().to(block.dtype)
            for x in lifted
        )

    def compute(
        self,
        i: slice,
        j: slice,
        scratch: Tensor,
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tile, Tensor]:
        """Return the tile of rows i and columns j, and its weights times the gain, rounded for a matrix multiplication.

        The weights are in the memory of `scratch`.
        """
        tiles, shift, a, beta = self.tiles, self.block.shift, self.a[i], self.beta[j]
        tile = self.block.tile(i, j, scratch)
        if shift is None:
            parts = None if moments is None else (moments[0][i], moments[1][j])
            W = tiles.log_weights(tile, self.row_scale[i], self.column_scale[j], a, beta, parts)
        else:
            W = tiles.exp_weights(tile, self.row_scale[:1], shift, a, beta)
        return tile, W


def softmax_gradient(
    block: Block,
    row_shift: Tensor,
    column_shift: Tensor,
    d_rows: Tensor | None,
    d_columns: Tensor | None,
    moments: tuple[Tensor, Tensor] | None = None,
    targets: Sequence[Weights] = (),
    target_gradient: Tensor | None = None,
) -> None:
    """Add gain x W @ columns to d_rows, and gain x (W - V)^T @ rows to d_columns.

    W_ij is exp(x_ij - row_shift_i) + exp(y_ij - column_shift_j). Both terms must be at most 1. At positives outside the
    diagonal, W_ij is this sum minus 2 / size of the group. On the diagonal and at ignored entries, W_ij is 0. V is the
    sum of the weights that the teachers' logits give in the same way, each multiplied by Weights.weight; without
    teachers, V is 0. The results contain the factor gain (Tiling.gain), so the caller must divide them by it.

    Args:
        block: The similarities.
        row_shift: [n] float64.
        column_shift: [m] float64.
        d_rows: [n, D] fp32, or None if not needed.
        d_columns: [m, D] fp32, or None if not needed.
        moments: ([n], [m]), only for blocks without a shift. gain x (first term of W_ij) x <row i, column j>, summed
            over each row, is added to the first vector. gain x (second term of W_ij) x <row i, column j>, summed over
            each column, is added to the second vector.
        targets: The teachers' softmaxes.
        target_gradient: [n, D] fp32, receives gain x V @ columns; the caller subtracts it from d_rows. Required with
            targets.
    """
    tiling = block.tiling
    student = Weights(block, row_shift, column_shift)
    scratch = block.scratch()
    # The teachers' blocks are cut into the same tiles as the student's, and share the memory of one tile.
    spare = block.scratch() if targets else scratch
    for i, j in block.cut():
        tile, W = student.compute(i, j, scratch, moments)
        if d_rows is not None:
            tiling.add_product(d_rows[i], W, tile.c)
        for target in targets:
            teacher_tile, V = target.compute(i, j, spare)
            assert target_gradient is not None
            tiling.add_product(target_gradient[i], V, tile.c)
            if target.weighted_columns is not None:
                tiling.add_product(target.weighted_columns[i], V, teacher_tile.c)
            if d_columns is not None:
                W = tiling.round(W.sub_(V))
        if d_columns is not None:
            tiling.add_product(d_columns[j], W.T, tile.r)
    dtype = block.dtype
    for some in block.positives():
        P = (some.logits - row_shift[some.i, None].to(dtype)).exp_()
        Q = (some.logits - column_shift[some.j].to(dtype)).exp_()
        some.add_gradient(P + Q - 2 * some.share, tiling, d_rows, d_columns)
