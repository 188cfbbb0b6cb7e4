"""The weights that a model starts from: a tag of open_clip's, a local file or folder, or an image tower of its own.

What a run has trained is read by training/weights.py.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import open_clip
import timm
from open_clip.factory import _find_checkpoint_in_dir, load_state_dict
from open_clip.transform import merge_preprocess_dict

from disco_ds.config import ModelSettings
from disco_ds.config.hints import did_you_mean

logger = logging.getLogger(__name__)
CONFIG = "open_clip_config.json"
TIMM = "timm"
"""The value of model.pretrained_image that stands for the timm tower's own weights."""


def find_weights(name: str, settings: ModelSettings) -> str | None:
    """The tag or file that open_clip.create_model loads for model.pretrained.

    Args:   name: of the model, as open_clip knows it.
    Raises: ValueError for weights that are not there, and for a tag that this model does not have.
    """
    image, path = settings.pretrained_image, settings.pretrained
    if image is not None and str(image) != TIMM and not image.is_file():
        raise ValueError(f"model.pretrained_image: no file {image}; expected a file, or timm for the tower's own")
    if str(image) == TIMM and "timm_model_name" not in open_clip.get_model_config(name)["vision_cfg"]:
        raise ValueError(f"model.pretrained_image=timm: the image tower of {name} is not timm's; name a file")
    if path is None:
        return None
    if open_clip.get_pretrained_cfg(name, str(path)):
        return str(path)
    found = _find_checkpoint_in_dir(path) if path.is_dir() else str(path) if path.is_file() else None
    if found is None:
        tags = open_clip.list_pretrained_tags_by_model(name)
        hint = did_you_mean(str(path), tags)
        raise ValueError(
            f"model.pretrained: no file {path}, no folder with weights, and no tag of {name}{hint}; "
            f"its tags: {', '.join(tags) or 'none'}"
        )
    return found


def download_weights(name: str, settings: ModelSettings) -> None:
    """Fetch what `settings` name and no local file has into the cache of open_clip or timm, from where all ranks load.

    Raises: ValueError if it cannot be fetched, in one line.
    """
    cfg = open_clip.get_pretrained_cfg(name, str(settings.pretrained)) if settings.pretrained else {}
    what = f"model.pretrained={settings.pretrained}"
    where = cfg.get("hf_hub") or cfg.get("url")
    try:
        open_clip.download_pretrained(cfg)
        if str(settings.pretrained_image) == TIMM:
            where = open_clip.get_model_config(name)["vision_cfg"]["timm_model_name"]
            what = f"model.pretrained_image={TIMM}"
            timm.create_model(where, pretrained=True)
    except Exception as error:  # of the hub's client, of urllib, or timm's for a model without weights
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{what}: its weights ({where}) are not in the cache and could not be fetched; fetch them on a machine "
            f"that reaches the hub and name the file. {reason}"
        ) from None


def read_overrides(name: str, settings: ModelSettings) -> dict[str, Any]:
    """The entries of open_clip's preprocess_cfg that come with the weights, then those of the settings."""
    cfg = open_clip.get_pretrained_cfg(name, str(settings.pretrained)) if settings.pretrained else {}
    if settings.pretrained is not None and (path := settings.pretrained / CONFIG).is_file():
        cfg = json.loads(path.read_text(encoding="utf-8")).get("preprocess_cfg", {})
    own = {
        "mean": settings.image_mean,
        "std": settings.image_std,
        "interpolation": settings.interpolation,
        "resize_mode": settings.resize_mode,
    }
    merged = merge_preprocess_dict(merge_preprocess_dict({}, cfg), own)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in merged.items() if key != "size"}


def load_image_tower(model: Any, path: Path) -> None:
    """Load the image tower from a file with its own weights, its timm trunk's, or those of a whole CLIP model.

    Raises: ValueError for a file that does not hold all of one of them.
    """
    try:
        state = load_state_dict(str(path), device="cpu")
        whole = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
        tower: Any = model.visual
        if hasattr(tower, "trunk") and not any(key.startswith("trunk.") for key in whole or state):
            tower = tower.trunk  # a file of timm's, which knows no projection behind the trunk
        missing, unexpected = tower.load_state_dict(whole or state, strict=False)
    except Exception as error:  # an unknown file may fail anywhere in torch, pickle or safetensors
        raise ValueError(f"model.pretrained_image: {path} does not fit: {type(error).__name__}: {error}") from error
    if missing:
        raise ValueError(f"model.pretrained_image: {path} lacks {len(missing)} tensors of the tower, as {missing[0]}")
    if unexpected:
        few = (len(unexpected), path, unexpected[0])
        logger.warning("model.pretrained_image: %d tensors of %s are not used, as %s", *few)


def warn_of_random_tower(settings: ModelSettings) -> None:
    """Warn of a locked tower that no weights are named for. Hugging Face's text towers load their own."""
    for side, locked in (("image", settings.lock_image), ("text", settings.lock_text)):
        given = settings.pretrained or (side == "image" and settings.pretrained_image)
        if locked and not given:
            logger.warning(
                "model.lock_%s freezes a tower that no weights are named for: unless its architecture brings its own, "
                "it stays random; set model.pretrained",
                side,
            )
