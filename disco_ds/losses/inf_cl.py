"""Inf-CL: similarities in tiles, with texts sent around a ring, so memory grows only with the local batch."""

# b local batch, B global = N b, D width, N ranks

from __future__ import annotations

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import GroupedLoss, Ring
from disco_ds.losses.infonce import InfoNCE


@register_loss("inf_cl")
class InfCLLoss(GroupedLoss):
    """InfoNCE over the global batch, with the same value and gradient as the losses `clip` and `disco`.

    No tensor of size B x D or larger is allocated. Each rank's block of texts travels around the ring once for the
    sums, and once more together with its gradient. The next block is received while the current one is multiplied.
    Memory: four b x D blocks and one tile. The options are those of GroupedLoss (blocks.py).

    Source: docs/losses.md section 1; Inf-CL (arXiv 2410.17243).
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss, with the features of one side sent around a ring of all ranks. Collective."""
        return self.compute(InfoNCE, embeddings, Ring, False)
