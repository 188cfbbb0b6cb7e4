"""Inf-CL: tiles, and texts that travel a ring of ranks: memory grows with the batch of one rank only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from disco_ds.kernels import Impl, Precision, Tiling
from disco_ds.losses.base import Embeddings, Loss, LossOutput, register_loss
from disco_ds.losses.blocks import Ring, read_wire
from disco_ds.losses.infonce import infonce


@register_loss("inf_cl")
class InfCLLoss(Loss):
    """InfoNCE over the global batch, equal to `clip` and `disco`; nothing of size B D or larger is ever made.

    In forward the blocks of texts go round once, in backward once more with their gradients; the next block moves while
    this one multiplies. Memory: four blocks b x D + a tile. Source: losses.md section 1; Inf-CL (arXiv 2410.17243).

    Args:   wire: dtype in which texts travel, None for their own; tile, precision, impl: see kernels.Tiling.
    Raises: ValueError for a value that is none of these.
    """

    def __init__(
        self,
        wire: Literal["fp32", "fp16", "bf16"] | None = None,
        tile: Sequence[int] | None = None,
        precision: Precision = "fp32",
        impl: Impl = "auto",
        group: Any = None,
    ):
        super().__init__()
        self.tiling = Tiling(tile, precision, impl)
        self.wire, self.group = read_wire(wire), group

    def forward(self, embeddings: Embeddings) -> LossOutput:
        def send_round(columns: Tensor) -> Ring:
            return Ring(columns, self.tiling, self.wire, self.group)

        return infonce(embeddings, send_round, self.tiling, self.group)
