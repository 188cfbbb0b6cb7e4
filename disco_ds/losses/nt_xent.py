"""NT-Xent, the self-supervised loss of SimCLR: two views of each image, compared with the views of all other images."""

# b local batch, B global = N b, D width, N ranks

from __future__ import annotations

from typing import Any

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import Gathered, Ring, TiledLoss
from disco_ds.losses.infonce import InfoNCE


@register_loss("nt_xent")
class NTXentLoss(TiledLoss):
    """Mean over all 2B views i of -log(exp(x_ij) / sum of exp(x_ik) over all 2B - 1 other views k).

    j is the other view of the same image, and x are the similarities times the scale, which is 1 / temperature. In
    Embeddings, the second view takes the place of the text. Three blocks of similarities are computed in tiles:
    first views against second views, first against first, and second against second. Source: SimCLR
    (arXiv 2002.05709) equation 1; DisCo-CLIP section 4.1; docs/losses.md section 7.

    Args:
        ring: Send views around a ring (as in `inf_cl`) instead of gathering them (as in
            `disco_fused`).
        options: Keyword arguments of TiledLoss.
    """

    initial_scale = 10.0

    def __init__(self, ring: bool = False, **options: Any):
        super().__init__(**options)
        self.ring = ring

    def forward(self, embeddings: Embeddings) -> LossOutput:
        """Compute the loss of both views. Collective."""
        make_blocks = Ring if self.ring else Gathered
        return self.compute(InfoNCE, embeddings, make_blocks, True)
