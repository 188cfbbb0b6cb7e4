"""InfoNCE from sums over tiles: what `disco_fused`, `inf_cl` and `nt_xent` share."""

# b local batch, B global = N b, D width, N ranks; x_ij = s <row i, column j>; P, Q row- and column-softmax

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses.base import Embeddings, LossOutput, count_hits, global_metrics
from disco_ds.losses.blocks import Blocks, TiledLoss, finish, holds, inner, largest_shift, positives
from disco_ds.losses.kernels import Sums, Tiling

MakeBlocks = Callable[[Tensor, Tiling, torch.dtype | None, Any], Blocks]
"""Makes Blocks of this rank's columns [b, D], tiling, comm dtype and group: Gathered or Ring."""


def infonce(embeddings: Embeddings, make_blocks: MakeBlocks, loss: TiledLoss, shared: bool = False) -> LossOutput:
    """InfoNCE by the contract of base.py, without the matrix of similarities. Collective in forward and backward.

    Args:   make_blocks: how this rank's rows meet the columns of all ranks; shared: images and texts are two views of
            one thing, and the denominator of an image has all texts and all other images (NT-Xent). The upstream
            gradient of the share must then be the same on every rank, as that of a mean over ranks is.
    Source: docs/losses.md sections 1 and 2.
    """
    # The columns are sent to other ranks. With one tower locked these are its features, whose gradient nobody needs.
    swap = embeddings.text.requires_grad and not embeddings.image.requires_grad
    rows, columns = (embeddings.text, embeddings.image) if swap else (embeddings.image, embeddings.text)
    value, *hits = _InfoNCE.apply(rows, columns, embeddings.scale, make_blocks, loss, shared)
    return LossOutput(value, global_metrics(value, hits[::-1] if swap else hits, len(rows), loss.group))


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        make_blocks: MakeBlocks,
        loss: TiledLoss,
        shared: bool,
    ) -> tuple[Tensor, ...]:
        ctx.dtypes, b, group, tiling = (rows.dtype, columns.dtype), len(rows), loss.group, loss.tiling.on(rows.device)
        rows, columns = tiling.hold(rows), tiling.hold(columns)
        cross = make_blocks(columns, tiling, loss.comm_dtype, group)
        # With shared denominators, rows are also compared with rows, and columns with columns.
        same = (make_blocks(rows, tiling, loss.comm_dtype, group), cross) if shared else ()
        x = scale.double() * positives(rows, cross.own, tiling)
        scales = scale.detach().double().expand(2, b)
        largest = largest_shift(rows, columns, scale, group)
        shift: Tensor | None = largest
        sums = _sums(cross, same, rows, columns, scales, shift, loss.accuracy)
        if not holds(largest, torch.logaddexp(sums.rows, x), torch.logaddexp(sums.columns, x), group=group):
            shift = None
            sums = _sums(cross, same, rows, columns, scales, shift, loss.accuracy)
        # -log(pair / (pair + others)) = log1p(others / pair), which does not cancel where the others are small.
        zero = torch.zeros_like(x)
        per_pair = torch.logaddexp(zero, sums.rows - x) + torch.logaddexp(zero, sums.columns - x)
        ctx.cross, ctx.same, ctx.shift, ctx.tiling = cross, same, shift, tiling
        ctx.save_for_backward(rows, cross.own, scale, x, sums.rows, sums.columns)
        hits = count_hits(sums.rows_max, x), count_hits(sums.columns_max, x)
        ctx.mark_non_differentiable(*hits)
        return (per_pair.mean() / 2).to(torch.promote_types(ctx.dtypes[0], torch.float32)), *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        rows, columns, scale, x, row_others, column_others = ctx.saved_tensors
        needs_rows, needs_columns, needs_scale, *_ = ctx.needs_input_grad
        others = torch.stack([row_others, column_others])
        lse = torch.logaddexp(others, x)
        scales = scale.double().expand(2, len(x))
        # The gradient at the scale is <rows, their gradient> / s, so either side's gradient gives it.
        shared = bool(ctx.same)
        wanted = needs_rows or needs_scale, needs_columns or (needs_scale and shared)
        d_rows, d_columns = ctx.cross.gradient(rows, scales, lse, ctx.shift, *wanted)
        if shared:  # one block has each view as an anchor and as another's negative, so its rows have both gradients
            for block, views, own, total in zip(ctx.same, (rows, columns), lse, (d_rows, d_columns), strict=True):
                total += block.gradient(views, scales, own.expand(2, -1), ctx.shift, True, False)[0]
        # A pair has the weight P + Q - 2 = -(1 - P) - (1 - Q): minus the shares of the others in its row and column.
        pairs = -(others - lse).exp().sum(0)
        factor = upstream * scale / (2 * len(x))
        d_rows = finish(d_rows, columns, pairs, factor, ctx.tiling)
        d_columns = finish(d_columns, rows, pairs, factor, ctx.tiling)
        d_scale = None
        if needs_scale:
            assert d_rows is not None  # for the scale it is computed too
            both = inner(rows, d_rows)
            if shared:
                assert d_columns is not None
                both = (both + inner(columns, d_columns)) / 2
            d_scale = (both / scale).to(scale.dtype)
        return (
            d_rows.to(ctx.dtypes[0]) if d_rows is not None and needs_rows else None,
            d_columns.to(ctx.dtypes[1]) if d_columns is not None and needs_columns else None,
            d_scale,
            *[None] * 3,
        )


def _sums(
    cross: Blocks, same: tuple[Blocks, ...], rows: Tensor, columns: Tensor, scales: Tensor, shift: Tensor | None,
    maxima: bool,
) -> Sums:  # fmt: skip
    """Sums over everything that a pair is compared with, `same` included."""
    sums = cross.sums(rows, scales, shift, maxima)
    if not same:
        return sums
    of_rows, of_columns = same[0].sums(rows, scales, shift, maxima), same[1].sums(columns, scales, shift, maxima)
    return Sums(
        torch.logaddexp(sums.rows, of_rows.rows),
        torch.logaddexp(sums.columns, of_columns.rows),
        _larger(sums.rows_max, of_rows.rows_max),
        _larger(sums.columns_max, of_columns.rows_max),
    )


def _larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else torch.maximum(a, b)
