"""Settings of a run: the recipe (YAML) and DeepSpeed's settings (JSON).

Import-light: importing this package imports neither torch nor DeepSpeed.
"""

from disco_ds.config.data import AugmentSettings, DataSettings, SourceSettings
from disco_ds.config.load import check_config, find_recipe, load_config
from disco_ds.config.model import EmaSettings
from disco_ds.config.recipe import (
    BASE_BATCH,
    PACKAGE,
    CheckpointSettings,
    Config,
    EvalSettings,
    ModelSettings,
    OptimSettings,
    StageSettings,
)
from disco_ds.config.render import render_ds_config
from disco_ds.config.schedule import Schedule, find_late, make_schedule
from disco_ds.config.settings import Tree
