"""DisCo-CLIP's gradient from one b x B block per rank instead of two, in tiles: the fastest way where B x D fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from disco_ds.kernels import Impl, Precision, Tiling
from disco_ds.losses.base import Embeddings, Loss, LossOutput, register_loss
from disco_ds.losses.blocks import Gathered, read_wire
from disco_ds.losses.infonce import infonce


@register_loss("disco_fused")
class DisCoFusedLoss(Loss):
    """InfoNCE over the global batch, equal to `clip` and `disco`.

    Texts are gathered once; a rank computes the block of its images against them tile by tile, which gives both
    directions: sums over its own rows, and sums over columns that one all_reduce of B numbers completes. The texts'
    gradient goes home by reduce_scatter. Memory: 2 B D + a tile. Source: losses.md section 1.

    Args:   store: keep the block's exponentials (b x B in bf16) instead of computing them again in backward;
            wire: dtype in which texts are gathered, None for their own; tile, precision, impl: see kernels.Tiling.
    Raises: ValueError for a value that is none of these.
    """

    def __init__(
        self,
        store: bool = False,
        wire: Literal["fp32", "fp16", "bf16"] | None = None,
        tile: Sequence[int] | None = None,
        precision: Precision = "fp32",
        impl: Impl = "auto",
        group: Any = None,
    ):
        super().__init__()
        self.tiling = Tiling(tile, precision, impl)
        self.store, self.wire, self.group = store, read_wire(wire), group

    def forward(self, embeddings: Embeddings) -> LossOutput:
        def gather(columns: Tensor) -> Gathered:
            return Gathered(columns, self.tiling, self.wire, self.group, self.store)

        return infonce(embeddings, gather, self.tiling, self.group)
