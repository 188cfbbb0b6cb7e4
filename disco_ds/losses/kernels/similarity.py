"""Softmax and sigmoid over a block of similarities that is never in memory as a whole.

This file computes sums of exponentials, the sigmoid loss, and the gradients. Positive pairs are left out of the sums,
and out of the weights with which the gradient adds up rows, because this is more accurate: if the probability p of a
positive pair is close to 1, computing 1 - p loses digits; computing it from the sum over the other entries does not
(docs/losses.md section 2).
"""

# n rows, m columns, D width; u is Tiling.underflow_scale
# softmax: x_ij = row_scale_i <row i, column j>, y_ij = column_scale_j <row i, column j>
# sigmoid: z_ij = scale <row i, column j> + bias, y: the teacher's z

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from types import ModuleType

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels import torch_tiles
from disco_ds.losses.kernels.tiles import Precision, Tile, Tiling, full_dtype, pairs_offset

FENCED = "3.7.1"
"""Oldest version of Triton that is used on compute capability 10 and higher. `lacks_fence` states why."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups:
    """The groups to which the rows and columns of a block belong. Entries within a group are not negatives.

    A pair that is alone in its group has the group number -1 as a row and -2 as a column, so the two never match.
    """

    rows: Tensor
    """[n] int32, the group number of each row."""
    columns: Tensor
    """[m] int32, the group number of each column."""
    share: Tensor | None
    """[n] float64, 1 / size of the row's group, if all entries within a group are positives. None: entries within a
    group are ignored, except on the diagonal."""


@dataclass(frozen=True)
class Positives:
    """Some rows and columns of a block, and which of their entries are positives outside the block's diagonal.

    Here, n and m are the numbers of these rows and columns.
    """

    i: Tensor
    """[n], indices of the rows in the block."""
    j: Tensor
    """[m], indices of the columns in the block."""
    r: Tensor
    """[n, D], the rows, as returned by Tiling.as_operand."""
    c: Tensor
    """[m, D], the columns, as returned by Tiling.as_operand."""
    logits: Tensor
    """[n, m], x in full precision."""
    mask: Tensor
    """[n, m] bool, True at positives."""
    share: Tensor
    """[n, 1], 1 / size of the row's group, in full precision."""

    def add_gradient(
        self, W: Tensor, tiling: Tiling, d_rows: Tensor | None, d_columns: Tensor | None
    ) -> None:
        """Add u x W @ columns to d_rows, and u x W^T @ rows to d_columns. W [n, m] is set to 0 except at positives."""
        W = tiling.quantize_tile(W.mul_(tiling.underflow_scale()).masked_fill_(~self.mask, 0))
        for total, at, a, b in ((d_rows, self.i, W, self.c), (d_columns, self.j, W.T, self.r)):
            if total is not None:
                out = total.new_empty(len(a), b.shape[1])
                total.index_add_(0, at, tiling.product(a, b, out))

    def raise_maxima(self, largest: Sequence[Tensor]) -> None:
        """Update a block's maxima over positives with self.logits. `largest` is empty if maxima are not computed."""
        logits = self.logits.masked_fill(~self.mask, -math.inf)
        for total, at, dim in zip(largest, (self.i, self.j), (1, 0), strict=False):
            total[1, at] = torch.maximum(total[1, at], logits.amax(dim).double())


@dataclass(frozen=True)
class Block:
    """Rows, columns and the parameters of their similarities. The functions in `tiles` compute the similarities."""

    rows: Tensor
    """[n, D], as returned by Tiling.quantize."""
    columns: Tensor
    """[m, D], as returned by Tiling.quantize."""
    row_scale: Tensor
    """[n], positive."""
    column_scale: Tensor
    """[m], positive."""
    diagonal: int
    """Row i and column i + diagonal are a positive pair. If it lies outside the block, the block has none."""
    shift: Tensor | None
    """[1] float64, only for blocks whose scales are all equal. It is chosen so that exp(x - shift) and its sums do not
    overflow fp32. With a shift, each element takes one exponential. None: the largest exponent of each row and each
    column is subtracted, which takes two exponentials for each element."""
    tiling: Tiling
    groups: Groups | None = None
    """The groups of the rows and columns. None if all entries outside the diagonal are negatives, for example because
    no two pairs share a group. A block with groups needs equal scales."""

    @property
    def tiles(self) -> ModuleType:
        """Return the module with the operations on one tile: torch_tiles or triton_tiles."""
        if uses_triton(self.tiling, self.rows):
            from disco_ds.losses.kernels import triton_tiles

            return triton_tiles
        return torch_tiles

    def start_maxima(self) -> list[Tensor]:
        """Return the initial maxima, -inf in float64, in the shapes of Sums.maxima."""
        count = 1 + self.has_positives
        return [
            torch.full((count, len(x)), -math.inf, dtype=torch.float64, device=x.device)
            for x in (self.rows, self.columns)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of scales, similarities and gradients: fp32, or float64 for float64 features."""
        return full_dtype(self.rows)

    def scratch(self) -> Tensor:
        """Allocate memory for the largest tile: in full precision for torch, in the operand dtype for Triton."""
        dtype = self.dtype
        if self.tiles is not torch_tiles:
            dtype = self.tiling.operand_dtype(self.rows)
        n, D = self.rows.shape
        rows, columns = self.tiling.size(n, len(self.columns), D, self.rows.device)
        return torch.empty(rows * columns, dtype=dtype, device=self.rows.device)

    def cut(self, written: bool = True) -> Iterator[tuple[slice, slice]]:
        """Yield the row and column range of every tile of the block. `written`: each tile is written to memory."""
        (n, D), m = self.rows.shape, len(self.columns)
        rows, columns = self.tiling.size(n, m, D, self.rows.device, written)
        for i in range(0, n, rows):
            for j in range(0, m, columns):
                yield slice(i, min(i + rows, n)), slice(j, min(j + columns, m))

    def tile(self, i: slice, j: slice, scratch: Tensor | None) -> Tile:
        """Return the tile of rows i and columns j, with its memory in `scratch`."""
        r = self.tiling.as_operand(self.rows[i])
        c = self.tiling.as_operand(self.columns[j])
        out = None if scratch is None else scratch[: len(r) * len(c)].view(len(r), len(c))
        groups = None
        if self.groups is not None:
            groups = self.groups.rows[i], self.groups.columns[j]
        return Tile(r, c, pairs_offset(i, j, self.diagonal), self.tiling, out, groups)

    @property
    def has_positives(self) -> bool:
        """Return whether pairs of the same group are positives of each other."""
        return self.groups is not None and self.groups.share is not None

    def positives(self) -> Iterator[Positives]:
        """Yield the positives outside the diagonal, which the block's tiles leave out.

        Only rows and columns whose group occurs on both sides of the block are multiplied. In most batches, these are
        few. They are sorted by group, so that the positives of a large group are in few tiles.
        """
        groups = self.groups
        if groups is None or groups.share is None:
            return
        rows = _find_meeting(groups.rows, groups.columns)
        columns = _find_meeting(groups.columns, groups.rows)
        height, width = self.tiling.tile or (2048, 2048)
        for i, j in product(rows.split(height), columns.split(width)):
            of_rows, of_columns = groups.rows[i], groups.columns[j]
            if not len(i) or of_rows[-1] < of_columns[0] or of_columns[-1] < of_rows[0]:
                continue
            r = self.tiling.as_operand(self.rows[i])
            c = self.tiling.as_operand(self.columns[j])
            x = self.tiling.product(r, c.T, r.new_empty(len(i), len(j), dtype=self.dtype))
            x *= self.row_scale[0]
            mask = of_rows[:, None] == of_columns
            mask &= i[:, None] + self.diagonal != j
            share = groups.share[i, None].to(self.dtype)
            yield Positives(i, j, r, c, x, mask, share)


def _find_meeting(numbers: Tensor, others: Tensor) -> Tensor:
    """Return the indices of those group numbers that also occur in `others`, sorted by group number."""
    indices = torch.isin(numbers, others).nonzero()[:, 0]
    return indices[numbers[indices].argsort(stable=True)]


@dataclass
class Sums:
    """Logarithms of sums, and maxima, over a block without its diagonal; float64, -inf for empty rows or columns.

    If the pairs of a group are positives of each other, the sums include these positives.
    """

    rows: Tensor
    """[n], logarithm of the sum of exp(x) over each row."""
    columns: Tensor
    """[m], logarithm of the sum of exp(y) over each column."""
    maxima: Sequence[Tensor]
    """The largest x of each row, [1, n] or [2, n], and the largest y of each column, [1, m] or [2, m]. The first number
    is the largest among negatives. If the pairs of a group are positives of each other, the second number is the
    largest among positives outside the diagonal. Empty if maxima were not computed."""
    positives: Tensor | None = None
    """[n], for each row, the sum of x over positives outside the diagonal. None if only the diagonal is positive."""

    def add_rows(self, other: Sums) -> None:
        """Include the sums and maxima of the same rows over other columns, in place."""
        torch.logaddexp(self.rows, other.rows, out=self.rows)
        for total, new in zip(self.maxima[:1], other.maxima[:1], strict=True):
            torch.maximum(total, new, out=total)
        if self.positives is not None and other.positives is not None:
            self.positives += other.positives


def raise_maxima(
    largest: Sequence[Tensor], tile: tuple[slice, slice], tops: Sequence[Tensor]
) -> None:
    """Update a block's maxima with those of one tile. `largest` is empty if maxima are not computed."""
    for total, part, new in zip(largest, tile, tops, strict=False):
        torch.maximum(total[0, part], new.double(), out=total[0, part])


def softmax_sums(block: Block, maxima: bool = True) -> Sums:
    """Sum exponentials over each row and each column, computing the similarities only once.

    Args:
        block: The similarities.
        maxima: Also find the largest exponents.

    Source: docs/losses.md sections 1 to 3.
    """
    shift = block.shift
    tiles = block.tiles
    # Without a shift, the running sums are logarithms, to which logaddexp adds the sums of each tile.
    empty = -math.inf if shift is None else 0.0
    row_sum, column_sum = (
        torch.full((len(x),), empty, dtype=torch.float64, device=x.device)
        for x in (block.rows, block.columns)
    )
    largest = block.start_maxima() if maxima else []
    row_scale = block.row_scale.to(block.dtype)
    column_scale = block.column_scale.to(block.dtype)
    # Triton computes the sums without writing the tile to memory, so only torch needs memory for a tile.
    scratch = block.scratch() if tiles is torch_tiles else None
    for i, j in block.cut(written=scratch is not None):
        tile = block.tile(i, j, scratch)
        if shift is None:
            in_rows, in_columns, *tops = tiles.log_sums(tile, row_scale[i], column_scale[j], maxima)
            torch.logaddexp(row_sum[i], in_rows.double(), out=row_sum[i])
            torch.logaddexp(column_sum[j], in_columns.double(), out=column_sum[j])
        else:
            in_rows, in_columns, *tops = tiles.exp_sums(tile, row_scale[:1], shift, maxima)
            row_sum[i] += in_rows
            column_sum[j] += in_columns
        raise_maxima(largest, (i, j), tops)
    if shift is not None:
        row_sum.log_().add_(shift)
        column_sum.log_().add_(shift)
    sums = Sums(row_sum, column_sum, largest)
    if block.has_positives:
        sums.positives = torch.zeros_like(row_sum)
        for positives in block.positives():
            positives.raise_maxima(largest)
            sums.positives[positives.i] += positives.logits.where(positives.mask, 0).sum(1)
            x = positives.logits.masked_fill_(~positives.mask, -math.inf)
            for total, at, dim in ((row_sum, positives.i, 1), (column_sum, positives.j, 0)):
                total[at] = torch.logaddexp(total[at], x.logsumexp(dim).double())
    return sums


@dataclass
class Weights:
    """The weights of a block, tile by tile: the sum of its softmaxes over rows and columns, multiplied by `weight`.

    They are weight x (exp(x_ij - row_shift_i) + exp(y_ij - column_shift_j)), and 0 on the diagonal and at ignored
    entries.
    """

    block: Block
    """The similarities. Those of a teacher have as many rows and columns as the student's."""
    row_shift: Tensor
    """[n] float64. For a teacher, the logarithm of the sum of exp(logit) over each row, including the positive pair."""
    column_shift: Tensor
    """[m] float64, the same for each column."""
    weight: float = 1.0
    """Weight of this teacher, above 0."""
    weighted_columns: Tensor | None = None
    """[n, D'], receives u x V @ the teacher's columns. V is this teacher's part of the V in softmax_gradient.

    None if not needed.
    """

    def __post_init__(self) -> None:
        block = self.block
        self.tiles = block.tiles
        self.row_scale = block.row_scale.to(block.dtype)
        self.column_scale = block.column_scale.to(block.dtype)
        # With a shift, the terms of the weights, times u, are exp(x - shift) row_factor and exp(x - shift)
        # column_factor. One exponential serves both.
        lift = math.log(block.tiling.underflow_scale() * self.weight)
        lifted = [x - lift for x in (self.row_shift, self.column_shift)]
        shift = block.shift
        self.row_factor, self.column_factor = (
            x.to(block.dtype) if shift is None else (shift - x).exp_().to(block.dtype)
            for x in lifted
        )

    def compute(
        self,
        i: slice,
        j: slice,
        scratch: Tensor,
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tile, Tensor]:
        """Return the tile of rows i and columns j, and its weights times u, rounded for a matrix multiplication.

        The weights are in the memory of `scratch`.
        """
        tiles, shift = self.tiles, self.block.shift
        of_rows, of_columns = self.row_factor[i], self.column_factor[j]
        tile = self.block.tile(i, j, scratch)
        if shift is None:
            parts = None if moments is None else (moments[0][i], moments[1][j])
            W = tiles.log_weights(
                tile, self.row_scale[i], self.column_scale[j], of_rows, of_columns, parts
            )
        else:
            W = tiles.exp_weights(tile, self.row_scale[:1], shift, of_rows, of_columns)
        return tile, W


def softmax_gradient(
    block: Block,
    row_shift: Tensor,
    column_shift: Tensor,
    d_rows: Tensor,
    d_columns: Tensor | None,
    moments: tuple[Tensor, Tensor] | None = None,
    targets: Sequence[Weights] = (),
    target_gradient: Tensor | None = None,
) -> None:
    """Add u x W @ columns to d_rows, and u x (W - V)^T @ rows to d_columns.

    W_ij is exp(x_ij - row_shift_i) + exp(y_ij - column_shift_j). Both terms must be at most 1. At positives outside the
    diagonal, W_ij is this sum minus 2 / size of the group. On the diagonal and at ignored entries, W_ij is 0. V is the
    sum of the weights that the teachers' logits give in the same way, each multiplied by Weights.weight; without
    teachers, V is 0. The results contain the factor u, so the caller must divide them by it.

    Args:
        block: The similarities.
        row_shift: [n] float64.
        column_shift: [m] float64.
        d_rows: [n, D] fp32.
        d_columns: [m, D] fp32, or None if not needed.
        moments: ([n], [m]), only for blocks without a shift. u x (first term of W_ij) x <row i, column j>, summed
            over each row, is added to the first vector. u x (second term of W_ij) x <row i, column j>, summed over
            each column, is added to the second vector.
        targets: The teachers' softmaxes.
        target_gradient: [n, D] fp32, receives u x V @ columns; the caller subtracts it from d_rows. Required with
            targets.
    """
    tiling = block.tiling
    student = Weights(block, row_shift, column_shift)
    scratch = block.scratch()
    # The teachers' blocks are cut into the same tiles as the student's, and share the memory of one tile.
    spare = block.scratch() if targets else scratch
    for i, j in block.cut():
        tile, W = student.compute(i, j, scratch, moments)
        tiling.add_product(d_rows[i], W, tile.c)
        for target in targets:
            teacher_tile, V = target.compute(i, j, spare)
            assert target_gradient is not None
            tiling.add_product(target_gradient[i], V, tile.c)
            if target.weighted_columns is not None:
                tiling.add_product(target.weighted_columns[i], V, teacher_tile.c)
            if d_columns is not None:
                W = tiling.quantize_tile(W.sub_(V))
        if d_columns is not None:
            tiling.add_product(d_columns[j], W.T, tile.r)
    dtype = block.dtype
    for positives in block.positives():
        P = (positives.logits - row_shift[positives.i, None].to(dtype)).exp_()
        Q = (positives.logits - column_shift[positives.j].to(dtype)).exp_()
        positives.add_gradient(P + Q - 2 * positives.share, tiling, d_rows, d_columns)


@dataclass
class SigmoidSums:
    """Sums and maxima over a block without its diagonal, in float64."""

    loss: Tensor
    """0-d, the sum of softplus(-z) over positives and softplus(z) over negatives."""
    weight: Tensor
    """0-d, the sum of -sigmoid(-z) over positives and sigmoid(z) over negatives: the gradient of the bias."""
    maxima: Sequence[Tensor]
    """The largest z of each row and of each column, as in Sums.maxima."""


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
    """[n, D'], receives u x sigmoid(y) @ the teacher's columns, without the diagonal."""


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
    u x W @ columns is added to d_rows, and u x (W - V)^T @ rows to d_columns. These results contain the
    factor u, so the caller must divide them by it.

    Args:
        block: The similarities. All scales must be equal.
        bias: [1], the logit bias.
        d_rows: [n, D] fp32, or None if not needed.
        d_columns: [m, D] fp32, or None if not needed.
        maxima: Also find the largest z.
        targets: The teachers' soft targets.
        target_gradient: [n, D] fp32, receives u x V @ columns; the caller subtracts it from d_rows. Required with
            targets.

    Source: docs/losses.md section 5 (SigLIP, arXiv 2303.15343).
    """
    tiling = block.tiling
    tiles = block.tiles
    scratch = block.scratch()
    scale = block.row_scale[:1].to(block.dtype)
    bias = bias.to(block.dtype)
    loss, weight = torch.zeros(2, dtype=torch.float64, device=block.rows.device)
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
            V = tiling.quantize_tile(V.mul_(target.weight))
            assert target_gradient is not None
            tiling.add_product(target_gradient[i], V, tile.c)
            if d_columns is not None:
                W = tiling.quantize_tile(W.sub_(V))
        if d_columns is not None:
            tiling.add_product(d_columns[j], W.T, tile.r)
    for positives in block.positives():
        z = positives.logits.add_(bias)
        positives.raise_maxima(largest)
        z.masked_fill_(~positives.mask, math.inf)  # other entries: their loss and weight become 0
        loss += F.softplus(-z, threshold=40).sum(dtype=torch.float64)
        W = -(-z).sigmoid_()
        weight += W.sum(dtype=torch.float64)
        positives.add_gradient(W, tiling, d_rows, d_columns)
    return SigmoidSums(loss, weight, largest)


def uses_triton(tiling: Tiling, x: Tensor) -> bool:
    """Return True if Triton should compute tiles from rows that have the device and dtype of x.

    Raises:
        ValueError: If `tiling.impl` is "triton" and Triton cannot run.
    """
    if tiling.impl == "torch" or x.dtype == torch.float64:
        return False
    if tiling.impl == "auto":
        return x.is_cuda and find_problem(x.device, tiling.precision) is None
    if not (x.is_cuda or _interprets()):
        raise ValueError(
            f"impl=triton needs the triton package and a GPU; the features are on {x.device}"
        )
    if x.is_cuda and (problem := find_problem(x.device, tiling.precision)):
        raise ValueError(f"impl=triton cannot run on {x.device}: {problem}")
    return True


@cache
def find_problem(device: torch.device, precision: Precision) -> str | None:
    """Return why the Triton kernels do not run on this GPU at this precision, or None if they run. Log the reason once.

    Two kernels are run, because having a GPU is not enough: Triton needs the system's C compiler to build its launcher,
    and the GPU may be too small or too new for a kernel.
    """
    problem = None
    try:
        import triton

        from disco_ds.losses.kernels import triton_tiles

        triton_tiles.try_out(device, precision)
        if lacks_fence(torch.cuda.get_device_capability(device), triton.__version__):
            problem = f"triton {triton.__version__} is too old for this GPU, which needs {FENCED} or later"
    # The compiler or the driver may raise any exception. Without Triton, the losses are slower but not wrong.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[-1]}"
    if problem:
        logger.warning(
            "the Triton kernels do not run on %s (%s); the losses use torch instead, which is slower",
            device,
            problem,
        )
    return problem


def lacks_fence(capability: tuple[int, int], version: str) -> bool:
    """Return True if this version of Triton may compute wrong matrix products on a GPU of this compute capability.

    Before 3.7.1, Triton emits no fence between asynchronous copies and the matrix products that read the copied data.
    Wrong results were seen on compute capability 10, and none on 9. Source: triton issue 9610, pytorch issue 181248.
    """
    return capability >= (10, 0) and Version(version) < Version(FENCED)


def _interprets() -> bool:
    if find_spec("triton") is None:
        return False
    import triton

    return triton.knobs.runtime.interpret
