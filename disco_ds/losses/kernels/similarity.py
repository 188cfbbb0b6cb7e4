"""Softmax over a block of similarities that is never held whole: sums of exponentials, and the gradient's products.

The pairs are left out of every sum and every weight, because 1 - p cancels where p, the pair's probability, is close to
1, while the sum over the others divided by the pair does not (docs/losses.md section 2).
"""

# n rows, m columns, D width; x_ij = row_scale_i <row i, column j>, y_ij = column_scale_j <row i, column j>

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from disco_ds.losses.kernels import torch_tiles
from disco_ds.losses.kernels.availability import uses_triton
from disco_ds.losses.kernels.tiles import Scratch, Tile, Tiling, full_dtype, pairs_offset


@dataclass(frozen=True)
class Block:
    """The definition of the similarities of some rows and columns, of which none is computed here."""

    rows: Tensor
    """[n, D], held (Tiling.hold)."""
    columns: Tensor
    """[m, D], held."""
    row_scale: Tensor
    """[n], positive."""
    column_scale: Tensor
    """[m], positive."""
    first: int | None
    """Column i + first is row i's pair; None for a block without pairs."""
    shift: Tensor | None
    """[1] float64: exp(x - shift) and its sums are within fp32. For blocks whose scales are all equal: each element
    takes one exponential. None: every row and column subtracts its own largest exponent, which takes two."""
    tiling: Tiling

    @property
    def tiles(self) -> ModuleType:
        """The module with the operations on one tile: torch_tiles or triton_tiles."""
        if uses_triton(self.tiling, self.rows):
            from disco_ds.losses.kernels import triton_tiles

            return triton_tiles
        return torch_tiles

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scales, sums and gradients: fp32, or float64 for float64 features."""
        return full_dtype(self.rows)

    def scratch(self, tiles: ModuleType) -> Scratch:
        """Memory for one tile's weights, which torch computes in full precision and Triton writes as factors."""
        dtype = self.dtype if tiles is torch_tiles else self.tiling.factor_dtype(self.rows)
        return Scratch(self.tiling, len(self.rows), len(self.columns), dtype, self.rows.device)

    def tile(self, i: slice, j: slice, scratch: Scratch | None) -> Tile:
        """The tile of rows i and columns j, with memory for it in `scratch`."""
        r, c = self.tiling.factor(self.rows[i]), self.tiling.factor(self.columns[j])
        out = None if scratch is None else scratch.tile(i, j)
        return Tile(r, c, pairs_offset(i, j, self.first), self.tiling, out)


@dataclass
class Sums:
    """The sums of a block without its pairs, float64; -inf for a sum or a maximum of nothing."""

    rows: Tensor
    """[n], logarithm of the row's sum of exp(x)."""
    columns: Tensor
    """[m], logarithm of the column's sum of exp(y)."""
    rows_max: Tensor | None
    """[n], the row's largest x; None if maxima were not computed."""
    columns_max: Tensor | None
    """[m], the column's largest y."""


def softmax_sums(block: Block, maxima: bool = True, kept: Tensor | None = None) -> Sums:
    """Sums of exponentials over rows and over columns, both from one product.

    Args:    maxima: find the largest exponents too; kept: [n, m] bf16, receives exp(x - shift) for softmax_gradient;
             needs a shift.
    Source:  docs/losses.md sections 1 to 3.
    """
    n, m, device, shift, tiling = len(block.rows), len(block.columns), block.rows.device, block.shift, block.tiling
    tiles = block.tiles
    # Without a shift the running sums are logarithms, which logaddexp joins tile by tile.
    nothing = -math.inf if shift is None else 0.0
    row_sum, column_sum = (torch.full((k,), nothing, dtype=torch.float64, device=device) for k in (n, m))
    largest = [torch.full((k,), -math.inf, dtype=torch.float64, device=device) for k in (n, m) if maxima]
    row_scale, column_scale = block.row_scale.to(block.dtype), block.column_scale.to(block.dtype)
    # Triton's sums write no tile, so only torch needs memory for one.
    scratch = block.scratch(tiles) if tiles is torch_tiles else None
    for i, j in tiling.cut(n, m, device, written=scratch is not None):
        tile = block.tile(i, j, scratch)
        if shift is None:
            of_rows, of_columns, *tops = tiles.log_sums(tile, row_scale[i], column_scale[j], maxima)
            torch.logaddexp(row_sum[i], of_rows.double(), out=row_sum[i])
            torch.logaddexp(column_sum[j], of_columns.double(), out=column_sum[j])
        else:
            keep = None if kept is None else kept[i, j]
            of_rows, of_columns, *tops = tiles.exp_sums(tile, row_scale[:1], shift, keep, maxima)
            row_sum[i] += of_rows
            column_sum[j] += of_columns
        for total, part, new in zip(largest, (i, j), tops, strict=False):
            torch.maximum(total[part], new.double(), out=total[part])
    if shift is not None:
        row_sum, column_sum = row_sum.log_().add_(shift), column_sum.log_().add_(shift)
    return Sums(row_sum, column_sum, *(largest or (None, None)))


def softmax_gradient(
    block: Block,
    row_shift: Tensor,
    column_shift: Tensor,
    into_rows: Tensor | None,
    into_columns: Tensor | None,
    kept: Tensor | None = None,
    moments: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add gain x W columns to into_rows [n, D] and gain x W^T rows to into_columns [m, D], which are fp32, or None.

    W_ij = exp(x_ij - row_shift_i) + exp(y_ij - column_shift_j), 0 for pairs, with both terms at most 1. The caller
    divides by the gain, Tiling.gain.

    Args: row_shift [n], column_shift [m] float64; kept: the exponentials from softmax_sums; moments ([n], [m]): for
          blocks without a shift. Gain x the first term of W times <i, j>, summed over each row, is added to the first,
          and the second term's sums over each column to the second.
    """
    shift, tiling, dtype, tiles = block.shift, block.tiling, block.dtype, block.tiles
    scratch = block.scratch(tiles)
    row_scale, column_scale = block.row_scale.to(dtype), block.column_scale.to(dtype)
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
        # Two products of the library; the weights exist for one tile at a time.
        if into_rows is not None:
            tiling.add_product(into_rows[i], W, tile.c)
        if into_columns is not None:
            tiling.add_product(into_columns[j], W.T, tile.r)
