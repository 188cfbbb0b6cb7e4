"""The smallest complete settings of a run."""

import copy
from typing import Any

from disco_ds.config import Config, check_config
from disco_ds.config.ds_config import merge

MINIMAL: dict[str, Any] = {
    "name": "test",
    "global_batch": 64,
    "micro_batch": 16,
    "steps": 100,
    "data": {"source": "synthetic"},
    "optim": {"lr": 1e-3, "warmup_steps": 10},
    "deepspeed": {},
}


def settings(**changes: Any) -> Config:
    return check_config(merge(copy.deepcopy(MINIMAL), changes), "test")
