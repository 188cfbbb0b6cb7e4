"""The weights that a model starts from: an open_clip tag, a file or folder, or weights of the image tower only.

checkpoints/weights.py reads the weights that a run of disco_ds has trained.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from open_clip.convert import convert_state_dict
from open_clip.factory import _find_checkpoint_in_dir, load_checkpoint
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed
from open_clip.transform import merge_preprocess_dict
from timm.models import load_state_dict
from torch import nn

from disco_ds.config import ModelSettings
from disco_ds.models.param_groups import SCALES
from disco_ds.names import did_you_mean, explain_errors

logger = logging.getLogger(__name__)
CONFIG = "open_clip_config.json"
UNUSED = (
    "input_resolution",
    "context_length",
    "vocab_size",
    "text.transformer.embeddings.position_ids",
)
"""Names of tensors that are not weights, in files of OpenAI and of transformers before 4.31."""
TIMM = "timm"
"""With this value, model.pretrained_image selects timm's weights for the image tower."""


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the content of open_clip_config.json in a folder with the layout of the Hugging Face Hub.

    If the config names a tokenizer, its name is replaced by the path of the folder, which contains the tokenizer.

    Raises:
        ValueError: If the file cannot be read or does not describe a model.
    """
    with explain_errors(f"{folder} is not a complete open_clip folder"):
        config = json.loads((folder / CONFIG).read_bytes())
        model = config["model_cfg"]
        text = {} if "factory" in model else model["text_cfg"]
    if text.get("hf_tokenizer_name"):
        text["hf_tokenizer_name"] = str(folder.resolve())
    return config


def find_weights(name: str, settings: ModelSettings) -> str | None:
    """Return the open_clip tag or the file that the setting model.pretrained selects; None if it is not set.

    Args:
        name: Name of the model in open_clip.
        settings: The model settings of the recipe.

    Raises:
        ValueError: If the weights do not exist, or if the tag does not exist for this model.
    """
    image = settings.pretrained_image
    path = settings.pretrained
    if str(image) == TIMM:
        if _find_timm_tower(name) is None:
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
    if path.is_dir() and (weights := _find_checkpoint_in_dir(path)):
        return weights
    tags = open_clip.list_pretrained_tags_by_model(name)
    hint = did_you_mean(str(path), tags)
    raise ValueError(
        f"model.pretrained: {path} is not a file, a folder with weights such as `disco-ds export` writes, or a "
        f"tag of {name}{hint}; its tags: {', '.join(tags) or 'none'}"
    )


def download_weights(name: str, settings: ModelSettings) -> None:
    """Download the weights of the selected open_clip tag and, if selected, timm's image tower into the cache.

    All ranks then load them from the cache. Weights in local files need no download.

    Raises:
        ValueError: If the weights cannot be downloaded. The message is a single line.
    """
    weights, image_weights = settings.pretrained, settings.pretrained_image
    with explain_errors(
        f"model.pretrained={weights}, model.pretrained_image={image_weights}: the weights are not in the cache and "
        "could not be fetched; download them on a machine with internet access, and set the path of the file instead"
    ):
        open_clip.download_pretrained(open_clip.get_pretrained_cfg(name, str(weights)))
        if str(image_weights) == TIMM:
            timm.create_model(_find_timm_tower(name), pretrained=True)


def _find_timm_tower(name: str) -> str | None:
    """Return the name of the image tower in timm; None if open_clip itself has the tower."""
    return open_clip.get_model_config(name)["vision_cfg"].get("timm_model_name")


def read_overrides(name: str, settings: ModelSettings) -> dict[str, Any]:
    """Return the preprocessing of the weights, overridden by the recipe.

    The image size is left out, because the model decides it.
    """
    cfg, _ = find_preprocessing(name, settings)
    overrides = {
        "mean": settings.image_mean,
        "std": settings.image_std,
        "interpolation": settings.interpolation,
        "resize_mode": settings.resize_mode,
    }
    merged = merge_preprocess_dict(merge_preprocess_dict({}, cfg), overrides)
    merged.pop("size", None)
    return merged


def find_preprocessing(name: str, settings: ModelSettings) -> tuple[dict[str, Any], str | None]:
    """Return the preprocess_cfg of the weights, and a warning if it is a guess (otherwise None).

    For a local file without an open_clip config, the guess is the preprocess_cfg that all of open_clip's tags of this
    model have in common; it is empty if they differ or if there are no tags.
    """
    path = settings.pretrained
    keys = ["mean", "std", "interpolation", "resize_mode"]
    is_timm = str(settings.pretrained_image) == TIMM
    if is_timm and (
        tag := timm.get_pretrained_cfg(_find_timm_tower(name), allow_unregistered=True)
    ):
        return {key: getattr(tag, key) for key in keys[:3]}, None
    known = _read_config(name, path)
    if path is None or known:
        return known, None
    tags = open_clip.list_pretrained_tags_by_model(name)
    cfgs = [open_clip.get_pretrained_cfg(name, tag) for tag in tags]
    choices = {tuple(cfg[key] for key in keys) for cfg in cfgs}
    shared = dict(zip(keys, choices.pop(), strict=True)) if len(choices) == 1 else {}
    return shared, (
        f"model.pretrained: {path} has no preprocessing settings, so {shared or 'the mean and std of OpenAI'} are "
        "used; set model.image_mean, image_std, interpolation and resize_mode to those that the weights were trained "
        "with"
    )


def _read_config(name: str, path: Path | None) -> dict[str, Any]:
    """Return the preprocessing and `quick_gelu` of an open_clip tag, or of weights beside an open_clip config.

    Return an empty dict for other weights.
    """
    if path is None:
        return {}
    if cfg := open_clip.get_pretrained_cfg(name, str(path)):
        return cfg
    for folder in (path, path.parent):
        if (folder / CONFIG).is_file():
            config = read_folder(folder)
            return config.get("preprocess_cfg", {}) | {
                "quick_gelu": config["model_cfg"].get("quick_gelu", False)
            }
    return {}


def choose_quick_gelu(name: str, settings: ModelSettings) -> bool:
    """Return whether the model uses QuickGELU.

    If the weights are a tag of open_clip or come with an open_clip config, it is known whether they were trained with
    QuickGELU, and this decides. Otherwise, the model uses QuickGELU if the model's config or the recipe sets it.

    Raises:
        ValueError: If the recipe contradicts the weights.
    """
    config = open_clip.get_model_config(name) or {}
    chosen = config.get("quick_gelu", False) or bool(settings.quick_gelu)
    weights = _read_config(name, settings.pretrained)
    wanted = weights.get("quick_gelu", False) if weights else chosen
    if chosen != wanted and settings.quick_gelu is not None:
        raise ValueError(
            f"model.quick_gelu={str(settings.quick_gelu).lower()}, but the weights {settings.pretrained} were trained "
            f"with quick_gelu={str(wanted).lower()}; remove model.quick_gelu, or choose other weights"
        )
    return wanted


def load_weights(model: Any, path: Path, name: str) -> None:
    """Load both towers, the logit scale and the logit bias from a file.

    If the file has no logit bias, the model keeps its initial one. If the model has no logit bias, the one in the file
    is ignored. If the context lengths differ, the last text positions are dropped, or the model's initial ones are
    appended. They are not interpolated, because a token's position does not depend on the tokens after it.

    Args:
        model: A model that open_clip built.
        path: The weight file.
        name: Name of the model for error messages.

    Raises:
        ValueError: If the file cannot be read or its tensors do not fit the model.
    """
    text = getattr(model, "text", model)
    positions = "text.positional_embedding" if text is not model else "positional_embedding"
    with explain_errors(f"model.pretrained: {path} does not fit model {name}"):
        if path.suffix in (".npz", ".npy"):  # big_vision's format
            load_checkpoint(model, str(path))
            return
        tensors = convert_state_dict(
            model, load_state_dict(str(path), use_ema=False, weights_only=True)
        )
        if text is not model:
            tensors = convert_to_custom_text_state_dict(tensors)
        tensors = {key: x.reshape(1) if key in SCALES else x for key, x in tensors.items()}
        for key in UNUSED:
            tensors.pop(key, None)
        if model.logit_bias is None:
            tensors.pop("logit_bias", None)
        else:
            tensors.setdefault("logit_bias", model.logit_bias.detach())
        resize_pos_embed(tensors, model)
        if positions in tensors and getattr(text, "cls_emb", None) is None:
            old, new = tensors[positions], text.positional_embedding.detach()
            tensors[positions] = torch.cat([old[: len(new)], new[len(old) :]])
        model.load_state_dict(tensors)


def load_image_tower(model: Any, path: Path) -> None:
    """Load the image tower from a file that contains the weights of the tower, of its timm trunk, or of a CLIP model.

    Raises:
        ValueError: If the file cannot be read or lacks weights of the tower.
    """
    with explain_errors(f"model.pretrained_image: {path} does not fit"):
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
        whole = {
            key.removeprefix("visual."): value
            for key, value in state.items()
            if key.startswith("visual.")
        }
        tower: Any = model.visual
        if hasattr(tower, "trunk") and not any(key.startswith("trunk.") for key in whole or state):
            tower = tower.trunk  # a file from timm, without the projection after the trunk
        missing, _ = tower.load_state_dict(whole or state, strict=False)
        if missing:
            raise KeyError(f"it lacks {len(missing)} tensors of the tower, such as {missing[0]}")


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


def hash_weights(model: nn.Module) -> str:
    """Return a digest of the state_dict: names, dtypes, shapes and values of all parameters and persistent buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
