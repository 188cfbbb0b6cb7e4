"""The sigmoid loss of SigLIP, with texts sent around a ring. Each image-text combination has a separate term."""

# b local batch, B global = N b, D width, N ranks; z_ij = s I_i.T_j + bias; y_ij = +1 if i = j (a positive pair),
# otherwise -1

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses.base import (
    Embeddings,
    LossOutput,
    Teacher,
    count_hits,
    register_loss,
)
from disco_ds.losses.blocks import (
    GroupedLoss,
    Ring,
    TiledLoss,
    add_pairs,
    divisible_scale,
    inner_product,
    multiply_gradients,
    pair_cosines,
    zero_gradient,
)
from disco_ds.losses.kernels.similarity import Groups, SigmoidTarget, sigmoid_block
from disco_ds.losses.kernels.tiles import full_dtype


class _SigLIP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        bias: Tensor,
        loss: TiledLoss,
        groups: Groups | None,
        teachers: Sequence[tuple[Tensor, Tensor, Teacher]],
        trains: bool,
    ) -> tuple[Tensor, ...]:
        b = len(rows)
        blocks = Ring(columns, loss, groups)
        tiling = blocks.tiling
        sent = blocks.local
        needs_rows, needs_columns, needs_scale, needs_bias = (
            trains and needed for needed in ctx.needs_input_grad[:4]
        )
        scale = divisible_scale(scale.detach())
        rows = tiling.quantize(rows)
        z = scale * pair_cosines(rows, sent, tiling) + bias.double()
        d_rows = zero_gradient(rows) if needs_rows or needs_scale else None
        # Compute the terms of the positive pairs here. The tiles compute the terms of all other entries.
        pair_weights = -(-z).sigmoid()
        total = F.softplus(-z, threshold=40).sum()
        weight = pair_weights.sum()
        largest: Tensor | None = None
        soft_targets = [
            _make_target(*teacher, (loss.teacher_weight or 0.0) / len(teachers), loss)
            for teacher in teachers
        ]
        target_gradient = zero_gradient(rows) if teachers else None

        def visit(owner: int, block: list[Tensor]) -> list[Tensor]:
            nonlocal largest
            # The loss, and the gradient and maxima of this rank's rows, stay on this rank. The gradient and maxima of
            # the columns travel with the columns.
            d_others = zero_gradient(block[0]) if needs_columns else None
            current = blocks.block(rows, block[0], (scale, scale), owner)
            targets = [
                replace(
                    target,
                    block=replace(target.block, columns=columns, diagonal=current.diagonal),
                )
                for target, columns in zip(soft_targets, block[1:], strict=True)
            ]
            sums = sigmoid_block(
                current, bias, d_rows, d_others, loss.accuracy, targets, target_gradient
            )
            total.add_(sums.loss)
            weight.add_(sums.weight)
            for top in sums.maxima[:1]:
                largest = top if largest is None else torch.maximum(largest, top)
            return [*sums.maxima[1:], *([] if d_others is None else [d_others])]

        def join(local: list[Tensor], received: list[Tensor]) -> None:
            if loss.accuracy:
                torch.maximum(local[0], received[0], out=local[0])
            if needs_columns:
                local[-1].add_(received[-1])

        sides = [sent, *(target.block.columns for target in soft_targets)]
        home = comm.circulate(sides, visit, join, loss.group)
        d_columns = home[-1] if needs_columns else None
        parts: list[Tensor] = []
        if target_gradient is not None:
            if d_rows is not None:
                d_rows -= target_gradient
            change = -scale[0] * inner_product(rows, target_gradient) / tiling.underflow_scale()
            entropy = torch.zeros_like(change)
            for target in soft_targets:
                own = target.block
                y = own.row_scale * pair_cosines(own.rows, own.columns, tiling) + target.bias
                # The teacher's probability replaces the target 1 of a positive pair and the target 0 of a negative.
                missing = target.weight * (-y).sigmoid()
                negative_mass = target.weight * target.sums[1]
                pair_weights += missing
                weight += missing.sum() - negative_mass
                change += (missing * z).sum() - negative_mass * bias[0].double()
                entropy += target.weight * _entropy(target, y)
            share = loss.teacher_weight or 1.0
            cross_entropy = total + change / share
            parts = [x / b for x in (total, cross_entropy, cross_entropy - entropy / share)]
            total = total + change
        factor = scale / b
        add_pairs(d_rows, sent, pair_weights, factor, tiling)
        add_pairs(d_columns, rows, pair_weights, factor, tiling)
        d_scale = None if d_rows is None else inner_product(rows, d_rows) / scale
        # The gradients are complete here; backward only multiplies them by the upstream gradient. Until then, the
        # gradients of the features stay in fp32: in fp16, small ones could become zero before a loss scale multiplies
        # them.
        d_bias = (weight / b).view(1) if needs_bias else None
        ctx.gradients = d_rows if needs_rows else None, d_columns, d_scale, d_bias
        maxima = [] if largest is None else [largest, home[0]]
        hits = [count_hits(x, z, scale) for x in maxima]
        ctx.mark_non_differentiable(*hits, *parts)
        return (total / b).to(full_dtype(rows)), *hits, *parts

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *multiply_gradients(ctx, upstream), None, None, None, None


def _make_target(
    rows: Tensor, columns: Tensor, teacher: Teacher, weight: float, loss: TiledLoss
) -> SigmoidTarget:
    """Return a teacher's soft targets for this rank's own block.

    Args:
        rows: [b, D'], the teacher's features of the side (image or text) that the student's rows are from.
        columns: [b, D'], the teacher's features of the other side.
        teacher: Provides the scale and the bias.
        weight: Weight of this teacher in the loss.
        loss: Provides the tiling and the comm dtype.
    """
    blocks = Ring(columns, loss)
    scale = divisible_scale(teacher.scale.detach())
    # The tiles need a positive scale.
    rows = blocks.tiling.quantize(rows * scale.sign().to(rows.dtype))
    scale = scale.abs()
    block = blocks.block(rows, blocks.local, (scale, scale), comm.rank(loss.group))
    bias = torch.zeros_like(scale) if teacher.bias is None else teacher.bias.detach().double()
    sums = torch.zeros(2, dtype=torch.float64, device=rows.device)
    return SigmoidTarget(block, bias, weight, sums, zero_gradient(rows))


def _entropy(target: SigmoidTarget, y: Tensor) -> Tensor:
    """Return the sum of the entropies of a teacher's probabilities over all entries of this rank's rows, 0-d.

    Args:
        target: The teacher's soft targets, after the columns of all ranks were visited.
        y: [b], the teacher's logits of the positive pairs.
    """
    # The entropy of an entry is softplus(y) - sigmoid(y) y.
    softplus, sigmoid = target.sums
    block = target.block
    product = inner_product(block.rows, target.weighted_columns) / block.tiling.underflow_scale()
    of_pairs = (F.softplus(y, threshold=40) - y.sigmoid() * y).sum()
    return softplus - block.row_scale[0] * product - target.bias[0] * sigmoid + of_pairs


@register_loss("siglip")
class SigLIPLoss(GroupedLoss):
    """-1/B sum_ij log sigmoid(y_ij z_ij) over the global batch; scale and bias are learned.

    Each tile gives the loss and the gradient at the same time. Texts therefore travel around the ring only once, and
    no similarity is computed twice. Memory: four b x D blocks and one tile. Source: docs/losses.md section 5;
    SigLIP (arXiv 2303.15343).

    The options are those of GroupedLoss (blocks.py).

    Raises:
        ValueError: If the embeddings have no bias.
    """

    initial_scale = 10.0
    function = _SigLIP

    def initial_bias(self, global_batch: int) -> float:
        """Return -log(B - 1), so that the negatives of a sample together have as large a gradient as its positive.

        The SigLIP paper's initial bias of -10 suits its batch size of 32k. With the same bias and a batch of 1M, the
        negatives would have 45 times the gradient of the positive. Source: open_clip issue 650.
        """
        return -math.log(max(global_batch - 1, 1))

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss. Collective."""
        if embeddings.bias is None:
            raise ValueError(
                "siglip needs a bias: pass a tensor of shape [1] as Embeddings(..., bias=...); with contrastive_step, "
                "let the argument `forward` return logit_bias as the fourth value"
            )
        return super().forward(embeddings)
