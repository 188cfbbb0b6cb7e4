"""InfoNCE computed tile by tile. `disco_fused`, `inf_cl` and `nt_xent` share this code."""

# b local batch, B global = N b, D width, N ranks; x_ij = s <row i, column j>; P softmax over a row,
# Q softmax over a column

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses.base import Embeddings, LossOutput, count_hits, global_metrics
from disco_ds.losses.blocks import (
    Blocks,
    SoftTargets,
    TiledLoss,
    add_pairs,
    assign_sides,
    divisible_scale,
    inner_product,
    multiply_gradients,
    overflow_shift,
    pair_cosines,
    shift_fits,
    zero_gradient,
)
from disco_ds.losses.kernels import Groups, Sums, Tiling, full_dtype
from disco_ds.losses.teacher import teacher_metrics

MakeBlocks = Callable[[Tensor, Tiling, torch.dtype | None, Any, Groups | None], Blocks]
"""Constructor of Gathered or Ring; takes this rank's columns [b, D], the tiling, the comm dtype, the process group and
the groups of pairs."""


def infonce(
    embeddings: Embeddings, make_blocks: MakeBlocks, loss: TiledLoss, shared: bool = False
) -> LossOutput:
    """Compute InfoNCE under the contract of base.py, without storing the matrix of similarities. Collective.

    If gradients are needed, forward computes them, and backward only multiplies them by the upstream gradient. They are
    correct only if the upstream gradient is the same on every rank, as it is if the loss is averaged over ranks.

    Args:
        embeddings: Features and scale of this rank.
        make_blocks: Gathered or Ring, which compare this rank's rows with the columns of all ranks.
        loss: Provides the tiling, the comm dtype and the process group.
        shared: True for NT-Xent. Image and text are then two views of the same image, and the denominator of a
            view contains all other views of the global batch, first and second ones.

    Source: docs/losses.md sections 1 and 2.
    """
    groups, metrics = loss.find_groups(embeddings)
    rows, columns, swap = assign_sides(embeddings)
    teachers = [(t.text, t.image) if swap else (t.image, t.text) for t in embeddings.teacher]
    value, parts, *hits = _InfoNCE.apply(
        rows,
        columns,
        embeddings.scale,
        make_blocks,
        loss,
        groups,
        shared,
        [(*sides, t.scale) for sides, t in zip(teachers, embeddings.teacher, strict=True)],
        torch.is_grad_enabled(),
    )
    if swap:
        hits.reverse()
    others = teacher_metrics(embeddings, parts, loss.group) if teachers else {}
    return LossOutput(value, global_metrics(value, hits, len(rows), loss.group, others) | metrics)


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        make_blocks: MakeBlocks,
        loss: TiledLoss,
        groups: Groups | None,
        shared: bool,
        teachers: Sequence[tuple[Tensor, Tensor, Tensor]],
        trains: bool,
    ) -> tuple[Tensor | None, ...]:
        group = loss.group
        tiling = loss.tiling.on(rows.device)
        rows, columns = tiling.hold(rows), tiling.hold(columns)
        cross = make_blocks(columns, tiling, loss.comm_dtype, group, groups)
        # With shared denominators, rows are also compared with rows, and columns with columns.
        same = (make_blocks(rows, tiling, loss.comm_dtype, group, None), cross) if shared else ()
        share = None if groups is None else groups.share
        scale = divisible_scale(scale.detach())
        x = scale * pair_cosines(rows, cross.own, tiling)
        scales = scale.expand(2, len(rows))
        needed = [trains and each for each in ctx.needs_input_grad[:3]]
        weight = (loss.teacher_weight or 0.0) / max(len(teachers), 1)
        soft_targets = [
            _make_soft_targets(*teacher, weight, make_blocks, loss) for teacher in teachers
        ]
        find_gradients = partial(
            _gradients, cross, same, rows, scale, x, share, needed, soft_targets, loss.accuracy
        )
        shift = overflow_shift(rows, columns, scale, group)
        sums = _sums(cross, same, rows, columns, scales, shift, loss.accuracy)
        with_pairs = torch.logaddexp(sums.rows, x), torch.logaddexp(sums.columns, x)
        fits = shift_fits(shift, *with_pairs, group=group)
        ctx.shift = shift  # backward does not need it; tests and tools/check/losses.py read it
        gradients: tuple[Tensor | None, ...] = ()
        target_gradient: Tensor | None = None
        # Almost every shift fits. On a GPU, compute the gradients before the host waits for the answer, so that the GPU
        # has work while the host reads the answer and prepares what follows.
        if rows.is_cuda or fits():
            gradients, target_gradient = find_gradients(sums, shift)
        if not fits():
            gradients, target_gradient = (), None  # frees the memory of those computed above
            ctx.shift = None
            signed = _absorb_sign(scale, rows), _absorb_sign(scale, columns)
            sums = _sums(cross, same, *signed, scales.abs(), None, loss.accuracy)
            gradients, target_gradient = find_gradients(sums, None)
        ctx.gradients = gradients
        # Compute -log(pair / (pair + others)) as log1p(others / pair), which stays precise when `others` is small.
        zero = torch.zeros_like(x)
        per_pair = torch.logaddexp(zero, sums.rows - x) + torch.logaddexp(zero, sums.columns - x)
        if share is not None and sums.positives is not None:
            # The target is uniform over the group, so the mean of the group's logits replaces the pair's logit. Summed
            # over all anchors, this change is the same in both directions, so compute it for the rows and double it.
            per_pair += 2 * (x * (1 - share) - share * sums.positives)
        parts: Tensor | None = None
        if target_gradient is not None:
            per_pair, parts = _add_teacher_loss(
                per_pair, x, rows, scale, target_gradient, soft_targets, tiling
            )
        hits = count_hits(sums.rows_max, x), count_hits(sums.columns_max, x)
        ctx.mark_non_differentiable(*hits, *([] if parts is None else [parts]))
        return (per_pair.mean() / 2).to(full_dtype(rows)), parts, *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *multiply_gradients(ctx, upstream), None, None, None, None, None, None


def _make_soft_targets(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    weight: float,
    make_blocks: MakeBlocks,
    loss: TiledLoss,
) -> SoftTargets:
    """Compute the soft targets of one teacher, from the sums over the rows and columns of its logits. Collective."""
    tiling = loss.tiling.on(rows.device)
    rows, columns = tiling.hold(rows), tiling.hold(columns)
    blocks = make_blocks(columns, tiling, loss.comm_dtype, loss.group, None)
    scale = divisible_scale(scale.detach())
    x = scale * pair_cosines(rows, blocks.own, tiling)
    scales = scale.expand(2, len(rows))
    shift = overflow_shift(rows, columns, scale, loss.group)
    sums = blocks.sums(rows, scales, shift, False)
    with_pairs = torch.logaddexp(sums.rows, x), torch.logaddexp(sums.columns, x)
    fits = shift_fits(shift, *with_pairs, group=loss.group)()
    if not fits:
        rows, scale = _absorb_sign(scale, rows), scale.abs()
        sums = blocks.sums(rows, scales.abs(), None, False)
    others = torch.stack([sums.rows, sums.columns])
    return SoftTargets(blocks, rows, scale, shift if fits else None, x, others, weight)


def _add_teacher_loss(
    per_pair: Tensor,
    x: Tensor,
    rows: Tensor,
    scale: Tensor,
    target_gradient: Tensor,
    soft_targets: Sequence[SoftTargets],
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    """Add the teachers' part to the loss of the pairs.

    Args:
        per_pair: [b], the loss of each pair without teachers, summed over both directions.
        x: [b], the logits of the pairs.
        rows: [b, D].
        scale: [1].
        target_gradient: [b, D], as computed by softmax_gradient.
        soft_targets: One for each teacher.
        tiling: Provides the gain.

    Returns:
        This rank's share of the loss with teachers, 0-d, summed over both directions; and the means over both
        directions of its parts, [3]: the loss of the pairs, the cross-entropy with the targets, and the mean of
        KL(teacher, student) over the teachers. Without the entropy of the targets, the last one is left out.
    """
    b, gain = len(x), tiling.gain()
    weight = sum(target.weight for target in soft_targets)
    of_pairs = per_pair.mean()
    # In the loss, soft targets move the probability of each negative from the positive pair's logit to the negative's.
    negative_mass = torch.stack([target.negative_mass for target in soft_targets]).sum(0)
    change = (negative_mass * x).mean()
    change -= scale[0] * inner_product(rows, target_gradient) / (b * gain)
    parts = [of_pairs, of_pairs + change / weight]
    if soft_targets[0].weighted_columns is not None:
        entropy = torch.zeros_like(change)
        for target in soft_targets:
            y = target.x
            entropy += (
                target.weight * (target.lse - y).sum(0).mean() + (target.negative_mass * y).mean()
            )
            assert target.weighted_columns is not None
            entropy -= (
                target.scale[0] * inner_product(target.rows, target.weighted_columns) / (b * gain)
            )
        parts.append(parts[1] - entropy / weight)
    return of_pairs + change, torch.stack(parts) / 2


def _gradients(
    cross: Blocks,
    same: tuple[Blocks, ...],
    rows: Tensor,
    scale: Tensor,
    x: Tensor,
    share: Tensor | None,
    needed: Sequence[bool],
    soft_targets: Sequence[SoftTargets],
    needs_entropy: bool,
    sums: Sums,
    shift: Tensor | None,
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Compute the gradients of rows, columns and scale, without the upstream gradient.

    Args:
        cross: Compares rows with columns.
        same: For NT-Xent, the blocks that compare rows with rows and columns with columns; otherwise ().
        rows: [b, D].
        scale: [1] float64, not 0.
        x: [b] float64, the logits of the pairs.
        share: [b] float64, 1 / size of each pair's group; None if only the pair itself is a positive.
        needed: Whether the gradient of the rows, the columns and the scale is needed.
        soft_targets: One for each teacher.
        needs_entropy: Whether the entropy of the soft targets is needed.
        sums: The sums over the negatives of each row and column.
        shift: The shift with which `sums` were computed, or None.

    Returns:
        First, the gradients of rows, columns and scale, with None for each that is not needed. Second, the
        target_gradient of softmax_gradient, [b, D]; None without teachers.
    """
    if not any(needed) and not soft_targets:
        return (None, None, None), None
    needs_rows, needs_columns, needs_scale = needed
    columns = cross.own
    scales = scale.expand(2, len(x))
    signed = rows, columns
    # A shift never fits a negative scale, so the gradients that are used are computed without one.
    if shift is None:
        scales = scales.abs()
        signed = _absorb_sign(scale, rows), _absorb_sign(scale, columns)
    others = torch.stack([sums.rows, sums.columns])
    lse = torch.logaddexp(others, x)
    # The gradient of the scale is <rows, gradient of rows> / s, and also <columns, gradient of columns> / s, so the
    # gradient of one side is enough. With shared denominators, the scale's gradient is the mean of the two.
    shared = bool(same)
    d_rows: Any
    d_columns: Any
    target_gradient = zero_gradient(rows) if soft_targets else None
    for target in soft_targets:
        target.weighted_columns = zero_gradient(target.rows) if needs_entropy else None
    d_rows, d_columns = cross.gradient(
        signed[0],
        scales,
        lse,
        shift,
        needs_rows or needs_scale,
        needs_columns or (needs_scale and shared),
        soft_targets=soft_targets,
        target_gradient=target_gradient,
    )
    if target_gradient is not None and d_rows is not None:
        d_rows -= target_gradient
    if shift is None and d_columns is not None:
        d_columns = _absorb_sign(scale, d_columns)  # it is a sum over the signed rows
    # In a block that compares rows with rows, or columns with columns, each view is an anchor and also a negative of
    # other views. The gradient of the block's rows includes both contributions.
    for block, views, shifts, total in zip(same, signed, lse, (d_rows, d_columns), strict=False):
        if total is not None:
            total += block.gradient(views, scales, shifts.expand(2, -1), shift, True, False)[0]
    # The weight of a positive pair is P + Q - 2 = -(1 - P) - (1 - Q): minus the probability of all other entries in
    # its row and in its column.
    pairs = -(others - lse).exp().sum(0)
    if share is not None:
        pairs += 2 * (1 - share)  # for a pair in a group, the weight is P + Q - 2 / size
    # With teachers, the target of a positive pair is below 1 by the teachers' weighted probability of negatives.
    for target in soft_targets:
        pairs += target.negative_mass
    factor = scale / (2 * len(x))
    tiling = cross.tiling
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


def _sums(
    cross: Blocks,
    same: tuple[Blocks, ...],
    rows: Tensor,
    columns: Tensor,
    scales: Tensor,
    shift: Tensor | None,
    maxima: bool,
) -> Sums:
    """Sum over all negatives of each row and each column. For NT-Xent, these include the views of the same side."""
    sums = cross.sums(rows, scales, shift, maxima)
    if not same:
        return sums
    same_rows = same[0].sums(rows, scales, shift, maxima)
    same_columns = same[1].sums(columns, scales, shift, maxima)
    return Sums(
        torch.logaddexp(sums.rows, same_rows.rows),
        torch.logaddexp(sums.columns, same_columns.rows),
        _larger(sums.rows_max, same_rows.rows_max),
        _larger(sums.columns_max, same_columns.rows_max),
    )


def _absorb_sign(scale: Tensor, features: Tensor) -> Tensor:
    """Multiply features by the sign of the scale, because the tiles need a positive scale."""
    return features * torch.where(scale < 0, -1, 1).to(features.dtype)


def _larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else torch.maximum(a, b)
