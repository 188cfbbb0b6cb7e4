"""The sigmoid loss of SigLIP on the ring: every pair is judged alone, so no sums over rows or columns are needed."""

# b local batch, B global = N b, D width, N ranks; z_ij = s I_i.T_j + bias, y = +1 for pairs, else -1

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds import comm
from disco_ds.kernels import Tiling, sigmoid_block
from disco_ds.losses.base import Embeddings, LossOutput, global_metrics, register_loss
from disco_ds.losses.blocks import TiledLoss, finish, full_dtype, inner, join_largest, positives, zeros


@register_loss("siglip")
class SigLIPLoss(TiledLoss):
    """-1/B sum_ij log sigmoid(y_ij z_ij) over the global batch; scale and bias are learned.

    Texts go round once; value and gradient come from the same tile, so nothing is multiplied twice. Memory: four blocks
    b x D + a tile. Source: losses.md section 5; SigLIP (arXiv 2303.15343).

    Options: see TiledLoss. Raises: ValueError for embeddings without a bias.
    """

    initial_scale = 10.0
    initial_bias = -10.0

    def forward(self, embeddings: Embeddings) -> LossOutput:
        if embeddings.bias is None:
            raise ValueError("siglip needs a bias: Embeddings(..., bias=[1])")
        image, text = embeddings.image, embeddings.text
        # The side that has no gradient travels, if there is one.
        swap = text.requires_grad and not image.requires_grad
        rows, columns = (text, image) if swap else (image, text)
        loss, *hits = _SigLIP.apply(
            rows,
            columns,
            embeddings.scale,
            embeddings.bias,
            self.wire,
            self.tiling,
            self.group,
            torch.is_grad_enabled(),
        )
        if swap:
            hits.reverse()
        return LossOutput(loss, global_metrics(loss, hits[0], hits[1], len(image), self.group))


class _SigLIP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        bias: Tensor,
        wire: torch.dtype | None,
        tiling: Tiling,
        group: Any,
        trains: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = rows.detach().contiguous(), columns.detach().contiguous()
        sent = columns if wire is None or columns.dtype == torch.float64 else columns.to(wire)
        z = scale.double() * positives(rows, sent, tiling) + bias.double()
        of_rows = trains and (ctx.needs_input_grad[0] or ctx.needs_input_grad[2])
        d_rows = zeros(rows) if of_rows else None
        # Pairs here, the others from the tiles.
        total, weight = F.softplus(-z, threshold=1e9).sum(), -(-z).sigmoid().sum()
        largest = torch.full_like(z, -torch.inf)
        of_columns, largest_of_columns = comm.Collector(Tensor.add_, group), comm.Collector(join_largest, group)
        for block, others in comm.around(sent, group):
            first = 0 if block == comm.rank(group) else None
            d_others = (
                of_columns.buffer(others, full_dtype(rows)).zero_() if trains and ctx.needs_input_grad[1] else None
            )
            sums = sigmoid_block(rows, others, scale, bias, first, tiling, d_rows, d_others)
            total, weight = total + sums.loss, weight + sums.weight
            join_largest(largest, sums.rows_max)
            largest_of_columns.add(sums.columns_max)
            if d_others is not None:
                of_columns.add(d_others)
        b = len(rows)
        d_columns = of_columns.result() if trains and ctx.needs_input_grad[1] else None
        pairs, factor = -(-z).sigmoid(), scale / b
        d_rows, d_columns = finish(d_rows, sent, pairs, factor, tiling), finish(d_columns, rows, pairs, factor, tiling)
        d_scale = None if d_rows is None else (inner(rows, d_rows) / scale).to(scale.dtype)
        ctx.gradients = (
            d_rows.to(rows.dtype) if d_rows is not None and ctx.needs_input_grad[0] else None,
            None if d_columns is None else d_columns.to(columns.dtype),
            d_scale,
            (weight / b).to(bias.dtype).view(1),
        )
        hits = (largest < z).sum(), (largest_of_columns.result() < z).sum()
        ctx.mark_non_differentiable(*hits)
        return (total / b).to(torch.promote_types(rows.dtype, torch.float32)), *hits

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = [
            None if gradient is None or not needed else gradient.mul_(upstream)
            for gradient, needed in zip(ctx.gradients, ctx.needs_input_grad, strict=False)
        ]
        return *gradients, None, None, None, None
