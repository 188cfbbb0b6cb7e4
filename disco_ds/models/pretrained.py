"""The weights that a model starts from: an open_clip tag, a file or folder, or weights of the image tower only.

checkpoints/weights.py reads the weights that a run of disco_ds has trained.
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
from disco_ds.names import did_you_mean

logger = logging.getLogger(__name__)
CONFIG = "open_clip_config.json"
TIMM = "timm"
"""With this value, model.pretrained_image selects timm's weights for the image tower."""


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the content of open_clip_config.json in a folder with the layout of the Hugging Face Hub.

    If the config names a tokenizer of the hub, the result names the folder instead, which contains the tokenizer.

    Raises:
        ValueError: If the file cannot be read or does not describe a model.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        model = config["model_cfg"]
        text = {} if "factory" in model else model["text_cfg"]
    except Exception as error:
        raise ValueError(
            f"{folder} is not a complete open_clip folder: {type(error).__name__}: {error}"
        ) from error
    if text.get("hf_tokenizer_name"):
        text["hf_tokenizer_name"] = str(folder.resolve())
    return config


def find_weights(name: str, settings: ModelSettings) -> str | None:
    """Return the tag or file that open_clip.create_model must load for the setting model.pretrained, or None.

    Args:
        name: Name of the model in open_clip.
        settings: The model settings of the recipe.

    Raises:
        ValueError: If the weights do not exist, or if the tag does not exist for this model.
    """
    image = settings.pretrained_image
    path = settings.pretrained
    if str(image) == TIMM:
        if "timm_model_name" not in open_clip.get_model_config(name)["vision_cfg"]:
            raise ValueError(
                f"model.pretrained_image=timm: the image tower of {name} is not from timm; give a file instead"
            )
    elif image is not None and not image.is_file():
        raise ValueError(
            f"model.pretrained_image: no file {image}; expected the path of a file, or `timm` to use timm's weights"
        )
    if path is None:
        return None
    if path.is_file() or open_clip.get_pretrained_cfg(name, str(path)):
        return str(path)
    if path.is_dir() and (found := _find_checkpoint_in_dir(path)):
        return found
    tags = open_clip.list_pretrained_tags_by_model(name)
    hint = did_you_mean(str(path), tags)
    raise ValueError(
        f"model.pretrained: {path} is not a file, a folder with weights such as `disco-ds export` writes, or a "
        f"tag of {name}{hint}; its tags: {', '.join(tags) or 'none'}"
    )


def download_weights(name: str, settings: ModelSettings) -> None:
    """Download into the cache the weights that the settings select: those of an open_clip tag, and timm's image tower.

    All ranks then load them from the cache. Weights in local files need no download.

    Raises:
        ValueError: If the weights cannot be downloaded. The message is a single line.
    """
    weights, image_weights = settings.pretrained, settings.pretrained_image
    try:
        open_clip.download_pretrained(open_clip.get_pretrained_cfg(name, str(weights)))
        if str(image_weights) == TIMM:
            tower = open_clip.get_model_config(name)["vision_cfg"]["timm_model_name"]
            timm.create_model(tower, pretrained=True)
    except Exception as error:  # the hub's client, urllib and timm raise many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"model.pretrained={weights}, model.pretrained_image={image_weights}: the weights are not in the cache and "
            "could not be fetched; download them on a machine with internet access, and set the path of the file "
            f"instead. {reason}"
        ) from None


def read_overrides(name: str, settings: ModelSettings) -> dict[str, Any]:
    """Return the preprocess_cfg of the weights, in which values from the settings replace those of the weights."""
    cfg = open_clip.get_pretrained_cfg(name, str(settings.pretrained))
    if settings.pretrained is not None and (path := settings.pretrained / CONFIG).is_file():
        cfg = json.loads(path.read_text(encoding="utf-8")).get("preprocess_cfg", {})
    if str(settings.pretrained_image) == TIMM:
        tower = open_clip.get_model_config(name)["vision_cfg"]["timm_model_name"]
        if found := timm.get_pretrained_cfg(tower, allow_unregistered=True):
            cfg = {"mean": found.mean, "std": found.std, "interpolation": found.interpolation}
    overrides = {
        "mean": settings.image_mean,
        "std": settings.image_std,
        "interpolation": settings.interpolation,
        "resize_mode": settings.resize_mode,
    }
    merged = merge_preprocess_dict(merge_preprocess_dict({}, cfg), overrides)
    merged.pop("size", None)
    return merged


def load_image_tower(model: Any, path: Path) -> None:
    """Load the image tower from a file that contains the weights of the tower, of its timm trunk, or of a CLIP model.

    Raises:
        ValueError: If the file cannot be read or lacks weights of the tower.
    """
    try:
        state = load_state_dict(str(path), device="cpu")
        whole = {
            key.removeprefix("visual."): value
            for key, value in state.items()
            if key.startswith("visual.")
        }
        tower: Any = model.visual
        if hasattr(tower, "trunk") and not any(key.startswith("trunk.") for key in whole or state):
            tower = tower.trunk  # a file from timm, without the projection after the trunk
        missing, unexpected = tower.load_state_dict(whole or state, strict=False)
        if missing:
            raise KeyError(f"it lacks {len(missing)} tensors of the tower, such as {missing[0]}")
    except Exception as error:  # an unknown file may fail anywhere in torch, pickle or safetensors
        raise ValueError(
            f"model.pretrained_image: {path} does not fit: {type(error).__name__}: {error}"
        ) from error
    if unexpected:
        logger.warning(
            "model.pretrained_image: %d tensors of %s are not used, such as %s",
            len(unexpected),
            path,
            unexpected[0],
        )


def warn_of_random_tower(settings: ModelSettings) -> None:
    """Warn about a locked tower for which the recipe names no weights.

    This is not an error, because the model config may name weights for the tower.
    """
    for side, locked, weights in (
        ("image", settings.lock_image, settings.pretrained or settings.pretrained_image),
        ("text", settings.lock_text, settings.pretrained),
    ):
        if locked and not weights:
            logger.warning(
                "model.lock_%s freezes a tower for which the recipe names no weights: unless the model "
                "config names weights, the tower stays random; set model.pretrained",
                side,
            )
