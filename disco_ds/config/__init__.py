"""Settings of a run: the recipe (YAML) and DeepSpeed's settings (JSON).

Import-light: importing this package imports neither torch nor DeepSpeed.
"""

from disco_ds.config.data import DataSettings
from disco_ds.config.load import check_config, load_config
from disco_ds.config.model import EmaSettings
from disco_ds.config.recipe import (
    PACKAGE,
    CheckpointSettings,
    Config,
    EvalSettings,
    ModelSettings,
    OptimSettings,
)
from disco_ds.config.render import render_ds_config
from disco_ds.config.schedule import Schedule, find_late, make_schedule
from disco_ds.config.settings import Tree
