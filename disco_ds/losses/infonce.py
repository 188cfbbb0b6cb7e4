"""InfoNCE computed tile by tile. `disco_fused`, `inf_cl` and `nt_xent` share this code."""

# b local batch, B global = N b, D width, N ranks; x_ij = s <row i, column j>; P softmax over a row,
# Q softmax over a column

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses.base import Teacher, count_hits
from disco_ds.losses.blocks import (
    Blocks,
    Softmaxes,
    TiledLoss,
    add_pairs,
    inner_product,
    multiply_gradients,
    zero_gradient,
)
from disco_ds.losses.kernels import Groups, full_dtype


class InfoNCE(torch.autograd.Function):
    """InfoNCE under the contract of base.py, without storing the matrix of similarities. For TiledLoss.compute.

    If gradients are needed, forward computes them, and backward only multiplies them by the upstream gradient. They are
    correct only if the upstream gradient is the same on every rank, as it is if the loss is averaged over ranks.

    Args:
        make_blocks: Gathered or Ring, which compare this rank's rows with the columns of all ranks.
        shared: True for NT-Xent. Image and text are then two views of the same image, and the denominator of a
            view contains all other views of the global batch, first and second ones.

    Source: docs/losses.md sections 1 and 2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        loss: TiledLoss,
        groups: Groups | None,
        teachers: Sequence[tuple[Tensor, Tensor, Teacher]],
        trains: bool,
        make_blocks: type[Blocks],
        shared: bool,
    ) -> tuple[Tensor | None, ...]:
        """Compute what TiledLoss.compute expects, and the gradients. Collective."""
        student = Softmaxes(
            rows, columns, scale, make_blocks, loss, groups, shared, maxima=loss.accuracy
        )
        weight = (loss.teacher_weight or 0.0) / max(len(teachers), 1)
        taught = [
            Softmaxes(side, other_side, teacher.scale, make_blocks, loss, weight=weight)
            for side, other_side, teacher in teachers
        ]
        for each in taught:
            if not each.fits():
                each.drop_shift()
        needed = [trains and each for each in ctx.needs_input_grad[:3]]
        gradients: tuple[Tensor | None, ...] = ()
        target_gradient: Tensor | None = None
        # Almost every shift fits. On a GPU, compute the gradients before the host waits for the answer, so that the GPU
        # has work while the host reads the answer and prepares what follows.
        if rows.is_cuda or student.fits():
            gradients, target_gradient = _gradients(student, taught, needed)
        if not student.fits():
            gradients, target_gradient = (), None  # frees the memory of those computed above
            student.drop_shift()
            gradients, target_gradient = _gradients(student, taught, needed)
        ctx.gradients = gradients
        # backward does not need the shift; tests and tools/check/losses.py read it.
        ctx.shift = student.shift
        # Compute -log(pair / (pair + others)) as log1p(others / pair), which stays precise when `others` is small.
        x, sums = student.x, student.sums
        per_pair = torch.logaddexp(torch.zeros_like(x), student.others - x).sum(0)
        if groups is not None and groups.share is not None and sums.positives is not None:
            # The target is uniform over the group, so the mean of the group's logits replaces the pair's logit. Summed
            # over all anchors, this change is the same in both directions, so compute it for the rows and double it.
            per_pair += 2 * (x * (1 - groups.share) - groups.share * sums.positives)
        parts: Tensor | None = None
        if target_gradient is not None:
            per_pair, parts = _add_teacher_loss(per_pair, student, taught, target_gradient)
        hits = [count_hits(top, x, student.scale) for top in (sums.rows_max, sums.columns_max)]
        ctx.mark_non_differentiable(*hits, *([] if parts is None else [parts]))
        return (per_pair.mean() / 2).to(full_dtype(rows)), parts, *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Multiply the gradients that forward computed by the upstream gradient."""
        return *multiply_gradients(ctx, upstream), None, None, None, None, None, None


def _add_teacher_loss(
    per_pair: Tensor, student: Softmaxes, teachers: Sequence[Softmaxes], target_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the teachers' part to the loss of the pairs.

    Args:
        per_pair: [b], the loss of each pair without teachers, summed over both directions.
        student: The student's softmaxes.
        teachers: The teachers' softmaxes.
        target_gradient: [b, D], as computed by softmax_gradient.

    Returns:
        This rank's share of the loss with teachers, 0-d, summed over both directions; and the means over both
        directions of its parts, [3]: the loss of the pairs, the cross-entropy with the targets, and the mean of
        KL(teacher, student) over the teachers. Without the entropy of the targets, the last one is left out.
    """
    x = student.x
    lifted = len(x) * student.tiling.gain()
    weight = sum(teacher.weight for teacher in teachers)
    of_pairs = per_pair.mean()
    # In the loss, soft targets move the probability of each negative from the positive pair's logit to the negative's.
    negative_mass = torch.stack([teacher.negative_mass for teacher in teachers]).sum(0)
    change = (negative_mass * x).mean()
    change -= student.scale[0] * inner_product(student.rows, target_gradient) / lifted
    parts = [of_pairs, of_pairs + change / weight]
    if student.maxima:
        entropy = torch.zeros_like(change)
        for teacher in teachers:
            y = teacher.x
            entropy += teacher.weight * (teacher.lse - y).sum(0).mean()
            entropy += (teacher.negative_mass * y).mean()
            assert teacher.weighted_columns is not None
            product = inner_product(teacher.rows, teacher.weighted_columns)
            entropy -= teacher.scale[0] * product / lifted
        parts.append(parts[1] - entropy / weight)
    return of_pairs + change, torch.stack(parts) / 2


def _gradients(
    student: Softmaxes, teachers: Sequence[Softmaxes], needed: Sequence[bool]
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Compute the gradients of rows, columns and scale, without the upstream gradient.

    Args:
        student: The student's softmaxes.
        teachers: The teachers' softmaxes. If student.maxima is True, their weighted_columns are computed.
        needed: Whether the gradient of the rows, the columns and the scale is needed.

    Returns:
        First, the gradients of rows, columns and scale, with None for each that is not needed. Second, the
        target_gradient of softmax_gradient, [b, D]; None without teachers.
    """
    if not any(needed) and not teachers:
        return (None, None, None), None
    needs_rows, needs_columns, needs_scale = needed
    rows, columns, scale, tiling = student.rows, student.columns, student.scale, student.tiling
    # The gradient of the scale is <rows, gradient of rows> / s, and also <columns, gradient of columns> / s, so the
    # gradient of one side is enough. With shared denominators, the scale's gradient is the mean of the two.
    shared = bool(student.same)
    d_rows: Any
    d_columns: Any
    target_gradient = zero_gradient(rows) if teachers else None
    for teacher in teachers:
        teacher.weighted_columns = zero_gradient(teacher.rows) if student.maxima else None
    d_rows, d_columns = student.blocks.gradient(
        student.signed[0],
        student.scales,
        student.lse,
        student.shift,
        needs_rows or needs_scale,
        needs_columns or (needs_scale and shared),
        teachers=teachers,
        target_gradient=target_gradient,
    )
    if target_gradient is not None and d_rows is not None:
        d_rows -= target_gradient
    # A shift never fits a negative scale, so the gradients that are used are computed without one.
    if student.shift is None and d_columns is not None:
        d_columns = student.absorb_sign(d_columns)  # it is a sum over the signed rows
    # In a block that compares rows with rows, or columns with columns, each view is an anchor and also a negative of
    # other views. The gradient of the block's rows includes both contributions.
    for block, views, lse, total in zip(
        student.same, student.signed, student.lse, (d_rows, d_columns), strict=False
    ):
        if total is not None:
            shifts = lse.expand(2, -1)
            total += block.gradient(views, student.scales, shifts, student.shift, True, False)[0]
    # The weight of a positive pair is P + Q - 2 = -(1 - P) - (1 - Q): minus the probability of all other entries in
    # its row and in its column.
    pairs = -student.negative_mass
    groups = student.blocks.groups
    if groups is not None and groups.share is not None:
        pairs += 2 * (1 - groups.share)  # for a pair in a group, the weight is P + Q - 2 / size
    # With teachers, the target of a positive pair is below 1 by the teachers' weighted probability of negatives.
    for teacher in teachers:
        pairs += teacher.negative_mass
    factor = scale / (2 * len(rows))
    add_pairs(d_rows, columns, pairs, factor, tiling)
    add_pairs(d_columns, rows, pairs, factor, tiling)
    d_scale = None
    if needs_scale:
        total = inner_product(rows, d_rows)
        if shared:
            total = (total + inner_product(columns, d_columns)) / 2
        d_scale = total / scale
    gradients = d_rows if needs_rows else None, d_columns if needs_columns else None, d_scale
    return gradients, target_gradient
