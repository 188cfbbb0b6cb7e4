"""DisCo-CLIP, Algorithm 1: two b x B blocks per rank instead of B x B, inter-rank gradients collected."""

# b local batch, B global = N b, D width, N ranks; I, T unit rows, s scale

from __future__ import annotations

from typing import Any, get_args

import torch
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, Loss, LossOutput, global_metrics, register_loss


@register_loss("disco")
class DisCoLoss(Loss):
    """InfoNCE over the global batch, O(B^2 D / N) work and O(B^2 / N) memory on each rank, equal to `clip`.

    Source: DisCo-CLIP equations 3-7 and Algorithm 1. The paper averages the gathered gradients over ranks; under an
    engine that averages again this would give 1/N of the gradient, so we sum (docs/losses.md section 1).
    Collective in forward and backward: every rank must call.

    Args:   reduction: "reduce_scatter" receives each feature gradient once; "all_reduce" is the paper's.
    Raises: ValueError for another reduction.
    """

    def __init__(self, reduction: comm.Reduction = "reduce_scatter", group: Any = None):
        super().__init__()
        if reduction not in get_args(comm.Reduction):
            raise ValueError(f"disco: reduction must be one of {get_args(comm.Reduction)}, got {reduction!r}")
        self.reduction: comm.Reduction = reduction
        self.group = group

    def forward(self, embeddings: Embeddings) -> LossOutput:
        I_n, T_n, s = embeddings.image, embeddings.text, embeddings.scale
        b, n = len(I_n), comm.rank(self.group)
        I_A = comm.gather(I_n, self.reduction, self.group)  # [B, D]
        T_A = comm.gather(T_n, self.reduction, self.group)
        # Algorithm 1 takes its own rows from the gathered matrix, so that their gradient joins the reduction.
        own = slice(n * b, (n + 1) * b)
        logits_image = s * (I_A[own] @ T_A.T)  # [b, B]
        logits_text = s * (T_A[own] @ I_A.T)
        labels = torch.arange(n * b, (n + 1) * b, device=I_n.device)
        loss = (F.cross_entropy(logits_image, labels) + F.cross_entropy(logits_text, labels)) / 2
        with torch.no_grad():
            i2t_hits, t2i_hits = (logits.argmax(1) == labels for logits in (logits_image, logits_text))
            metrics = global_metrics(loss, (i2t_hits.sum(), t2i_hits.sum()), b, self.group)
        return LossOutput(loss, metrics)
