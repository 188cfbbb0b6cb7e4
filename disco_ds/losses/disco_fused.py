"""DisCo-CLIP's gradient from one tiled b x B block per rank instead of two.

It is the fastest InfoNCE if B x D fits in memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import Gathered, TiledLoss
from disco_ds.losses.infonce import infonce


@register_loss("disco_fused")
class DisCoFusedLoss(TiledLoss):
    """InfoNCE over the global batch, equal to `clip` and `disco`.

    Texts are gathered once. The block of this rank's images against them, computed tile by tile,
    gives both directions: sums over its rows, and sums over its columns, which one all_reduce of B
    numbers completes. A reduce_scatter returns the gradient of the texts. Memory: 2 B D + a tile.
    Source: docs/losses.md section 1.

    Args:
        store: Keep the exponentials of the block (b x B in bf16) instead of recomputing them in
            backward.
        options: See TiledLoss.
    """

    def __init__(self, store: bool = False, **options: Any):
        super().__init__(**options)
        self.store = store

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss with gathered columns. Collective."""
        return infonce(embeddings, partial(Gathered, keep=self.store), self)
