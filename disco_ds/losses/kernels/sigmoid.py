"""The sigmoid loss over a block of similarities that is never held whole: value and gradient in one pass.

A weight depends on its own entry only, not on the sum of its row, so no second product is needed. Pairs are left out.
"""

# n rows, m columns, D width; z_ij = scale <row i, column j> + bias

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.losses.kernels.similarity import Block


@dataclass
class SigmoidSums:
    """The sums of a block without its pairs, float64."""

    loss: Tensor
    """0-d, the sum of softplus(z)."""
    weight: Tensor
    """0-d, the sum of sigmoid(z): the gradient at the bias."""
    rows_max: Tensor | None
    """[n], the row's largest z, -inf for a row of nothing; None if maxima were not computed."""
    columns_max: Tensor | None
    """[m], the column's largest z."""


def sigmoid_block(
    block: Block, bias: Tensor, into_rows: Tensor | None, into_columns: Tensor | None, maxima: bool = True
) -> SigmoidSums:
    """Sums of a block; adds gain x W columns to into_rows and gain x W^T rows to into_columns, with W = sigmoid(z).

    The caller divides by the gain, Tiling.gain.

    Args:   block: with equal scales; bias [1]; into_rows [n, D], into_columns [m, D]: fp32, or None; maxima: compute
            the largest z too.
    Source: docs/losses.md section 5 (SigLIP, arXiv 2303.15343).
    """
    n, m, tiling, tiles, device = len(block.rows), len(block.columns), block.tiling, block.tiles, block.rows.device
    scratch = block.scratch(tiles)
    scale, bias = block.row_scale[:1].to(block.dtype), bias.to(block.dtype)
    loss, weight = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    largest = [torch.full((k,), -math.inf, dtype=torch.float64, device=device) for k in (n, m) if maxima]
    for i, j in tiling.cut(n, m, device):
        tile = block.tile(i, j, scratch)
        losses, weights, W, *tops = tiles.sigmoid_weights(tile, scale, bias, maxima)
        loss += losses
        weight += weights
        for total, part, new in zip(largest, (i, j), tops, strict=False):
            torch.maximum(total[part], new.double(), out=total[part])
        if into_rows is not None:
            tiling.add_product(into_rows[i], W, tile.c)
        if into_columns is not None:
            tiling.add_product(into_columns[j], W.T, tile.r)
    return SigmoidSums(loss, weight, *(largest or (None, None)))
