"""The contrastive loss of the original CLIP, which the papers on the other losses use as a baseline.

Every rank computes the whole B x B matrix.
"""

# b local batch, B global = N b, D width, N ranks; I, T unit rows, s scale

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.kernels import full_dtype
from disco_ds.losses.whole_rows import WholeRowsLoss


@register_loss("clip")
class FullMatrixLoss(WholeRowsLoss):
    """InfoNCE over the global batch, with O(B^2 D) work and O(B^2) memory on each rank.

    Every rank computes the whole matrix, which gives it the whole gradient of its own rows, so only forward
    communicates. Collective: every rank must call this. Source: docs/losses.md section 1; DisCo-CLIP equation 1.

    The options are those of WholeRowsLoss (whole_rows.py).
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss from the whole B x B matrix of logits. Collective."""
        dtype = full_dtype(embeddings.image)
        I_A = _gather_own_gradient(embeddings.image.to(dtype), self.group)
        T_A = _gather_own_gradient(embeddings.text.to(dtype), self.group)
        with torch.autocast(I_A.device.type, enabled=False):  # autocast would multiply in 16 bits
            logits = embeddings.scale * (I_A @ T_A.T)  # [B, B]
        return self.compute(embeddings, logits, logits.T, slice(0, len(logits)))


def _gather_own_gradient(x: Tensor, group: Any) -> Tensor:
    """Gather the rows of all ranks. Only this rank's rows get a gradient, multiplied by N, as base.py requires."""
    N, n, b = comm.size(group), comm.rank(group), len(x)
    rows = comm.gather(x.detach(), group=group)
    own = x.detach() + N * (x - x.detach())  # exactly the value of x, with N times the gradient
    return torch.cat([rows[: n * b], own, rows[(n + 1) * b :]])
