"""Inf-CL: tiled similarities and texts on a ring, so memory grows with the local batch only."""

from __future__ import annotations

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import Ring, TiledLoss
from disco_ds.losses.infonce import infonce


@register_loss("inf_cl")
class InfCLLoss(TiledLoss):
    """InfoNCE over the global batch, equal to `clip` and `disco`.

    No tensor of B x D or more is allocated. The blocks of texts travel around the ring once in
    forward, and once more in backward with their gradients. The next block is received while the
    current one is multiplied. Memory: four blocks b x D + a tile. Options: see TiledLoss.

    Source: docs/losses.md section 1; Inf-CL (arXiv 2410.17243).
    """

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss with columns on a ring. Collective."""
        return infonce(embeddings, Ring, self)
