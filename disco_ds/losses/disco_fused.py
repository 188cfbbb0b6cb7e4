"""DisCo-CLIP's gradient from one tiled b x B block per rank instead of two.

This is the package's fastest InfoNCE loss if a B x D tensor fits in memory.
"""

# b local batch, B global = N b, D width, N ranks

from __future__ import annotations

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import Gathered, GroupedLoss
from disco_ds.losses.infonce import InfoNCE


@register_loss("disco_fused")
class DisCoFusedLoss(GroupedLoss):
    """InfoNCE over the global batch, with the same value and gradient as the losses `clip` and `disco`.

    Texts are gathered once. Each rank computes one block of similarities, its own images against all texts, tile
    by tile. Sums over the block's rows give the image-to-text loss. Sums over its columns, completed by one
    all_reduce of B numbers, give the text-to-image loss. A reduce_scatter sends the gradient of each text back to the
    rank that the text came from. Memory: two B x D tensors and one tile. Source: docs/losses.md section 1.

    The options are those of GroupedLoss (blocks.py).
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss, with the features of one side gathered from all ranks. Collective."""
        return self.compute(InfoNCE, embeddings, Gathered, False)
