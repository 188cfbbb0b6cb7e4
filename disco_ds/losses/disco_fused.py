"""DisCo-CLIP's gradient from one b x B block per rank instead of two, in tiles: the fastest way where B x D fits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import Gathered, TiledLoss, TiledOptions
from disco_ds.losses.infonce import infonce

if TYPE_CHECKING:
    from typing import Unpack


@register_loss("disco_fused")
class DisCoFusedLoss(TiledLoss):
    """InfoNCE over the global batch, equal to `clip` and `disco`.

    Texts are gathered once. The block of this rank's images against them, computed tile by tile, gives both directions:
    sums over its rows, and sums over its columns, which one all_reduce of B numbers completes. A reduce_scatter returns
    the texts' gradient. Memory: 2 B D + a tile. Source: docs/losses.md section 1.

    Args: store: keep the block's exponentials (b x B in bf16) instead of computing them again in backward; options: see
          TiledLoss.
    """

    def __init__(self, store: bool = False, **options: Unpack[TiledOptions]):
        super().__init__(**options)
        self.store = store

    def forward(self, embeddings: Embeddings) -> LossOutput:
        return infonce(embeddings, partial(Gathered, keep=self.store), self)
