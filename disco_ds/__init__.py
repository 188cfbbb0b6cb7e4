"""Large-batch CLIP training on DeepSpeed, with the exact full-batch gradient at any number of ranks.

The names in __all__ are the Python API; docs/python.md has examples. Each name is imported when it is
first used, so that `import disco_ds` takes only milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disco_ds.checkpoints.export import export_run
    from disco_ds.config import load_config
    from disco_ds.distributed.comm import AgreedError, AskedToStopError, RefusedError
    from disco_ds.losses import Embeddings, LossOutput, build_loss, list_losses
    from disco_ds.losses.drop_in import ClipLoss, SigLipLoss
    from disco_ds.models.two_towers import TwoTowers
    from disco_ds.plan.assumptions import Assumptions
    from disco_ds.plan.overview import Plan, plan_run
    from disco_ds.run import evaluate_run, run_training
    from disco_ds.training.custom_loop import contrastive_step

__version__ = "0.1.0"

OFFERED = {
    "AgreedError": "disco_ds.distributed.comm",
    "AskedToStopError": "disco_ds.distributed.comm",
    "Assumptions": "disco_ds.plan.assumptions",
    "ClipLoss": "disco_ds.losses.drop_in",
    "Embeddings": "disco_ds.losses",
    "LossOutput": "disco_ds.losses",
    "Plan": "disco_ds.plan.overview",
    "RefusedError": "disco_ds.distributed.comm",
    "SigLipLoss": "disco_ds.losses.drop_in",
    "TwoTowers": "disco_ds.models.two_towers",
    "build_loss": "disco_ds.losses",
    "contrastive_step": "disco_ds.training.custom_loop",
    "evaluate_run": "disco_ds.run",
    "export_run": "disco_ds.checkpoints.export",
    "list_losses": "disco_ds.losses",
    "load_config": "disco_ds.config",
    "plan_run": "disco_ds.plan.overview",
    "run_training": "disco_ds.run",
}
"""Maps each name of the API to the module that it is imported from.

A name must differ from the names of the modules directly in this package: importing such a module would
replace the name.
"""

__all__ = [
    "AgreedError",
    "AskedToStopError",
    "Assumptions",
    "ClipLoss",
    "Embeddings",
    "LossOutput",
    "Plan",
    "RefusedError",
    "SigLipLoss",
    "TwoTowers",
    "build_loss",
    "contrastive_step",
    "evaluate_run",
    "export_run",
    "list_losses",
    "load_config",
    "plan_run",
    "run_training",
]


def __getattr__(name: str) -> Any:
    if name not in OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(OFFERED[name]), name)
    globals()[name] = value  # next time, Python finds the name without calling this function
    return value


def __dir__() -> list[str]:
    return sorted(globals() | OFFERED)
