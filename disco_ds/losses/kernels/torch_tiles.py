"""What is done to one tile, in torch: the reference, and the way on a CPU. triton_tiles.py has the same functions.

r [n, D] and c [m, D] are factors (Tiling.factor); `pairs` is the diagonal to leave out, or None; `out` holds the tile
in full precision. Maxima are None where they are not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels.tiles import Tiling

STRIP = 2**17
"""Elements of a tile that all passes but the product see one after the other, on a CPU: they stay in its cache."""


def strips(x: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Rows of a tile that are worked on at a time."""
    height = len(x) if x.is_cuda else max(1, STRIP // x.shape[1] // multiple) * multiple
    return (slice(i, min(i + height, len(x))) for i in range(0, len(x), height))


def cosines(r: Tensor, c: Tensor, pairs: int | None, tiling: Tiling, out: Tensor) -> Tensor:
    """<r_i, c_j>, -inf at the pairs."""
    x = tiling.product(r, c.T, out)
    if pairs is not None:
        x.diagonal(pairs).fill_(-math.inf)
    return x


def exp_sums(
    r: Tensor, c: Tensor, scale: Tensor, shift: Tensor, pairs: int | None, tiling: Tiling, out: Tensor,
    keep: Tensor | None, maxima: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """E = exp(x - shift), kept in `keep` in its dtype. Returns: E's sums over rows and over columns, and the largest x
    of each."""
    x = cosines(r, c, pairs, tiling, out)
    row_sum, row_max = x.new_empty(2, len(r))
    column_sum, column_max = x.new_zeros(len(c)), x.new_full((len(c),), -math.inf)
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
    """Subtraction in place, left out where it would subtract 0 and looking costs nothing."""
    if not x.is_cuda and not shift.item():
        return lambda e: e
    amount = shift.to(x.dtype)
    return lambda e: e.sub_(amount)


def exp_weights(
    r: Tensor, c: Tensor, scale: Tensor, shift: Tensor, a: Tensor, beta: Tensor, pairs: int | None, tiling: Tiling,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """exp(x - shift) (a_i + beta_j), a factor of a product."""
    x = cosines(r, c, pairs, tiling, out)
    subtract = _shift(shift, x)
    for part in strips(x):
        subtract(x[part].mul_(scale)).exp_().mul_(a[part, None] + beta)
    return tiling.round(x)


def kept_weights(e: Tensor, a: Tensor, beta: Tensor, tiling: Tiling, out: Tensor) -> Tensor:
    """exp_weights of exponentials that were kept, in a dtype of their own."""
    for part in strips(out):
        out[part].copy_(e[part]).mul_(a[part, None] + beta)
    return tiling.round(out)


def log_sums(
    r: Tensor, c: Tensor, row_scale: Tensor, column_scale: Tensor, pairs: int | None, tiling: Tiling, out: Tensor,
    maxima: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """exp_sums for any exponents: the sums' logarithms, found with the largest of each row and column."""
    cosine = cosines(r, c, pairs, tiling, out)
    row_sum, row_max = cosine.new_empty(2, len(r))
    column_sum, column_max = cosine.new_empty(2, len(c))
    for part in strips(cosine):
        x = cosine[part] * row_scale[part, None]
        row_sum[part] = x.logsumexp(1)
        if maxima:
            row_max[part] = x.amax(1)
    for part in strips(cosine.T, multiple=64):  # else vector instructions would group the sums in another way
        y = cosine[:, part] * column_scale[part]
        column_sum[part] = y.logsumexp(0)
        if maxima:
            column_max[part] = y.amax(0)
    return row_sum, column_sum, *((row_max, column_max) if maxima else (None, None))


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
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """exp(x - row_shift_i) + exp(y - column_shift_j), x and y the exponents under either scale, a factor.

    To `moments` is added what each of the two, times the cosine, sums to: by rows the first, by columns the second.
    """
    W = cosines(r, c, pairs, tiling, out)
    for part in strips(W):
        cosine = W[part]
        x = (cosine * row_scale[part, None]).sub_(row_shift[part, None]).exp_()
        y = (cosine * column_scale).sub_(column_shift).exp_()
        if moments is not None:
            cosine.clamp_(min=-1e30)  # of the pairs, whose weight is 0
            moments[0][part].add_((x * cosine).sum(1))
            moments[1].add_((y * cosine).sum(0))
        torch.add(x, y, out=cosine)
    return tiling.round(W)


def sigmoid_weights(
    r: Tensor, c: Tensor, scale: Tensor, bias: Tensor, pairs: int | None, tiling: Tiling, out: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """z = x + bias. Returns: sums of softplus(z) and of sigmoid(z), Tiling.gain times sigmoid(z) as a factor of a
    product, and the largest z of each row and column."""
    z = cosines(r, c, pairs, tiling, out).mul_(scale).add_(bias)
    largest = (z.amax(1), z.amax(0)) if maxima else (None, None)
    # From 40 on it is z even in float64; exp(z) overflows fp32 at 89.
    loss = F.softplus(z, threshold=40).sum(dtype=torch.float64)
    weight = z.sigmoid_().sum(dtype=torch.float64)
    return loss, weight, tiling.round(z.mul_(tiling.gain())), *largest
