"""The contrastive losses. They take plain values and do not depend on the settings or the engine.

What a loss class must provide is documented in base.py. Importing the file of a loss registers the loss.
"""

from disco_ds.losses import fastclip, infonce, siglip  # noqa: F401
from disco_ds.losses.base import (
    Embeddings,
    Loss,
    LossContractError,
    LossCost,
    LossOutput,
    Teacher,
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
    "Teacher",
    "build_loss",
    "list_losses",
    "register_loss",
]
