"""The sigmoid loss of a block of similarities that is never in memory as a whole.

The gradient of an entry depends only on that entry, not on the sum of its row. The loss and the gradient are therefore
computed in one pass, which computes each similarity only once. The diagonal of positive pairs is left out.
"""

# n rows, m columns, D width; z_ij = scale <row i, column j> + bias; y: the teacher's z

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels.similarity import Block, raise_maxima


@dataclass
class SigmoidSums:
    """Sums and maxima over a block without its diagonal, in float64."""

    loss: Tensor
    """0-d, the sum of softplus(-z) over positives and softplus(z) over negatives."""
    weight: Tensor
    """0-d, the sum of -sigmoid(-z) over positives and sigmoid(z) over negatives: the gradient of the bias."""
    rows_max: Tensor | None
    """[1, n]: the largest z of each row among negatives. [2, n]: in addition, rows_max[1] is the largest z of each row
    among positives outside the diagonal. None if maxima were not computed."""
    columns_max: Tensor | None
    """[1, m]: the largest z of each column among negatives. [2, m]: in addition, columns_max[1] is the largest z of
    each column among positives outside the diagonal. None if maxima were not computed."""


@dataclass
class SigmoidTarget:
    """A teacher's soft targets for a block, sigmoid(y) for each entry, and the sums that sigmoid_block adds to."""

    block: Block
    """The teacher's similarities, with as many rows and columns as the student's."""
    bias: Tensor
    """[1], the teacher's logit bias."""
    weight: float
    """Weight of this teacher, above 0."""
    sums: Tensor
    """[2] float64, receives the sums of softplus(y) and of sigmoid(y) over the block without its diagonal."""
    weighted_columns: Tensor
    """[n, D'], receives gain x sigmoid(y) @ the teacher's columns, without the diagonal."""


def sigmoid_block(
    block: Block,
    bias: Tensor,
    d_rows: Tensor | None,
    d_columns: Tensor | None,
    maxima: bool = True,
    targets: Sequence[SigmoidTarget] = (),
    target_gradient: Tensor | None = None,
) -> SigmoidSums:
    """Compute the sums of a block, and add the block's contribution to the gradients of rows and columns.

    The weights W are -sigmoid(-z) at positives, sigmoid(z) at negatives, and 0 on the diagonal and at ignored entries.
    V is the sum over the teachers of weight x sigmoid(y), and 0 on the diagonal; without teachers, V is 0.
    gain x W @ columns is added to d_rows, and gain x (W - V)^T @ rows to d_columns. These results contain the factor
    gain (Tiling.gain), so the caller must divide them by it.

    Args:
        block: The similarities. All scales must be equal.
        bias: [1], the logit bias.
        d_rows: [n, D] fp32, or None if not needed.
        d_columns: [m, D] fp32, or None if not needed.
        maxima: Also find the largest z.
        targets: The teachers' soft targets.
        target_gradient: [n, D] fp32, receives gain x V @ columns; the caller subtracts it from d_rows. Required with
            targets.

    Source: docs/losses.md section 5 (SigLIP, arXiv 2303.15343).
    """
    device = block.rows.device
    tiling = block.tiling
    tiles = block.tiles
    scratch = block.scratch()
    scale = block.row_scale[:1].to(block.dtype)
    bias = bias.to(block.dtype)
    loss, weight = torch.zeros(2, dtype=torch.float64, device=device)
    largest = block.start_maxima() if maxima else []
    spare = block.scratch() if targets else None
    for i, j in block.cut():
        tile = block.tile(i, j, scratch)
        losses, weights, W, *tops = tiles.sigmoid_weights(tile, scale, bias, maxima)
        loss += losses
        weight += weights
        raise_maxima(largest, (i, j), tops)
        if d_rows is not None:
            tiling.add_product(d_rows[i], W, tile.c)
        for target in targets:
            teacher = target.block.tile(i, j, spare)
            y_scale, y_bias = (x[:1].to(block.dtype) for x in (target.block.row_scale, target.bias))
            *sums, V, _, _ = target.block.tiles.sigmoid_weights(teacher, y_scale, y_bias, False)
            target.sums += torch.stack(sums)
            tiling.add_product(target.weighted_columns[i], V, teacher.c)
            V = tiling.round(V.mul_(target.weight))
            assert target_gradient is not None
            tiling.add_product(target_gradient[i], V, tile.c)
            if d_columns is not None:
                W = tiling.round(W.sub_(V))
        if d_columns is not None:
            tiling.add_product(d_columns[j], W.T, tile.r)
    for some in block.positives():
        z = some.logits.add_(bias)
        some.raise_maxima(largest)
        z.masked_fill_(~some.found, math.inf)  # other entries: their loss and weight become 0
        loss += F.softplus(-z, threshold=40).sum(dtype=torch.float64)
        W = -(-z).sigmoid_()
        weight += W.sum(dtype=torch.float64)
        some.add_gradient(W, tiling, d_rows, d_columns)
    return SigmoidSums(loss, weight, *(largest or (None, None)))
