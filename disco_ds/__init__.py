"""disco_ds: large-batch CLIP training on DeepSpeed whose gradient is the full-batch one at any number of ranks.

What it offers to Python is in OFFERED, each imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disco_ds.config import load_config
    from disco_ds.losses import Embeddings, LossOutput, build_loss, list_losses
    from disco_ds.losses.drop_in import ClipLoss, SigLipLoss
    from disco_ds.training.export import export_run
    from disco_ds.training.own_loop import contrastive_step

__version__ = "0.1.0"

OFFERED = {
    "ClipLoss": "disco_ds.losses.drop_in",
    "Embeddings": "disco_ds.losses",
    "LossOutput": "disco_ds.losses",
    "SigLipLoss": "disco_ds.losses.drop_in",
    "build_loss": "disco_ds.losses",
    "contrastive_step": "disco_ds.training.own_loop",
    "export_run": "disco_ds.training.export",
    "list_losses": "disco_ds.losses",
    "load_config": "disco_ds.config",
}
"""Name -> module. None is also the name of a module of this package, which would take its place once imported."""

__all__ = [
    "ClipLoss",
    "Embeddings",
    "LossOutput",
    "SigLipLoss",
    "build_loss",
    "contrastive_step",
    "export_run",
    "list_losses",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(OFFERED[name]), name)
    globals()[name] = value  # the next time it is found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *OFFERED})
