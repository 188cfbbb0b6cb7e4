"""What is done to one tile, in torch: the reference, and the way on a CPU. triton_tiles.py has the same functions.

r [n, D] and c [m, D] are factors (Tiling.factor); `pairs` is the diagonal to leave out, or None; `out` holds the tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.kernels.tiles import Tiling


def exponents(r: Tensor, c: Tensor, scale: Tensor, pairs: int | None, tiling: Tiling, out: Tensor) -> Tensor:
    """scale <r_i, c_j>, -inf at the pairs. The scale goes to the smaller factor where that costs no precision."""
    full = r.dtype == out.dtype and tiling.precision != "tf32"
    x = tiling.product(r * scale if full else r, c.T, out)
    if not full:
        x.mul_(scale)
    if pairs is not None:
        x.diagonal(pairs).fill_(-math.inf)
    return x


def exp_sums(
    r: Tensor, c: Tensor, scale: Tensor, shift: float, pairs: int | None, tiling: Tiling, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E = exp(x - shift) into `out`. Returns: its sums over rows and over columns, and the largest x of each."""
    x = exponents(r, c, scale, pairs, tiling, out)
    row_max, column_max = x.amax(1), x.amax(0)
    if shift:
        x.sub_(shift)
    x.exp_()
    return x.sum(1), x.sum(0), row_max, column_max


def exp_weights(
    r: Tensor,
    c: Tensor,
    scale: Tensor,
    shift: float,
    a: Tensor,
    beta: Tensor,
    pairs: int | None,
    tiling: Tiling,
    out: Tensor,
) -> Tensor:
    """exp(x - shift) (a_i + beta_j), a factor of a product."""
    x = exponents(r, c, scale, pairs, tiling, out)
    if shift:
        x.sub_(shift)
    return tiling.factor(x.exp_().mul_(a[:, None] + beta))


def log_sums(
    r: Tensor, c: Tensor, row_scale: Tensor, column_scale: Tensor, pairs: int | None, tiling: Tiling, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp_sums for any exponents: the sums' logarithms, found with the largest of each row and column."""
    cosine = exponents(r, c, torch.ones_like(row_scale[:1]), pairs, tiling, out)
    x, y = cosine * row_scale[:, None], cosine * column_scale
    return x.logsumexp(1), y.logsumexp(0), x.amax(1), y.amax(0)


def log_weights(
    r: Tensor,
    c: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    row_shift: Tensor,
    column_shift: Tensor,
    pairs: int | None,
    tiling: Tiling,
    out: Tensor,
) -> Tensor:
    """exp(x - row_shift_i) + exp(y - column_shift_j), x and y the exponents under either scale, a factor."""
    cosine = exponents(r, c, torch.ones_like(row_scale[:1]), pairs, tiling, out)
    x = (cosine * row_scale[:, None]).sub_(row_shift[:, None]).exp_()
    return tiling.factor(x.add_((cosine * column_scale).sub_(column_shift).exp_()))


def sigmoid_weights(
    r: Tensor, c: Tensor, scale: Tensor, bias: Tensor, pairs: int | None, tiling: Tiling, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z = x + bias. Returns: sums of softplus(z) and of sigmoid(z), Tiling.gain times sigmoid(z) as a factor of a
    product, and the largest z of each row and column."""
    z = exponents(r, c, scale, pairs, tiling, out).add_(bias)
    row_max, column_max = z.amax(1), z.amax(0)
    # From 40 on it is z even in float64; exp(z) overflows fp32 at 89.
    loss = F.softplus(z, threshold=40).sum(dtype=torch.float64)
    weight = z.sigmoid_().sum(dtype=torch.float64)
    return loss, weight, tiling.factor(z.mul_(tiling.gain())), row_max, column_max
