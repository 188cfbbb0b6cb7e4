"""Settings of a run: the recipe (YAML) and DeepSpeed's settings (JSON).

Import-light: importing this package imports neither torch nor DeepSpeed.
"""

from disco_ds.config.data import AugmentSettings, DataSettings, RemoteSettings, SourceSettings
from disco_ds.config.load import check_config, find_recipe, load_config
from disco_ds.config.optim import EmaSettings, TowerOptimSettings
from disco_ds.config.recipe import (
    BASE_BATCH,
    PACKAGE,
    CheckpointSettings,
    Config,
    EvalSettings,
    LogSettings,
    LossSettings,
    ModelSettings,
    OptimSettings,
)
from disco_ds.config.render import render_ds_config

__all__ = [
    "BASE_BATCH",
    "PACKAGE",
    "AugmentSettings",
    "CheckpointSettings",
    "Config",
    "DataSettings",
    "EmaSettings",
    "EvalSettings",
    "LogSettings",
    "LossSettings",
    "ModelSettings",
    "OptimSettings",
    "RemoteSettings",
    "SourceSettings",
    "TowerOptimSettings",
    "check_config",
    "find_recipe",
    "load_config",
    "render_ds_config",
]
