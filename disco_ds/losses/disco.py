"""DisCo-CLIP, Algorithm 1: each rank computes two b x B blocks of logits and sends feature gradients to other ranks."""

# b local batch, B global = N b, D width, N ranks; I, T unit rows, s scale

from __future__ import annotations

import torch

from disco_ds.distributed import comm
from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.kernels import full_dtype
from disco_ds.losses.whole_rows import WholeRowsLoss


@register_loss("disco")
class DisCoLoss(WholeRowsLoss):
    """InfoNCE over the global batch, with the same value and gradient as the loss `clip`.

    It takes O(B^2 D / N) work and O(B^2 / N) memory on each rank. Source: DisCo-CLIP equations 3-7 and
    Algorithm 1. The paper averages the gradients of gathered features over ranks. Here the engine averages
    parameter gradients over ranks, and averaging twice would leave only 1/N of the gradient. So this loss sums the
    gradients of gathered features instead (docs/losses.md section 1).
    The paper's all_reduce is a reduce_scatter here: a rank receives only the gradients of its own features.
    Collective in forward and backward: every rank must call this.

    The options are those of WholeRowsLoss (whole_rows.py).
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss from this rank's images with all texts, and its texts with all images. Collective."""
        dtype, s = full_dtype(embeddings.image), embeddings.scale
        I_n, T_n = embeddings.image.to(dtype), embeddings.text.to(dtype)
        b, n = len(I_n), comm.rank(self.group)
        I_A = comm.gather(I_n, self.group)  # [B, D]
        T_A = comm.gather(T_n, self.group)
        # As in Algorithm 1, take this rank's rows from the gathered matrix. The backward of gather sums gradients over
        # ranks, and this way the sum includes the gradient of these rows.
        own = slice(n * b, (n + 1) * b)
        with torch.autocast(I_n.device.type, enabled=False):  # autocast would multiply in 16 bits
            logits_image = s * (I_A[own] @ T_A.T)  # [b, B]
            logits_text = s * (T_A[own] @ I_A.T)
        return self.compute(embeddings, logits_image, logits_text, own)
