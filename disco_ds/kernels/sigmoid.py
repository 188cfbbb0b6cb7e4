"""The sigmoid loss over a block of similarities that is never held whole: value and gradient in one pass.

Nothing has to be known of the whole row before a weight is, so no second product is needed. Pairs are left out.
"""

# n rows, m columns, D width; z_ij = scale <row i, column j> + bias

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.kernels.similarity import choose_tiles
from disco_ds.kernels.tiles import Scratch, Tiling, pairs_offset


@dataclass
class SigmoidSums:
    """Of a block without its pairs, float64."""

    loss: Tensor
    """0-d, the sum of softplus(z)."""
    weight: Tensor
    """0-d, the sum of sigmoid(z): the gradient at the bias."""
    rows_max: Tensor
    """[n], the row's largest z; -inf of nothing."""
    columns_max: Tensor
    """[m]."""


def sigmoid_block(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    bias: Tensor,
    first: int | None,
    tiling: Tiling,
    into_rows: Tensor | None,
    into_columns: Tensor | None,
) -> SigmoidSums:
    """Sums of a block; adds gain x W columns to into_rows and gain x W^T rows to into_columns, W = sigmoid(z).

    Args:   rows [n, D], columns [m, D]; scale, bias [1]; first: column i + first is row i's pair, None without pairs;
            into_rows [n, D], into_columns [m, D]: fp32, or None; gain is Tiling.gain, for the caller to divide by.
    Source: losses.md section 5 (SigLIP, arXiv 2303.15343).
    """
    n, m = len(rows), len(columns)
    tiles = choose_tiles(tiling, rows)
    scratch = Scratch(tiling, rows, n, m)
    scale, bias = scale.to(scratch.flat.dtype), bias.to(scratch.flat.dtype)
    loss, weight = (torch.zeros((), dtype=torch.float64, device=rows.device) for _ in range(2))
    row_max, column_max = (torch.full((k,), -math.inf, dtype=torch.float64, device=rows.device) for k in (n, m))
    for i, j in tiling.cut(n, m, rows.device):
        r, c, pairs, out = (
            tiling.factor(rows[i]),
            tiling.factor(columns[j]),
            pairs_offset(i, j, first),
            scratch.tile(i, j),
        )
        losses, weights, W, *largest = tiles.sigmoid_weights(r, c, scale, bias, pairs, tiling, out)
        loss += losses
        weight += weights
        for total, part, new in ((row_max, i, largest[0]), (column_max, j, largest[1])):
            torch.maximum(total[part], new.double(), out=total[part])
        if into_rows is not None:
            tiling.add_product(into_rows[i], W, c)
        if into_columns is not None:
            tiling.add_product(into_columns[j], W.T, r)
    return SigmoidSums(loss, weight, row_max, column_max)
