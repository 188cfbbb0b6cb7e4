"""Similarities of this rank's rows with the columns of all ranks.

The rows are the features of one side (image or text), and the columns those of the other side. Gathered has all columns
in one tensor; Ring receives them rank by rank. Both compute a sum for each of this rank's rows and columns, and the
gradients of rows and columns. The losses differ in how they use these results. Only the losses and the cost estimates
in plan/ import this file.
"""

# b local batch, B global = N b, D width, N ranks, n this rank; scales, shifts, moments [2, b]: first the values
# of this rank's rows, then the values of its columns

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.distributed.comm import DTYPES
from disco_ds.losses.base import (
    Embeddings,
    Loss,
    LossOutput,
    TeacherWeight,
    global_metrics,
    teacher_metrics,
)
from disco_ds.losses.kernels.similarity import (
    Block,
    Groups,
    Sums,
    Weights,
    softmax_gradient,
    softmax_sums,
)
from disco_ds.losses.kernels.tiles import Impl, Precision, Tiling, full_dtype

CommDtype = Literal["fp32", "fp16", "bf16"]
TileSize = Annotated[Sequence[Annotated[int, Field(gt=0)]], Field(min_length=2, max_length=2)]
"""Number of rows and number of columns."""
SameGroup = Literal["negatives", "ignored", "positives"]
Visit = Callable[[int, list[Tensor]], list[Tensor]]


class TiledLoss(Loss):
    """Base class of losses that compute similarities in tiles.

    Args:
        comm_dtype: Dtype in which the features of one side are sent to other ranks. None: the dtype that
            `precision` selects, so that sending adds no rounding.
        tile: Largest number of rows and columns of a tile. None: the default of Tiling (kernels/tiles.py).
        precision: Precision of the operands of matrix multiplications: one of those that Tiling describes.
        impl: What computes the tiles: "torch", "triton", or "auto", which selects Triton where it runs.
        group: The process group; None: all ranks.
    """

    same_group: SameGroup = "negatives"
    """How the loss treats the other pairs of an anchor's group. GroupedLoss describes the values."""
    function: type[torch.autograd.Function]
    """Computes the loss.

    Its inputs are the rows and the columns of `assign_sides`, the scale, the bias, this loss, the groups, the teachers,
    and whether gradients are enabled. A teacher is a tuple: its features of the rows' side, those of the columns' side,
    and the Teacher. The outputs are this rank's share of the loss; if accuracies are computed, the results of
    `count_hits` for rows and columns; and, if there are teachers, `parts` of `teacher_metrics`.
    """
    make_blocks: type[Blocks]
    """Gathered or Ring, which compare this rank's rows with the columns of all ranks."""
    compares_views: ClassVar[bool] = False
    """True for NT-Xent, whose sums also compare rows with rows, and columns with columns."""

    def __init__(
        self,
        comm_dtype: CommDtype | None = None,
        tile: TileSize | None = None,
        precision: Precision = "auto",
        impl: Impl = "auto",
        group: Any = None,
    ):
        super().__init__()
        self.tiling = Tiling(tile, precision, impl)
        self.comm_dtype = None if comm_dtype is None else DTYPES[comm_dtype]
        self.group = group

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss with `function`. Collective."""
        groups, metrics = self.find_groups(embeddings)
        rows, columns, swap = assign_sides(embeddings)
        teachers = [
            (t.text, t.image, t) if swap else (t.image, t.text, t) for t in embeddings.teacher
        ]
        trains = torch.is_grad_enabled()
        scale, bias = embeddings.scale, embeddings.bias
        value, *others = self.function.apply(
            rows, columns, scale, bias, self, groups, teachers, trains
        )
        num_hits = 2 if self.accuracy else 0
        hits, parts = others[:num_hits], others[num_hits:]
        if swap:
            hits.reverse()
        shares = teacher_metrics(embeddings, parts, self.group) if teachers else {}
        return LossOutput(
            value, global_metrics(value, hits, len(rows), self.group, shares) | metrics
        )

    def find_groups(self, embeddings: Embeddings) -> tuple[Groups | None, dict[str, Tensor]]:
        """Find the pairs of the global batch that share a group with other pairs. Collective.

        Returns:
            First, the groups of this rank's rows [b] and of all columns [B]; None if every pair is a negative of every
            other pair. Second, a dict with the metric grouped_pairs, the fraction of pairs that share a group with
            another pair; the dict is empty if the metric is not computed.

        Raises:
            ValueError: If the embeddings have no group_id and same_group needs it.
        """
        ids = embeddings.group_id
        negatives = self.same_group == "negatives"
        if ids is None and not negatives:
            raise ValueError(
                f"same_group={self.same_group} needs the groups: set data.group_by in a recipe, or pass group_id"
            )
        if ids is None or (negatives and not self.accuracy):
            return None, {}
        # Number the groups. A pair that is alone in its group gets -1 as a row and -2 as a column, so that no two of
        # these pairs seem to be in the same group.
        gathered = comm.gather(ids, group=self.group)
        _, numbers, sizes = gathered.unique(return_inverse=True, return_counts=True)
        sizes = sizes[numbers]
        shared = sizes > 1
        metrics = {"grouped_pairs": shared.float().mean()}
        if negatives or not shared.any():
            return None, metrics
        rows, columns = (numbers.where(shared, alone).int() for alone in (-1, -2))
        start = comm.rank(self.group) * len(ids)
        local = slice(start, start + len(ids))
        share = 1 / sizes[local].double() if self.same_group == "positives" else None
        return Groups(rows[local], columns, share), metrics


class GroupedLoss(TiledLoss):
    """Base class of tiled losses in which pairs of the same group need not be negatives of each other.

    Args:
        same_group: How the loss of an anchor treats the other pairs of the anchor's group. "negatives": like the pairs
            of other groups. "positives": as further positives of the anchor. "ignored": left out of the loss. The
            groups are in Embeddings.group_id. See docs/losses.md section 8.
        teacher_weight: Weight of the targets of the teachers in Embeddings.teacher, from 0 to 1; the weight of the
            pairs is 1 - teacher_weight. None: there is no teacher. See docs/losses.md section 9.
        options: Keyword arguments of TiledLoss.

    Raises:
        ValueError: If teacher_weight is combined with groups.
    """

    def __init__(
        self,
        same_group: SameGroup = "negatives",
        teacher_weight: TeacherWeight | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.same_group = same_group
        self.teacher_weight = teacher_weight
        if teacher_weight and same_group != "negatives":
            raise ValueError(
                f"same_group={same_group} does not work together with teacher_weight; use same_group=negatives"
            )


class _Columns:
    """The columns with which a rank's rows are compared.

    `sums` and `gradient` are collective: every rank must call them, in the same order. So is the constructor of
    Gathered.

    Args:
        columns: [b, D], this rank's columns.
        loss: Provides the tiling, the dtype in which columns are sent, and the process group.
        groups: The groups of this rank's rows and of all columns. None: all other pairs are negatives.
    """

    def __init__(self, columns: Tensor, loss: TiledLoss, groups: Groups | None = None):
        self.tiling = loss.tiling.on(columns.device)
        self.group = loss.group
        self.groups = groups
        self.local = self.tiling.quantize(columns)
        """This rank's columns, [b, D]: rounded as for the tiles, and then to the dtype in which they are sent.

        Float64 columns, used in exactness tests, stay float64.
        """
        if loss.comm_dtype is not None and self.local.dtype != torch.float64:
            self.local = self.local.to(loss.comm_dtype)
        self.columns = self.local
        """The columns that `gradient` starts with: in Gathered those of all ranks, in Ring those of this rank."""

    def _visit_all(self, sent: list[Tensor], visit: Visit) -> list[Tensor]:
        """Call `visit` until it has seen the columns of all ranks, and sum the results of all ranks. Collective.

        Args:
            sent: Columns (see `columns`) and vectors [b] in turn. A vector has one number for each column of this rank.
            visit: Called with a number `owner`, as for `block`, and with columns and vectors of the same m columns.
                Returns tensors of m rows, this rank's contributions to results for these columns.

        Returns:
            The results for this rank's columns.
        """
        raise NotImplementedError

    def gradient(
        self,
        rows: Tensor,
        scales: Sequence[Tensor],
        shifts: Tensor,
        shift: Tensor | None,
        needs_columns: bool,
        moments: tuple[Tensor, Tensor] | None = None,
        teachers: Sequence[Softmaxes] = (),
        target_gradient: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of this rank's rows and columns, without the contribution of the positive pairs.

        softmax_gradient defines both gradients. The gradient of a row is a sum over all columns, and the gradient of a
        column is a sum over the rows of all ranks.

        Args:
            rows: [b, D].
            scales: Scales of the rows and of the columns, as for `block`.
            shifts: [2, b], row_shift and column_shift of softmax_gradient.
            shift: The shift with which `sums` computed the sums, or None.
            needs_columns: Compute the gradient of the columns.
            moments: For Gathered: [b] and [B] float64, to which softmax_gradient adds the moments of this rank's rows
                and, as far as they come from this rank's rows, those of the columns of all ranks.
            teachers: The teachers' softmaxes, whose probabilities are soft targets.
            target_gradient: [b, D], receives the part of the rows' gradient that the caller must subtract (see
                softmax_gradient). Required with teachers.

        Returns:
            The two gradients, [b, D] each; None for that of the columns if it is not needed.
        """
        d_rows = zero_gradient(rows)

        def visit(owner: int, block: list[Tensor]) -> list[Tensor]:
            columns, column_shifts, *of_teachers = block
            d_columns = zero_gradient(columns) if needs_columns else None
            targets = [
                Weights(
                    each.blocks.block(each.operands[0], side, each.scales, owner, each.shift),
                    each.lse[0],
                    column_lse,
                    each.weight,
                    each.weighted_columns,
                )
                for each, side, column_lse in zip(
                    teachers, of_teachers[::2], of_teachers[1::2], strict=True
                )
            ]
            softmax_gradient(
                self.block(rows, columns, scales, owner, shift),
                shifts[0],
                column_shifts,
                d_rows,
                d_columns,
                moments,
                targets,
                target_gradient,
            )
            return [] if d_columns is None else [d_columns]

        # A weight depends on the sum over its whole column. The shifts of the columns are derived from these sums, so
        # they are sent too.
        sent = [self.columns, shifts[1]]
        for each in teachers:
            sent += [each.blocks.columns, each.lse[1]]
        gradients = self._visit_all(sent, visit)
        return d_rows, gradients[0] if gradients else None

    def block(
        self,
        rows: Tensor,
        columns: Tensor,
        scales: Sequence[Tensor],
        owner: int,
        shift: Tensor | None = None,
    ) -> Block:
        """Return the block of this rank's rows and m consecutive columns.

        Args:
            rows: [b, D].
            columns: [m, D].
            scales: Scales of the rows, [1] or [b], and of the columns, [1] or [m].
            owner: `columns` are the columns owner x m to owner x m + m - 1 of the global batch. In Ring, m = b, so
                `owner` is the rank that they belong to.
            shift: The shift of the block.
        """
        b, m = len(rows), len(columns)
        groups = self.groups
        if groups is not None:
            groups = replace(groups, columns=groups.columns.split(m)[owner])
        return Block(
            rows,
            columns,
            scales[0].expand(b),
            scales[1].expand(m),
            comm.rank(self.group) * b - owner * m,
            shift,
            self.tiling,
            groups,
        )


class Gathered(_Columns):
    """The columns of all ranks, gathered in one B x D tensor. This is faster than Ring if the tensor fits in memory.

    The gradient of the columns, if needed, takes a second tensor of this size.
    """

    def __init__(self, columns: Tensor, loss: TiledLoss, groups: Groups | None = None):
        super().__init__(columns, loss, groups)
        if comm.size(self.group) > 1:
            self.columns = comm.gather(self.local, group=self.group)
        start = comm.rank(self.group) * len(columns)
        self.local_range = slice(start, start + len(columns))
        self.local = self.columns[self.local_range]  # frees this rank's copy

    def sums(
        self, rows: Tensor, scales: Sequence[Tensor], shift: Tensor | None, maxima: bool
    ) -> Sums:
        """Compute the logarithm of the sum of exponentials over each of this rank's rows and each of its columns.

        The sum over a row includes the columns of all ranks, and the sum over a column the rows of all ranks. Both
        leave out the positive pair.

        Args:
            rows: [b, D].
            scales: Scales of the rows and of the columns, as for `block`.
            shift: [1], subtracted from all exponents. None: a separate maximum is subtracted for each row and column.
            maxima: Also find the largest exponents.

        Returns:
            Sums with one entry for each of the b rows and each of the b columns.
        """
        part = softmax_sums(self.block(rows, self.columns, scales, 0, shift), maxima)
        if comm.size(self.group) == 1:
            return part
        # The column sums are logarithms of sums over this rank's rows. To add them across ranks, subtract a common
        # base, take exp, and all-reduce. The base is the shift or, if there is none, each column's largest logarithm.
        base = shift
        if base is None:
            base = comm.all_reduce_max(part.columns, self.group)
        base = base.clamp(min=-1e300)  # an empty sum is -inf, and -inf - -inf is NaN
        total = comm.all_reduce_sum((part.columns - base).exp_().to(full_dtype(rows)), self.group)
        part.columns = total.double().log_().add_(base)[self.local_range]
        if maxima:
            columns_max = comm.all_reduce_max(part.maxima[1], self.group)[:, self.local_range]
            part.maxima = [part.maxima[0], columns_max]
        return part

    def _visit_all(self, sent: list[Tensor], visit: Visit) -> list[Tensor]:
        """Call `visit` once, on the columns of all ranks."""
        sent[1::2] = [comm.gather(x, self.group) for x in sent[1::2]]
        # Every rank computes the contribution of its rows to the results for all columns. A reduce_scatter sums the
        # contributions and sends each rank the sums for its own columns.
        return [comm.reduce_scatter_in_place(x, self.group) for x in visit(0, sent)]


class Ring(_Columns):
    """The columns of all ranks, sent around a ring block by block, so that no tensor grows with the global batch.

    All scales must be equal.
    """

    def sums(
        self, rows: Tensor, scales: Sequence[Tensor], shift: Tensor | None, maxima: bool
    ) -> Sums:
        """Compute the sums that Gathered.sums computes, processing the columns of one rank at a time."""
        parts: list[Sums] = []

        def visit(owner: int, block: list[Tensor]) -> list[Tensor]:
            part = softmax_sums(self.block(rows, block[0], scales, owner, shift), maxima)
            # The sums of this rank's rows stay on this rank. The sums of the owner's columns travel with the columns.
            if parts:
                parts[0].add_rows(part)
            else:
                parts.append(part)
            return [part.columns, *part.maxima[1:]]

        columns, *columns_max = comm.circulate([self.local], visit, _join_sums, self.group)
        return replace(parts[0], columns=columns, maxima=[*parts[0].maxima[:1], *columns_max])

    def _visit_all(self, sent: list[Tensor], visit: Visit) -> list[Tensor]:
        """Call `visit` on the columns of one rank after another."""
        return comm.circulate(sent, visit, _add_parts, self.group)


Blocks = Gathered | Ring


class Softmaxes:
    """The softmaxes over the rows and columns of the student's similarities, or of a teacher's. Collective.

    The sums are computed with a shift, which may be too large for some of them. If `shift_is_safe` returns False, call
    `recompute_per_row`.

    Args:
        rows: [b, D].
        columns: [b, D].
        scale: [1].
        loss: Provides make_blocks, compares_views, the tiling, the comm dtype and the process group.
        groups: The groups of this rank's rows and of all columns. None: all other pairs are negatives.
        maxima: Also find the largest exponents.
        weight: A teacher's weight in the loss.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        loss: TiledLoss,
        groups: Groups | None = None,
        maxima: bool = False,
        weight: float = 1.0,
    ):
        self.tiling = loss.tiling.on(rows.device)
        self.maxima = maxima
        self.weight = weight
        self.blocks: Any = loss.make_blocks(columns, loss, groups)
        self.same = (loss.make_blocks(rows, loss), self.blocks) if loss.compares_views else ()
        """For NT-Xent, the blocks that compare rows with rows and columns with columns; otherwise ()."""
        self.rows = self.tiling.quantize(rows)
        self.columns = self.blocks.local
        self.scale = divisible_scale(scale.detach())
        """[1] float64, not 0."""
        self.operands = self.rows, self.columns
        """Rows and columns as the tiles multiply them. If the scale is negative, its sign is moved to these."""
        self.scales = self.scale, self.scale
        """Scales of the rows and of the columns, without the sign that `operands` contains."""
        self.pair_logits = self.scale * pair_cosines(self.rows, self.columns, self.tiling)
        """[b] float64, the logits of the positive pairs."""
        self.weighted_columns: Tensor | None = None
        """[b, D], a teacher's columns, weighted by `weight` x Tiling.underflow_scale x its probabilities and summed."""
        self.shift: Tensor | None = overflow_shift(*self.operands, self.scale, loss.group)
        """[1] float64, subtracted from all logits before exp. None: a separate maximum for each row and column."""
        self._compute_sums()
        self.shift_is_safe = check_shift(self.shift, self.lse, loss.group)
        """Function that waits for the result of a check, and returns whether the shift suits all sums."""

    def recompute_per_row(self) -> None:
        """Compute the sums again, and subtract a separate maximum in each sum. Collective."""
        self.shift = None
        rows, columns = self.operands
        self.operands = self.take_sign(rows), self.take_sign(columns)
        self.scales = self.scale.abs(), self.scale.abs()
        self._compute_sums()

    def take_sign(self, features: Tensor) -> Tensor:
        """Multiply features by the sign of the scale, because the tiles need a positive scale."""
        return features * torch.where(self.scale < 0, -1, 1).to(features.dtype)

    @property
    def negative_mass(self) -> Tensor:
        """[b], the total probability of the negatives in each pair's row and column, multiplied by the weight."""
        return self.weight * (self.negatives_lse - self.lse).exp().sum(0)

    def _compute_sums(self) -> None:
        sums = self.blocks.sums(self.operands[0], self.scales, self.shift, self.maxima)
        totals = sums.rows, sums.columns
        for k, block in enumerate(self.same):
            part = block.sums(self.operands[k], self.scales, self.shift, self.maxima)
            torch.logaddexp(totals[k], part.rows, out=totals[k])
            if self.maxima:
                torch.maximum(sums.maxima[k], part.maxima[0], out=sums.maxima[k])
        self.sums = sums
        """The result of Gathered.sums or Ring.sums; for NT-Xent, with the entries of `same`."""
        self.negatives_lse = torch.stack([sums.rows, sums.columns])
        """[2, b] float64, logarithms of the sums of exp(logit) over each row and each column, without the pair."""
        self.lse = torch.logaddexp(self.negatives_lse, self.pair_logits)
        """[2, b] float64, the same sums with the pair."""


def assign_sides(embeddings: Embeddings) -> tuple[Tensor, Tensor, bool]:
    """Choose the rows, which stay on their rank, and the columns, which are sent to other ranks.

    The rows are the images, unless only the texts have a gradient. If one tower is locked, the columns are therefore
    the features of the locked tower. Their gradient is not needed, and only NT-Xent sends one back.

    Returns:
        Rows, columns, and whether the rows are texts.
    """
    swap = embeddings.text.requires_grad and not embeddings.image.requires_grad
    if swap:
        return embeddings.text, embeddings.image, True
    return embeddings.image, embeddings.text, False


def row_chunks(*sides: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same range of rows of all tensors, chunk by chunk, to limit the memory of temporary copies."""
    size = chunk_rows(sides[0].shape[-1], sides[0].device)
    return zip(*(side.split(size) for side in sides), strict=True)


def chunk_rows(D: int, device: torch.device) -> int:
    """Return the number of rows in each chunk of `row_chunks`, for rows of width D.

    On a GPU, where each call has overhead, a chunk takes 64 MiB in fp32. On a CPU, a chunk fits in the cache.
    """
    return 1024 if device.type == "cpu" else max(2**24 // D, 1)


def pair_cosines(rows: Tensor, columns: Tensor, tiling: Tiling) -> Tensor:
    """Compute the cosine of every positive pair, [b] float64.

    Features are processed in chunks, because an fp32 copy of all of them would be large. The cosines are computed from
    the same rounded features as in the tiles, so that a duplicate of a sample gets the same similarity as the sample
    itself.
    """
    full = full_dtype(rows)
    cosines = [
        (tiling.as_operand(r).to(full) * tiling.as_operand(c)).sum(1, dtype=torch.float64)
        for r, c in row_chunks(rows, columns)
    ]
    # Even for a single chunk, torch.cat would launch a kernel.
    return torch.cat(cosines) if len(cosines) > 1 else cosines[0]


def divisible_scale(scale: Tensor) -> Tensor:
    """Return the scale as float64, with values nearer to 0 than 1e-18 replaced by 1e-18.

    The replacement avoids a division by zero, because the gradient of the scale is computed by dividing by the scale.
    It changes logits and gradients of features by about 1e-18, which does not matter in practice.
    """
    scale = scale.double()
    return torch.where(scale.abs() < 1e-18, 1e-18, scale)


def overflow_shift(rows: Tensor, columns: Tensor, scale: Tensor, group: Any) -> Tensor:
    """Return a shift c >= 0 for which no sum of exp(x - c) overflows fp32; NaN if the scale is negative.

    c is [1] float64 and the same on all ranks. It may be so large that the sum of some row underflows, which
    `check_shift` detects from the sums. A shift of NaN is never safe. Collective: one all_reduce, for which the host
    does not wait.
    """
    # Cauchy-Schwarz bounds the exponents: x <= |row| |column| s, and a sum has at most B terms;
    # exp(88) is within fp32.
    dtype = full_dtype(rows)
    norms = [
        torch.linalg.vector_norm(x, dim=1, dtype=dtype).amax()
        for side in (rows, columns)
        for (x,) in row_chunks(side)
    ]
    local = torch.stack([torch.stack(norms).amax(), scale.detach()[0].to(dtype)])
    norm, s = comm.all_reduce_max(local, group).double().split(1)
    # The square root of a negative scale is NaN.
    return ((norm * s.sqrt()).square() + (math.log(len(rows) * comm.size(group)) - 88)).clamp_(
        min=0
    )


def check_shift(shift: Tensor, sums: Tensor, group: Any) -> Callable[[], bool]:
    """Start to check that this shift suits every sum of every rank. Collective: one all_reduce.

    `sums` are logarithms of sums of exponentials. If one of them is more than 58 below the shift, the shift is not
    safe: the reciprocal of the shifted sum, times Tiling.underflow_scale, could overflow fp32.

    Returns:
        A function that waits for the result of the check and returns it. It does not wait for work that is queued on
        the device after this call.
    """
    # If a sum is NaN, the comparison is False on every rank.
    is_safe = -comm.all_reduce_max(-sums.min(), group) >= shift[0] - 58
    if not is_safe.is_cuda:
        return lambda: bool(is_safe)
    copy = is_safe.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream(is_safe.device).record_event()

    def read() -> bool:
        copied.synchronize()
        return bool(copy)

    return read


def add_pairs(
    gradient: Tensor | None, others: Tensor, weight: Tensor, factor: Tensor, tiling: Tiling
) -> None:
    """Add the contribution of the positive pairs, in place, to a gradient that was computed in tiles.

    The result is factor x (gradient / Tiling.underflow_scale + weight_i others_i).

    Args:
        gradient: [b, D], the gradient without the positive pairs, multiplied by the underflow scale. None: do nothing.
        others: [b, D]. Row i is the feature with which row i of the gradient forms a positive pair.
        weight: [b], one weight per positive pair.
        factor: 0-d or [1].
        tiling: Provides the underflow scale and the rounding of `others`.
    """
    if gradient is None:
        return
    lifted = (weight * tiling.underflow_scale()).to(gradient.dtype)[:, None]
    # Divide in float64: in fp16, the quotient could become zero.
    factor = (factor.double() / tiling.underflow_scale()).to(gradient.dtype)
    for part, other, w in row_chunks(gradient, others, lifted):
        part.addcmul_(tiling.as_operand(other).to(part.dtype), w).mul_(factor)


def multiply_gradients(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """Multiply the gradients that forward left in ctx.gradients by the upstream gradient, in place.

    Raises:
        RuntimeError: If this is the second backward of the same loss, or a backward with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("this loss has no second derivative: call backward without create_graph")
    # Drop ctx's references to the gradients, so that autograd uses these tensors instead of copying them.
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise RuntimeError(
            "this loss allows one backward; for a second one, compute the loss again"
        )
    return [None if gradient is None else gradient.mul_(upstream) for gradient in gradients]


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a * b over all elements, 0-d float64."""
    parts = [(x.to(y.dtype) * y).sum(dtype=torch.float64) for x, y in row_chunks(a, b)]
    return torch.stack(parts).sum()


def zero_gradient(x: Tensor) -> Tensor:
    """Return zeros of the shape of x, in fp32, or in float64 if x is float64."""
    return torch.zeros(x.shape, dtype=full_dtype(x), device=x.device)


def _add_parts(local: list[Tensor], received: list[Tensor]) -> None:
    for x, y in zip(local, received, strict=True):
        x.add_(y)


def _join_sums(local: list[Tensor], received: list[Tensor]) -> None:
    torch.logaddexp(local[0], received[0], out=local[0])
    for x, y in zip(local[1:], received[1:], strict=True):
        torch.maximum(x, y, out=x)
