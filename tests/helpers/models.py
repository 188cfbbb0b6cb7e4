"""Small models for tests, and a batch for them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.config import ModelSettings
from disco_ds.models.clip import build_model
from helpers.towers import TINY, batches

RESNET = {
    "image_size": 32,
    "layers": [1, 1, 1, 1],
    "width": 8,
    "patch_size": None,
    "head_width": 16,
}


def build(name: str, seed: int = 0, **settings: Any) -> nn.Module:
    arguments = {
        key: settings.pop(key)
        for key in ("initial_scale", "initial_bias", "learns_scale")
        if key in settings
    }
    torch.manual_seed(seed)
    return build_model(ModelSettings(name=name, **settings), **arguments)


def write_resnet(folder: Path) -> str:
    path = folder / "resnet.json"
    path.write_text(json.dumps(TINY | {"vision_cfg": RESNET}))
    return str(path)


def one_batch(size: int = 4) -> tuple[Tensor, Tensor]:
    (batch,) = batches(1, size)
    return batch["image"], batch["text"]
