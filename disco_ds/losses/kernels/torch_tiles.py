"""The operations on one tile in torch: the reference implementation, which also runs on CPUs.

triton_tiles.py has the same functions. A tile has n rows r_i and m columns c_j. x_ij is the row scale times
<r_i, c_j>, and y_ij is the column scale times <r_i, c_j>. The arguments row_scale, row_shift and row_factor have the
shape [n]; column_scale, column_shift and column_factor have the shape [m]; scale, shift and bias have the shape [1].
All have the dtype of the similarities (fp32, or float64 for float64 features), except `shift`, which is always float64.
If maxima are not requested, the functions return None in their place.
"""

# n rows, m columns, D width of a tile

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels.tiles import Tile

STRIP = 2**17
"""Number of elements of a tile that are processed at a time on a CPU, so that they stay in its cache."""


def strips(x: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Split the rows of a tile into strips of about STRIP elements. On a GPU, the whole tile is one strip.

    Args:
        x: The tile.
        multiple: The number of rows of each strip, except the last, is a multiple of this number.
    """
    height = len(x) if x.is_cuda else max(1, STRIP // x.shape[1] // multiple) * multiple
    return (slice(i, min(i + height, len(x))) for i in range(0, len(x), height))


def cosines(tile: Tile) -> Tensor:
    """Compute <r_i, c_j> in tile.out, with -inf at the positive pairs and between pairs of the same group."""
    assert tile.out is not None
    x = tile.tiling.product(tile.r, tile.c.T, tile.out)
    if tile.pairs is not None:
        x.diagonal(tile.pairs).fill_(-math.inf)
    if tile.groups is not None:
        of_rows, of_columns = tile.groups
        # Few rows have a column of the same group in the tile; only these rows are changed.
        rows = torch.isin(of_rows, of_columns).nonzero()[:, 0]
        x[rows] = x[rows].masked_fill_(of_rows[rows, None] == of_columns, -math.inf)
    return x


def exp_sums(
    tile: Tile, scale: Tensor, shift: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sum E = exp(x - shift) over each row and each column, and find the largest x of each row and column.

    Args:
        tile: The tile; `out` must be given.
        scale: [1].
        shift: [1].
        maxima: Find the maxima.

    Returns:
        Row sums [n], column sums [m], row maxima [n], column maxima [m].
    """
    x = cosines(tile)
    n, m = x.shape
    row_sum, row_max = x.new_empty(2, n)
    column_sum, column_max = x.new_zeros(m), x.new_full((m,), -math.inf)
    shift = shift.to(x.dtype)
    for part in strips(x):
        e = x[part].mul_(scale)
        if maxima:
            torch.amax(e, 1, out=row_max[part])
            torch.maximum(column_max, e.amax(0), out=column_max)
        torch.sum(e.sub_(shift).exp_(), 1, out=row_sum[part])
        column_sum += e.sum(0)
    return row_sum, column_sum, *((row_max, column_max) if maxima else (None, None))


def exp_weights(
    tile: Tile, scale: Tensor, shift: Tensor, row_factor: Tensor, column_factor: Tensor
) -> Tensor:
    """Compute exp(x - shift) (row_factor_i + column_factor_j), rounded for use in a matrix multiplication."""
    x = cosines(tile)
    shift = shift.to(x.dtype)
    for part in strips(x):
        x[part].mul_(scale).sub_(shift).exp_().mul_(row_factor[part, None] + column_factor)
    return tile.tiling.quantize_tile(x)


def log_sums(
    tile: Tile, row_scale: Tensor, column_scale: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the logarithms of the sums of exp(x) over each row and of exp(y) over each column.

    No shift is needed, because the largest exponent of each row and column is subtracted. The return values have the
    same order and shapes as those of exp_sums.
    """
    cosine = cosines(tile)
    n, m = cosine.shape
    row_sum, row_max = cosine.new_empty(2, n)
    column_sum, column_max = cosine.new_empty(2, m)
    for part in strips(cosine):
        x = cosine[part] * row_scale[part, None]
        row_sum[part] = x.logsumexp(1)
        if maxima:
            row_max[part] = x.amax(1)
    # Use multiples of 64 columns. Other widths would change how vector instructions group the sums, and therefore
    # the last bits of the result.
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
    """Compute exp(x - row_shift_i) + exp(y - column_shift_j), rounded for use in a matrix multiplication.

    x are the cosines times the row scales, y the cosines times the column scales.

    Args:
        tile: The tile; `out` must be given.
        row_scale: [n].
        column_scale: [m].
        row_shift: [n].
        column_shift: [m].
        moments: ([n], [m]). The first term times the cosine, summed over each row, is added to the
            first vector; the second term times the cosine, summed over each column, to the second.
    """
    W = cosines(tile)
    for part in strips(W):
        cosine = W[part]
        x = (cosine * row_scale[part, None]).sub_(row_shift[part, None]).exp_()
        y = (cosine * column_scale).sub_(column_shift).exp_()
        if moments is not None:
            cosine.clamp_(min=-1e30)  # at positive pairs, -inf times the weight 0 would be NaN
            moments[0][part].add_((x * cosine).sum(1))
            moments[1].add_((y * cosine).sum(0))
        torch.add(x, y, out=cosine)
    return tile.tiling.quantize_tile(W)


def sigmoid_weights(
    tile: Tile, scale: Tensor, bias: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute sums and weights of the sigmoid loss, with z_ij = scale <r_i, c_j> + bias.

    Returns:
        The sum of softplus(z); the sum of sigmoid(z); the weights; the largest z of each row; and the largest z of each
        column. The weights are Tiling.underflow_scale times sigmoid(z), rounded for use in a matrix multiplication.
    """
    z = cosines(tile).mul_(scale).add_(bias)
    largest = (z.amax(1), z.amax(0)) if maxima else (None, None)
    # Above 40, softplus(z) is z even in float64, and exp(z) would overflow fp32 at 89.
    loss = F.softplus(z, threshold=40).sum(dtype=torch.float64)
    weight = z.sigmoid_().sum(dtype=torch.float64)
    return loss, weight, tile.tiling.quantize_tile(z.mul_(tile.tiling.underflow_scale())), *largest
