"""Softmax over a block of similarities that is never held whole: sums of exponentials, and the gradient's products.

The pairs are left out of every sum and every weight. Near convergence they would hide what matters: 1 - p cancels where
p is close to 1, while the sum over the others, set against the pair, does not (losses.md section 2).
"""

# n rows, m columns, D width; x_ij = scale <row i, column j>; pairs: column i + first belongs to row i

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from disco_ds.kernels import torch_tiles
from disco_ds.kernels.tiles import Scratch, Tiling, pairs_offset


@dataclass
class Sums:
    """Of a block without its pairs, float64; -inf for a sum or a maximum of nothing."""

    rows: Tensor
    """[n], log of the row's sum of exp(row_scale_i <row i, column j>)."""
    columns: Tensor
    """[m], the same of columns, with column_scale_j."""
    rows_max: Tensor
    """[n], the row's largest exponent."""
    columns_max: Tensor
    """[m]."""


def softmax_sums(
    rows: Tensor,
    columns: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    first: int | None,
    shift: float | None,
    tiling: Tiling,
    kept: list[Tensor] | None = None,
) -> Sums:
    """Sums of exponentials over rows and over columns, both from one product.

    Args:    rows [n, D], columns [m, D]; row_scale [n], column_scale [m], positive; first: None for a block without
             pairs; shift: a number for which exp(x - shift) and its sums stay within fp32, if all scales are equal:
             one exponential an element. None: every row and column finds its own.
             kept: receives exp(x - shift) of every tile in bf16, for softmax_gradient; needs a shift.
    Source:  losses.md sections 1 to 3.
    """
    n, m = len(rows), len(columns)
    zero = 0.0 if shift is not None else -math.inf
    row_sum, column_sum, row_max, column_max = (
        torch.full((size,), fill, dtype=torch.float64, device=rows.device)
        for fill, size in ((zero, n), (zero, m), (-math.inf, n), (-math.inf, m))
    )
    tiles = choose_tiles(tiling, rows, shift is not None)
    # Triton needs memory for a tile only to keep it.
    scratch = Scratch(tiling, rows, n, m) if tiles is torch_tiles or kept is not None else None
    dtype = torch.promote_types(rows.dtype, torch.float32)
    row_scale, column_scale = row_scale.to(dtype), column_scale.to(dtype)
    for i, j in tiling.cut(n, m, rows.device, written=scratch is not None):
        r, c, pairs = tiling.factor(rows[i]), tiling.factor(columns[j]), pairs_offset(i, j, first)
        out = None if scratch is None else scratch.tile(i, j)
        if shift is None:
            of_tile = tiles.log_sums(r, c, row_scale[i], column_scale[j], pairs, tiling, out)
            torch.logaddexp(row_sum[i], of_tile[0].double(), out=row_sum[i])
            torch.logaddexp(column_sum[j], of_tile[1].double(), out=column_sum[j])
        else:
            of_tile = tiles.exp_sums(r, c, row_scale[:1], shift, pairs, tiling, out)
            row_sum[i] += of_tile[0]
            column_sum[j] += of_tile[1]
        for largest, part, new in ((row_max, i, of_tile[2]), (column_max, j, of_tile[3])):
            torch.maximum(largest[part], new.double(), out=largest[part])
        if kept is not None and out is not None:
            kept.append(out.to(torch.bfloat16))
    if shift is not None:
        row_sum, column_sum = row_sum.log_().add_(shift), column_sum.log_().add_(shift)
    return Sums(row_sum, column_sum, row_max, column_max)


def softmax_gradient(
    rows: Tensor,
    columns: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    row_shift: Tensor,
    column_shift: Tensor,
    first: int | None,
    shift: float | None,
    tiling: Tiling,
    into_rows: Tensor | None,
    into_columns: Tensor | None,
    kept: list[Tensor] | None = None,
    moments: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Adds gain x W columns to into_rows [n, D] and gain x W^T rows to into_columns [m, D], both fp32, or None.

    W_ij = exp(row_scale_i <i, j> - row_shift_i) + exp(column_scale_j <i, j> - column_shift_j), 0 for pairs, each term
    at most 1; gain is Tiling.gain, for the caller to divide by.

    Args: row_shift [n], column_shift [m] float64; moments ([n], [m]): without a shift, to which is added gain x the sum
          of the first term of W times <i, j> over a row, and of the second over a column; others: see softmax_sums.
    """
    n, m = len(rows), len(columns)
    tiles, scratch = choose_tiles(tiling, rows, shift is not None), Scratch(tiling, rows, n, m)
    dtype = scratch.flat.dtype
    row_scale, column_scale = row_scale.to(dtype), column_scale.to(dtype)
    lifted = [x - math.log(tiling.gain()) for x in (row_shift, column_shift)]
    a, beta = (x if shift is None else (shift - x).exp_() for x in lifted)
    a, beta = a.to(dtype), beta.to(dtype)
    for number, (i, j) in enumerate(tiling.cut(n, m, rows.device)):
        r, c, pairs, out = (
            tiling.factor(rows[i]),
            tiling.factor(columns[j]),
            pairs_offset(i, j, first),
            scratch.tile(i, j),
        )
        if shift is None:
            parts = None if moments is None else (moments[0][i], moments[1][j])
            W = tiles.log_weights(r, c, row_scale[i], column_scale[j], a[i], beta[j], pairs, tiling, out, parts)
        elif kept:
            W = torch_tiles.kept_weights(kept[number], a[i], beta[j], tiling, out)
        else:
            W = tiles.exp_weights(r, c, row_scale[:1], shift, a[i], beta[j], pairs, tiling, out)
        if into_rows is not None:
            tiling.add_product(into_rows[i], W, c)
        if into_columns is not None:
            tiling.add_product(into_columns[j], W.T, r)


def choose_tiles(tiling: Tiling, rows: Tensor, has_shift: bool = True) -> ModuleType:
    """The module that does one tile. Without a shift, which is rare, it is always torch."""
    if has_shift and tiling.uses_triton(rows):
        from disco_ds.kernels import triton_tiles

        return triton_tiles
    return torch_tiles
