"""The contrastive loss of the original CLIP, which the papers on the other losses use as a baseline.

Every rank computes the whole B x B matrix.
"""

# b local batch, B global = N b, D width, N ranks; I, T unit rows, s scale

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.distributed import comm
from disco_ds.losses.base import (
    Embeddings,
    Loss,
    LossOutput,
    check_teacher_weight,
    global_metrics,
    register_loss,
)
from disco_ds.losses.kernels import full_dtype
from disco_ds.losses.teacher import add_teacher_loss


@register_loss("clip")
class FullMatrixLoss(Loss):
    """InfoNCE over the global batch, with O(B^2 D) work and O(B^2) memory on each rank.

    Every rank computes the whole matrix, which gives it the whole gradient of its own rows, so only forward
    communicates. Collective: every rank must call this. Source: docs/losses.md section 1; DisCo-CLIP equation 1.
    """

    def __init__(self, group: Any = None, teacher_weight: float | None = None):
        super().__init__()
        self.group = group
        self.teacher_weight = check_teacher_weight(teacher_weight)

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss from the whole B x B matrix of logits. Collective."""
        dtype = full_dtype(embeddings.image)
        I_A = _gather_own_gradient(embeddings.image.to(dtype), self.group)
        T_A = _gather_own_gradient(embeddings.text.to(dtype), self.group)
        with torch.autocast(I_A.device.type, enabled=False):  # autocast would multiply in 16 bits
            logits = embeddings.scale * (I_A @ T_A.T)  # [B, B]
        labels = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        loss, others = add_teacher_loss(loss, (logits, logits.T), embeddings, slice(None), self)
        with torch.no_grad():
            hits = [(logits.argmax(dim) == labels).sum() for dim in (1, 0)]
            metrics = global_metrics(loss, hits, len(logits), self.group, others)
        return LossOutput(loss, metrics)


def _gather_own_gradient(x: Tensor, group: Any) -> Tensor:
    """Gather the rows of all ranks. Only this rank's rows get a gradient, multiplied by N, as base.py requires."""
    N, n, b = comm.size(group), comm.rank(group), len(x)
    rows = comm.gather(x.detach(), group=group)
    own = x.detach() + N * (x - x.detach())  # exactly the value of x, with N times the gradient
    return torch.cat([rows[: n * b], own, rows[(n + 1) * b :]])
