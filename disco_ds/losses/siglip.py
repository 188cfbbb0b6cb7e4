"""The sigmoid loss of SigLIP on the ring: each entry of the matrix has its own term, so no row or column sums occur."""

# b local batch, B global = N b, D width, N ranks; z_ij = s I_i.T_j + bias, y = +1 for pairs, else -1

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm, ring
from disco_ds.losses.base import Embeddings, LossOutput, count_hits, global_metrics, register_loss
from disco_ds.losses.blocks import TiledLoss, as_sent, finish, inner, positives, zeros
from disco_ds.losses.kernels import Block, sigmoid_block


@register_loss("siglip")
class SigLIPLoss(TiledLoss):
    """-1/B sum_ij log sigmoid(y_ij z_ij) over the global batch; scale and bias are learned.

    Texts travel the ring once: a tile gives value and gradient at the same time, so no product is computed twice.
    Memory: four blocks b x D + a tile. Source: docs/losses.md section 5; SigLIP (arXiv 2303.15343).

    Options: see TiledLoss. Raises: ValueError for embeddings without a bias.
    """

    initial_scale = 10.0
    initial_bias = -10.0

    def forward(self, embeddings: Embeddings) -> LossOutput:
        if embeddings.bias is None:
            raise ValueError("siglip needs a bias: Embeddings(..., bias=[1])")
        image, text = embeddings.image, embeddings.text
        # The columns travel. With one tower locked they are its features, whose gradient nobody needs.
        swap = text.requires_grad and not image.requires_grad
        rows, columns = (text, image) if swap else (image, text)
        value, *hits = _SigLIP.apply(rows, columns, embeddings.scale, embeddings.bias, self, torch.is_grad_enabled())
        return LossOutput(value, global_metrics(value, hits[::-1] if swap else hits, len(image), self.group))


class _SigLIP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, scale: Tensor, bias: Tensor, loss: SigLIPLoss, trains: bool
    ) -> tuple[Tensor, ...]:
        dtypes, b, group, tiling = (rows.dtype, columns.dtype), len(rows), loss.group, loss.tiling.on(rows.device)
        needs_rows, needs_columns, needs_scale, *_ = (trains and needed for needed in ctx.needs_input_grad)
        rows, sent = tiling.hold(rows), as_sent(tiling.hold(columns), loss.comm_dtype)
        z = scale.double() * positives(rows, sent, tiling) + bias.double()
        scales = scale.detach().expand(b)
        d_rows = zeros(rows) if needs_rows or needs_scale else None
        # The pairs' terms are computed here, those of all other entries in the tiles.
        total, weight = F.softplus(-z, threshold=1e9).sum(), -(-z).sigmoid().sum()
        largest = torch.full_like(z, -torch.inf)

        def visit(owner: int, block: list[Tensor], spare: list[Tensor] | None) -> list[Tensor]:
            # Value, gradient and maxima of this rank's rows stay here; the columns' travel on with their block.
            d_others = None
            if needs_columns:
                d_others = zeros(block[0]) if spare is None else spare[-1].zero_()
            first = 0 if owner == comm.rank(group) else None
            at_hand = Block(rows, block[0], scales, scales, first, None, tiling)
            sums = sigmoid_block(at_hand, bias, d_rows, d_others, loss.accuracy)
            total.add_(sums.loss)
            weight.add_(sums.weight)
            if sums.rows_max is not None:
                torch.maximum(largest, sums.rows_max, out=largest)
            return [x for x in (sums.columns_max, d_others) if x is not None]

        def join(mine: list[Tensor], theirs: list[Tensor]) -> None:
            if loss.accuracy:
                torch.maximum(mine[0], theirs[0], out=mine[0])
            if needs_columns:
                mine[-1].add_(theirs[-1])

        home = ring.circulate([sent], visit, join, group)
        d_columns = home[-1] if needs_columns else None
        pairs, factor = -(-z).sigmoid(), scale / b
        d_rows, d_columns = finish(d_rows, sent, pairs, factor, tiling), finish(d_columns, rows, pairs, factor, tiling)
        d_scale = None if d_rows is None else (inner(rows, d_rows) / scale).to(scale.dtype)
        # The gradients are complete here; backward only multiplies them by the upstream gradient.
        ctx.gradients = (
            d_rows.to(dtypes[0]) if d_rows is not None and needs_rows else None,
            None if d_columns is None else d_columns.to(dtypes[1]),
            d_scale,
            (weight / b).to(bias.dtype).view(1),
        )
        maxima = (largest, home[0]) if loss.accuracy else (None, None)
        hits = [count_hits(x, z) for x in maxima]
        ctx.mark_non_differentiable(*hits)
        return (total / b).to(torch.promote_types(dtypes[0], torch.float32)), *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = [
            None if gradient is None or not needed else gradient.mul_(upstream)
            for gradient, needed in zip(ctx.gradients, ctx.needs_input_grad, strict=False)
        ]
        return *gradients, None, None
