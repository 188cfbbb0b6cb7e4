"""NT-Xent: two views of one image, told apart from both views of all others. Self-supervised training (SimCLR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from disco_ds.kernels import Impl, Precision, Tiling
from disco_ds.losses.base import Embeddings, Loss, LossOutput, register_loss
from disco_ds.losses.blocks import Blocks, Gathered, Ring, read_wire
from disco_ds.losses.infonce import infonce


@register_loss("nt_xent")
class NTXentLoss(Loss):
    """Mean over all 2B views of -log(exp(pair) / sum over the 2B - 1 other views), with the scale 1 / temperature.

    The second view takes the place of the text in Embeddings. Three blocks of similarities, in tiles: views against
    views, and either kind against itself. Source: SimCLR (arXiv 2002.05709) equation 1; DisCo-CLIP section 4.1.

    Args:   ring: views travel a ring (as in `inf_cl`) instead of being gathered (as in `disco_fused`); wire: dtype in
            which they do, None for their own; tile, precision, impl: see kernels.Tiling.
    Raises: ValueError for a value that is none of these.
    """

    initial_scale = 10.0

    def __init__(
        self,
        ring: bool = False,
        wire: Literal["fp32", "fp16", "bf16"] | None = None,
        tile: Sequence[int] | None = None,
        precision: Precision = "fp32",
        impl: Impl = "auto",
        group: Any = None,
    ):
        super().__init__()
        self.tiling = Tiling(tile, precision, impl)
        self.ring, self.wire, self.group = ring, read_wire(wire), group

    def forward(self, embeddings: Embeddings) -> LossOutput:
        def make_blocks(views: Tensor) -> Blocks:
            return (Ring if self.ring else Gathered)(views, self.tiling, self.wire, self.group)

        return infonce(embeddings, make_blocks, self.tiling, self.group, shared=True)
