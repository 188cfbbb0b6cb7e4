"""The sigmoid loss of a block of similarities that is never in memory as a whole.

The gradient of an entry depends only on that entry, not on the sum of its row. The loss and the gradient are therefore
computed in one pass, which computes each similarity only once. The diagonal of positive pairs is left out.
"""

# n rows, m columns, D width; z_ij = scale <row i, column j> + bias

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels.similarity import Block, add_positives, raise_maxima


@dataclass
class SigmoidSums:
    """Sums and maxima over a block without its diagonal, in float64."""

    loss: Tensor
    """0-d, the sum of softplus(z), or of softplus(-z) at positives."""
    weight: Tensor
    """0-d, the sum of sigmoid(z), or of -sigmoid(-z) at positives: the gradient with respect to the bias."""
    rows_max: Tensor | None
    """[n], the largest z of each row, -inf for an empty row; None if maxima were not computed."""
    columns_max: Tensor | None
    """[m], the largest z of each column; None if maxima were not computed."""
    rows_best: Tensor | None
    """[n], the largest z of each row among the other pairs of its group, -inf if it has none; None if not computed."""
    columns_best: Tensor | None
    """[m], the same for each column."""


def sigmoid_block(
    block: Block,
    bias: Tensor,
    d_rows: Tensor | None,
    d_columns: Tensor | None,
    maxima: bool = True,
) -> SigmoidSums:
    """Sum softplus(z) and sigmoid(z) over a block, and add to the gradients of rows and columns.

    With W = sigmoid(z), or -sigmoid(-z) at positives, gain x W @ columns is added to d_rows, and gain x W^T @ rows to
    d_columns. The caller divides the results by the gain, Tiling.gain.

    Args:
        block: The similarities. All scales must be equal.
        bias: [1].
        d_rows: [n, D] fp32, or None if not needed.
        d_columns: [m, D] fp32, or None if not needed.
        maxima: Find the largest z too.

    Source: docs/losses.md section 5 (SigLIP, arXiv 2303.15343).
    """
    device = block.rows.device
    tiling = block.tiling
    tiles = block.tiles
    scratch = block.scratch(tiles)
    scale = block.row_scale[:1].to(block.dtype)
    bias = bias.to(block.dtype)
    loss, weight = torch.zeros(2, dtype=torch.float64, device=device)
    largest = block.start_maxima() if maxima else []
    best = block.start_maxima() if maxima and block.has_positives else []
    for i, j in block.cut():
        tile = block.tile(i, j, scratch)
        losses, weights, W, *tops = tiles.sigmoid_weights(tile, scale, bias, maxima)
        loss += losses
        weight += weights
        raise_maxima(largest, (i, j), tops)
        if d_rows is not None:
            tiling.add_product(d_rows[i], W, tile.c)
        if d_columns is not None:
            tiling.add_product(d_columns[j], W.T, tile.r)
    for part in block.positives():
        z = part.cosines.mul_(scale).add_(bias).masked_fill_(~part.found, -math.inf)
        part.raise_best(best, z)
        z.masked_fill_(~part.found, math.inf)  # whose loss and weight are 0
        loss += F.softplus(-z, threshold=40).sum(dtype=torch.float64)
        W = (-z).sigmoid_().neg_()
        weight += W.sum(dtype=torch.float64)
        add_positives(part, W, tiling, d_rows, d_columns)
    none = None, None
    return SigmoidSums(loss, weight, *(largest or none), *(best or none))
