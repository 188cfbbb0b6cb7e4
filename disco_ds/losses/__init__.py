"""The contrastive losses: a registry, one file per loss. They take plain values, no settings and no engine.

What a loss class must have is at the top of base.py.
"""

from disco_ds.losses import clip, disco, disco_fused, fastclip, inf_cl, nt_xent, siglip  # noqa: F401  (registers them)
from disco_ds.losses.base import (
    Embeddings,
    Loss,
    LossContractError,
    LossCost,
    LossOutput,
    build_loss,
    list_losses,
    register_loss,
)

__all__ = [
    "Embeddings",
    "Loss",
    "LossContractError",
    "LossCost",
    "LossOutput",
    "build_loss",
    "list_losses",
    "register_loss",
]
