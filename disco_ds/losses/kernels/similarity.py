"""Softmax over a block of similarities that is never in memory as a whole.

This file computes the sums of exponentials and the gradients. Positive pairs are left out of every sum and every
weight, because this is more accurate. If the probability p of a positive pair is close to 1, computing 1 - p loses
digits; dividing the sum over the other entries by the exponential of the pair does not (docs/losses.md section 2).
"""

# n rows, m columns, D width; x_ij = row_scale_i <row i, column j>, y_ij = column_scale_j <row i,
# column j>

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from disco_ds.losses.kernels import torch_tiles
from disco_ds.losses.kernels.availability import uses_triton
from disco_ds.losses.kernels.tiles import Tile, Tiling, full_dtype, pairs_offset


@dataclass(frozen=True)
class Block:
    """Rows, columns and the parameters of their similarities. This class does not compute the similarities."""

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
    overflow fp32, and each element takes one exponential. None: the largest exponent of each row and each column is
    subtracted, which takes two exponentials for each element."""
    tiling: Tiling

    @property
    def tiles(self) -> ModuleType:
        """Return the module with the operations on one tile: torch_tiles or triton_tiles."""
        if uses_triton(self.tiling, self.rows):
            from disco_ds.losses.kernels import triton_tiles

            return triton_tiles
        return torch_tiles

    def start_maxima(self) -> list[Tensor]:
        """Return the initial maxima for raise_maxima: -inf for each row and for each column, float64."""
        device = self.rows.device
        sides = self.rows, self.columns
        return [torch.full((len(x),), -math.inf, dtype=torch.float64, device=device) for x in sides]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of scales, sums and gradients: fp32, or float64 for float64 features."""
        return full_dtype(self.rows)

    def scratch(self, tiles: ModuleType) -> Tensor:
        """Allocate memory for the largest tile: full precision for torch, the dtype of operands for Triton."""
        dtype = self.dtype if tiles is torch_tiles else self.tiling.factor_dtype(self.rows)
        rows, columns = self.tiling.size(self.rows.device)
        size = min(rows, len(self.rows)) * min(columns, len(self.columns))
        return torch.empty(size, dtype=dtype, device=self.rows.device)

    def tile(self, i: slice, j: slice, scratch: Tensor | None) -> Tile:
        """Return the tile of rows i and columns j, with its memory in `scratch`."""
        r = self.tiling.factor(self.rows[i])
        c = self.tiling.factor(self.columns[j])
        out = None if scratch is None else scratch[: len(r) * len(c)].view(len(r), len(c))
        return Tile(r, c, pairs_offset(i, j, self.first), self.tiling, out)


@dataclass
class Sums:
    """Logarithmic sums and maxima of a block without its positive pairs. float64; -inf for empty rows or columns."""

    rows: Tensor
    """[n], logarithm of the sum of exp(x) over each row."""
    columns: Tensor
    """[m], logarithm of the sum of exp(y) over each column."""
    rows_max: Tensor | None
    """[n], the largest x of each row; None if maxima were not computed."""
    columns_max: Tensor | None
    """[m], the largest y of each column; None if maxima were not computed."""


def raise_maxima(
    largest: Sequence[Tensor], tile: tuple[slice, slice], tops: Sequence[Tensor]
) -> None:
    """Update a block's maxima, if they are computed, with the maxima of one tile."""
    for total, part, new in zip(largest, tile, tops, strict=False):
        torch.maximum(total[part], new.double(), out=total[part])


def softmax_sums(block: Block, maxima: bool = True, kept: Tensor | None = None) -> Sums:
    """Sum exponentials over each row and each column, computing the similarities only once.

    Args:
        block: The similarities.
        maxima: Find the largest exponents too.
        kept: [n, m] bf16, receives exp(x - shift) for softmax_gradient. Only for blocks with a shift.

    Source: docs/losses.md sections 1 to 3.
    """
    n = len(block.rows)
    m = len(block.columns)
    device = block.rows.device
    shift = block.shift
    tiling = block.tiling
    tiles = block.tiles
    # Without a shift, the running sums are logarithms, to which logaddexp adds the sums of each tile.
    empty = -math.inf if shift is None else 0.0
    row_sum = torch.full((n,), empty, dtype=torch.float64, device=device)
    column_sum = torch.full((m,), empty, dtype=torch.float64, device=device)
    largest = block.start_maxima() if maxima else []
    row_scale = block.row_scale.to(block.dtype)
    column_scale = block.column_scale.to(block.dtype)
    # Triton computes the sums without writing the tile to memory, so only torch needs memory for a tile.
    scratch = block.scratch(tiles) if tiles is torch_tiles else None
    for i, j in tiling.cut(n, m, device, written=scratch is not None):
        tile = block.tile(i, j, scratch)
        if shift is None:
            in_rows, in_columns, *tops = tiles.log_sums(tile, row_scale[i], column_scale[j], maxima)
            torch.logaddexp(row_sum[i], in_rows.double(), out=row_sum[i])
            torch.logaddexp(column_sum[j], in_columns.double(), out=column_sum[j])
        else:
            keep = None if kept is None else kept[i, j]
            in_rows, in_columns, *tops = tiles.exp_sums(tile, row_scale[:1], shift, keep, maxima)
            row_sum[i] += in_rows
            column_sum[j] += in_columns
        raise_maxima(largest, (i, j), tops)
    if shift is not None:
        row_sum.log_().add_(shift)
        column_sum.log_().add_(shift)
    return Sums(row_sum, column_sum, *(largest or (None, None)))


def softmax_gradient(
    block: Block,
    row_shift: Tensor,
    column_shift: Tensor,
    d_rows: Tensor | None,
    d_columns: Tensor | None,
    kept: Tensor | None = None,
    moments: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add gain x W @ columns to d_rows, and gain x W^T @ rows to d_columns.

    W_ij = exp(x_ij - row_shift_i) + exp(y_ij - column_shift_j), and 0 at positive pairs. Both terms must be at most 1.
    The caller divides the results by the gain, Tiling.gain.

    Args:
        block: The similarities.
        row_shift: [n] float64.
        column_shift: [m] float64.
        d_rows: [n, D] fp32, or None if not needed.
        d_columns: [m, D] fp32, or None if not needed.
        kept: The exponentials that softmax_sums stored. None: compute them again.
        moments: ([n], [m]), only for blocks without a shift. gain x (first term of W_ij) x <row i, column j>, summed
            over each row, is added to the first vector. gain x (second term of W_ij) x <row i, column j>, summed over
            each column, is added to the second vector.
    """
    shift = block.shift
    tiling = block.tiling
    dtype = block.dtype
    tiles = block.tiles
    scratch = block.scratch(tiles)
    row_scale = block.row_scale.to(dtype)
    column_scale = block.column_scale.to(dtype)
    # With a shift, exp(x - row_shift) = exp(x - shift) a: one exponential serves both terms of W.
    lifted = [x - math.log(tiling.gain()) for x in (row_shift, column_shift)]
    a, beta = (x.to(dtype) if shift is None else (shift - x).exp_().to(dtype) for x in lifted)
    for i, j in tiling.cut(len(block.rows), len(block.columns), block.rows.device):
        tile = block.tile(i, j, scratch)
        if shift is None:
            parts = None if moments is None else (moments[0][i], moments[1][j])
            W = tiles.log_weights(tile, row_scale[i], column_scale[j], a[i], beta[j], parts)
        elif kept is not None:
            W = tiles.kept_weights(kept[i, j], a[i], beta[j], tiling, tile.out)
        else:
            W = tiles.exp_weights(tile, row_scale[:1], shift, a[i], beta[j])
        # Two library matrix multiplications; the weights of only one tile exist at a time.
        if d_rows is not None:
            tiling.add_product(d_rows[i], W, tile.c)
        if d_columns is not None:
            tiling.add_product(d_columns[j], W.T, tile.r)
