"""NT-Xent: two views of an image against both views of all other images. Self-supervised training (SimCLR)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disco_ds.losses.base import Embeddings, LossOutput, register_loss
from disco_ds.losses.blocks import Gathered, Ring, TiledLoss, TiledOptions
from disco_ds.losses.infonce import infonce

if TYPE_CHECKING:
    from typing import Unpack


@register_loss("nt_xent")
class NTXentLoss(TiledLoss):
    """Mean over all 2B views of -log(exp(pair) / sum over the 2B - 1 other views), with the scale 1 / temperature.

    The second view takes the place of the text in Embeddings. Three blocks of similarities, in tiles: views against
    views, and either kind against itself. Source: SimCLR (arXiv 2002.05709) equation 1; DisCo-CLIP section 4.1;
    docs/losses.md section 7.

    Args: ring: views travel a ring (as in `inf_cl`) instead of being gathered (as in `disco_fused`); options:
          see TiledLoss.
    """

    initial_scale = 10.0

    def __init__(self, ring: bool = False, **options: Unpack[TiledOptions]):
        super().__init__(**options)
        self.ring = ring

    def forward(self, embeddings: Embeddings) -> LossOutput:
        return infonce(embeddings, Ring if self.ring else Gathered, self, shared=True)
