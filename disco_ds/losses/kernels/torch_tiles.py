"""The operations on one tile in torch: the reference, and what a CPU runs. triton_tiles.py has the same functions.

Row scales, shifts and weights are [n], those of columns [m], all in full precision. Maxima are None where they are not
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels.tiles import Tile, Tiling

STRIP = 2**17
"""Elements of a tile that go through all elementwise passes at a time, so that they stay in a CPU's cache."""


def strips(x: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Cut the rows of a tile into strips of STRIP elements; on a GPU there is one strip."""
    height = len(x) if x.is_cuda else max(1, STRIP // x.shape[1] // multiple) * multiple
    return (slice(i, min(i + height, len(x))) for i in range(0, len(x), height))


def cosines(tile: Tile) -> Tensor:
    """<r_i, c_j>, with -inf at the pairs, in tile.out."""
    assert tile.out is not None
    x = tile.tiling.product(tile.r, tile.c.T, tile.out)
    if tile.pairs is not None:
        x.diagonal(tile.pairs).fill_(-math.inf)
    return x


def exp_sums(
    tile: Tile, scale: Tensor, shift: Tensor, keep: Tensor | None, maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of E = exp(x - shift) over rows and over columns, and the largest x of each row and column.

    Args: scale, shift [1]; keep [n, m]: receives E, rounded to its dtype.
    """
    x = cosines(tile)
    n, m = x.shape
    row_sum, row_max = x.new_empty(2, n)
    column_sum, column_max = x.new_zeros(m), x.new_full((m,), -math.inf)
    subtract = _shift(shift, x)
    for part in strips(x):
        e = x[part].mul_(scale)
        if maxima:
            torch.amax(e, 1, out=row_max[part])
            torch.maximum(column_max, e.amax(0), out=column_max)
        torch.sum(subtract(e).exp_(), 1, out=row_sum[part])
        column_sum += e.sum(0)
        if keep is not None:
            keep[part].copy_(e)
    return row_sum, column_sum, *((row_max, column_max) if maxima else (None, None))


def _shift(shift: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that subtracts the shift in place. On a CPU, where reading it is free, a shift of 0 is left out."""
    if not x.is_cuda and not shift.item():
        return lambda e: e
    amount = shift.to(x.dtype)
    return lambda e: e.sub_(amount)


def exp_weights(tile: Tile, scale: Tensor, shift: Tensor, a: Tensor, beta: Tensor) -> Tensor:
    """exp(x - shift) (a_i + beta_j), rounded as a factor of a product."""
    x = cosines(tile)
    subtract = _shift(shift, x)
    for part in strips(x):
        subtract(x[part].mul_(scale)).exp_().mul_(a[part, None] + beta)
    return tile.tiling.round(x)


def kept_weights(e: Tensor, a: Tensor, beta: Tensor, tiling: Tiling, out: Tensor) -> Tensor:
    """exp_weights from the exponentials e that exp_sums has kept."""
    for part in strips(out):
        out[part].copy_(e[part]).mul_(a[part, None] + beta)
    return tiling.round(out)


def log_sums(
    tile: Tile, row_scale: Tensor, column_scale: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Logarithms of exp_sums' sums without a shift: each row and column subtracts its own largest exponent."""
    cosine = cosines(tile)
    n, m = cosine.shape
    row_sum, row_max = cosine.new_empty(2, n)
    column_sum, column_max = cosine.new_empty(2, m)
    for part in strips(cosine):
        x = cosine[part] * row_scale[part, None]
        row_sum[part] = x.logsumexp(1)
        if maxima:
            row_max[part] = x.amax(1)
    # Strips of 64 columns or a multiple: others would change how vector instructions group the sums, and so the bits.
    for part in strips(cosine.T, multiple=64):
        y = cosine[:, part] * column_scale[part]
        column_sum[part] = y.logsumexp(0)
        if maxima:
            column_max[part] = y.amax(0)
    return row_sum, column_sum, *((row_max, column_max) if maxima else (None, None))


def log_weights(
    tile: Tile,
    row_scale: Tensor,
    column_scale: Tensor,
    row_shift: Tensor,
    column_shift: Tensor,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """exp(x - row_shift_i) + exp(y - column_shift_j), rounded as a factor; x and y have the rows' and columns' scales.

    Args: moments ([n], [m]): the row sums of the first term times the cosine are added to the first, the column sums of
          the second term times the cosine to the second.
    """
    W = cosines(tile)
    for part in strips(W):
        cosine = W[part]
        x = (cosine * row_scale[part, None]).sub_(row_shift[part, None]).exp_()
        y = (cosine * column_scale).sub_(column_shift).exp_()
        if moments is not None:
            cosine.clamp_(min=-1e30)  # the pairs' -inf, times their weight of 0, would not be a number
            moments[0][part].add_((x * cosine).sum(1))
            moments[1].add_((y * cosine).sum(0))
        torch.add(x, y, out=cosine)
    return tile.tiling.round(W)


def sigmoid_weights(
    tile: Tile, scale: Tensor, bias: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """With z = x + bias: the sums of softplus(z) and of sigmoid(z), Tiling.gain times sigmoid(z) rounded as a factor,
    and the largest z of each row and column."""
    z = cosines(tile).mul_(scale).add_(bias)
    largest = (z.amax(1), z.amax(0)) if maxima else (None, None)
    # From 40 on softplus(z) is z even in float64; exp(z) would overflow fp32 at 89.
    loss = F.softplus(z, threshold=40).sum(dtype=torch.float64)
    weight = z.sigmoid_().sum(dtype=torch.float64)
    return loss, weight, tile.tiling.round(z.mul_(tile.tiling.gain())), *largest
