"""The ds_configs of every precision and ZeRO stage that the exactness tests use."""

import copy
import itertools
from pathlib import Path
from typing import Any

from disco_ds.config.ds_config import merge, read_ds_config
from helpers.machine import HAS_FP16

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast_bf16_wire": {
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
        }
    },
    "bf16": {"bf16": {"enabled": True}},
    "bf16_wire": {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    # ds_configs/zero3_offload.json with another precision
    "offload": {"zero_optimization": read_ds_config("zero3_offload", Path())["zero_optimization"]},
    # by default, ZeRO 3 does not partition small parameters, such as the scale
    "partitioned": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}


ZERO3_ONLY = ("offload", "partitioned")


REFUSED = {("bf16", 0), ("bf16_wire", 0), ("fp16", 0)}
"""Pairs (precision, ZeRO stage) that are refused. tests/config/test_ds_config.py checks that."""


MATRIX = [
    (precision, stage)
    for precision, stage in itertools.product(PRECISIONS, range(4))
    if (precision, stage) not in REFUSED
    and (stage == 3 or precision not in ZERO3_ONLY)
    and (precision != "fp16" or HAS_FP16)
]
"""Every pair (precision, ZeRO stage) that this machine can run."""


def ds_config(precision: str, stage: int) -> dict[str, Any]:
    return merge({"zero_optimization": {"stage": stage}}, copy.deepcopy(PRECISIONS[precision]))
