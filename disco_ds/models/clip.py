"""Builds the model that a run trains, fit for DeepSpeed: a scale of shape [1], one forward, locked towers.

It is one of open_clip's, or of the user's own (two_towers.py). The module stays theirs, with its keys in
state_dict. The loss is in losses/, the optimizer and precision in training/engine.py.
"""

from __future__ import annotations

import json
import logging
import math
import types
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
from open_clip.factory import add_model_config
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.config import PACKAGE, ModelSettings
from disco_ds.config.hints import did_you_mean
from disco_ds.config.own_code import find_own
from disco_ds.models import convnet  # noqa: F401  (registers disco_convnet with timm)
from disco_ds.models.pretrained import TIMM, find_weights, load_image_tower, read_overrides
from disco_ds.models.two_towers import TwoTowers, build_two_towers

logger = logging.getLogger(__name__)

Features = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]
"""(image [b, D], text [b, D], scale [1], bias [1]), unit rows in fp32; None: not given, or no bias."""


@dataclass(frozen=True)
class Preprocessing:
    """Size and normalisation of the model's images, from open_clip's preprocess_cfg."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Literal["bicubic", "bilinear"]
    resize_mode: Literal["shortest", "longest", "squash"]


def build_model(
    settings: ModelSettings,
    initial_scale: float = 1 / 0.07,
    initial_bias: float | None = None,
    learns_scale: bool = True,
    pretrained: bool = True,
) -> nn.Module:
    """Build the model of `settings`, in fp32 on the CPU, with this file's `forward`.

    Args:   initial_scale: exp of the initial logit_scale; initial_bias: None for no bias; both come from the loss;
            pretrained: load the weights that the settings name; else they are random, to be replaced.
    Raises: ValueError for an unknown model, weights that are missing or do not fit, or settings it does not support.
    """
    if settings.factory:
        model: Any = build_two_towers(settings, initial_scale, initial_bias)
    else:
        model = _create(settings, initial_scale, initial_bias, pretrained)
    _lock(model, settings, learns_scale)
    if settings.token_embedding_std is not None and settings.pretrained is None:
        nn.init.normal_(_text_tower(model).token_embedding.weight, std=settings.token_embedding_std)
    if settings.activation_checkpointing:
        model.set_grad_checkpointing(True)
    preprocessing = read_preprocessing(model)
    model.two_views = settings.two_views
    model.image_mean, model.image_std = preprocessing.mean, preprocessing.std
    # ZeRO 3 gathers a module's own parameters around its forward: a wrapper around open_clip's module would find
    # logit_scale, text_projection and positional_embedding empty.
    model.forward = types.MethodType(forward, model)
    if settings.compile:
        model.visual.compile()
        (model.text if settings.factory else _text_tower(model).transformer).compile()
    _warn_of_batch_norm(model)
    return model


def _create(settings: ModelSettings, initial_scale: float, initial_bias: float | None, pretrained: bool) -> nn.Module:
    """open_clip's model, as open_clip builds it. Raises: ValueError."""
    name = register_config(settings.name)
    weights, image_weights = (find_weights(name, settings), settings.pretrained_image) if pretrained else (None, None)
    try:
        logging.disable(logging.WARNING)  # open_clip warns of random weights, with which training begins
        model = open_clip.create_model(
            name,
            pretrained=weights,
            pretrained_image=str(image_weights) == TIMM,
            pretrained_text=pretrained,
            force_quick_gelu=settings.quick_gelu,
            force_patch_dropout=settings.patch_dropout,
            force_image_size=settings.image_size,
            force_preprocess_cfg=read_overrides(name, settings),
            output_dict=True,
            nonscalar_logit_scale=True,
            init_logit_scale=math.log(initial_scale),
            init_logit_bias=initial_bias,
        )
    except Exception as error:
        # A wrong config or weight file may fail anywhere in torch, timm or pickle.
        raise ValueError(
            f"model {settings.name}: open_clip could not build it: {type(error).__name__}: {error}"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    if not isinstance(model, open_clip.CLIP | open_clip.CustomTextCLIP):
        raise ValueError(f"model {settings.name} is a {type(model).__name__}; disco_ds trains two-tower CLIP models")
    if image_weights is not None and str(image_weights) != TIMM:
        load_image_tower(model, image_weights)
    return model


def forward(model: Any, image: Tensor | None = None, text: Tensor | None = None) -> Features:
    """Unit features of either or both towers; the only way through the model at every ZeRO stage.

    Args:    image [b, 3, H, W], uint8 or floating in [0, 1]; text [b, L] int64 tokens, or second views like image.
    Returns: Features; scale = exp(logit_scale) always comes, so that every parameter can stay in every graph.
    """
    image_features = text_features = None
    if image is not None:
        image_features = unit_rows(model.encode_image(_normalise(model, image)))
    if text is not None:
        encoded = model.encode_image(_normalise(model, text)) if model.two_views else model.encode_text(text)
        text_features = unit_rows(encoded)
    bias = getattr(model, "logit_bias", None)
    return image_features, text_features, model.logit_scale.float().exp(), None if bias is None else bias.float()


def _normalise(model: Any, image: Tensor) -> Tensor:
    """(pixels - mean) / std in one pass over the images, in the precision of the tower's first layer."""
    device = image.device
    factor, offset = pixel_affine(
        model.image_mean, model.image_std, 255.0 if image.dtype == torch.uint8 else 1.0, device
    )
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else model.logit_scale.dtype
    # Convolutions run faster on channels_last.
    out = torch.empty(image.shape, dtype=dtype, device=device, memory_format=torch.channels_last)
    return torch.addcmul(offset, image, factor, out=out)  # computed in fp32, whatever the dtypes of input and output


@lru_cache
def pixel_affine(
    mean: tuple[float, ...], std: tuple[float, ...], largest: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """1 / (largest x std) and -mean / std, [1, 3, 1, 1] fp32.

    Not buffers of the model: an engine with 16-bit weights would round them.
    """
    values = [1 / (largest * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    factor, offset = (torch.tensor(row, device=device).view(1, -1, 1, 1) for row in values)
    return factor, offset


def unit_rows(x: Tensor) -> Tensor:
    """x / |x| in fp32, also under autocast: 16-bit unit rows would cost the loss its precision."""
    return F.normalize(x.float(), dim=-1)


def trained_sides(model: Any) -> dict[str, bool]:
    """By argument of `forward`, "image" and "text": True if its features have a gradient."""
    image, text = (any(parameter.requires_grad for parameter in tower) for tower in _parameters_by_tower(model))
    return {"image": image, "text": image if model.two_views else text}


def _parameters_by_tower(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    # open_clip's CLIP keeps its text tower's parameters beside its own.
    others = [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("visual.") and name not in ("logit_scale", "logit_bias")
    ]
    return list(model.visual.parameters()), others


def read_preprocessing(model: nn.Module) -> Preprocessing:
    cfg = open_clip.get_model_preprocess_cfg(model)
    size = cfg["size"]
    height, width = (size, size) if isinstance(size, int) else size
    return Preprocessing(
        (height, width), tuple(cfg["mean"]), tuple(cfg["std"]), cfg["interpolation"], cfg.get("resize_mode", "shortest")
    )


def read_architecture(settings: ModelSettings) -> dict[str, Any]:
    """open_clip's config of the model, with the size and activation of the settings.

    Of the user's own model it is the function and its options.
    """
    if settings.factory:
        find_own(settings.factory, settings.options)
        return {"factory": settings.factory, "options": settings.options}
    config = open_clip.get_model_config(register_config(settings.name))
    if settings.image_size is not None:
        config["vision_cfg"]["image_size"] = settings.image_size
    return config | {"quick_gelu": True} if settings.quick_gelu else config


def read_text_size(model: Any) -> tuple[int, int]:
    """(context length, vocabulary size)."""
    if isinstance(model, TwoTowers):
        return model.context_length, model.vocab_size
    text = _text_tower(model)
    vocab_size = text.vocab_size if hasattr(text, "vocab_size") else text.config.vocab_size  # the latter: Hugging Face
    return text.context_length, vocab_size


def build_tokenizer(settings: ModelSettings, model: nn.Module) -> Any:
    """The tokenizer of this model: list of strings -> [n, L] int64.

    Raises: ValueError if it cannot be loaded, or has tokens the model has no embedding for.
    """
    if isinstance(model, TwoTowers):
        return model.tokenizer
    try:
        tokenizer = open_clip.get_tokenizer(register_config(settings.name))
    except OSError as error:
        raise ValueError(f"model {settings.name}: its tokenizer could not be loaded: {error}") from error
    _, vocab_size = read_text_size(model)
    if getattr(tokenizer, "vocab_size", 0) > vocab_size:
        raise ValueError(
            f"model {settings.name}: text_cfg.vocab_size {vocab_size} is too small for its tokenizer's "
            f"{tokenizer.vocab_size} tokens"
        )
    return tokenizer


def register_config(name: str) -> str:
    """Make a model config file known to open_clip and return the name open_clip has for it.

    Raises: ValueError if the name is neither open_clip's, ours, nor a file.
    """
    bundled = PACKAGE / "assets" / "models"
    path = bundled / f"{name}.json"
    if not path.is_file() and name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"model.name: no file {name}")
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"model.name: {name} is not valid JSON: {error}") from None
    if path.is_file():
        add_model_config(path)
        return path.stem
    known = open_clip.list_models()
    if name not in known:
        ours = sorted(item.stem for item in bundled.glob("*.json"))
        hint = did_you_mean(name, [*known, *ours])
        raise ValueError(f"unknown model {name!r}{hint}; one of open_clip's, of ours ({', '.join(ours)}), or a .json")
    return name


def _text_tower(model: Any) -> Any:
    return model.text if hasattr(model, "text") else model


def _lock(model: Any, settings: ModelSettings, learns_scale: bool) -> None:
    try:
        if settings.lock_image:
            model.lock_image_tower(unlocked_groups=settings.unlocked_layers, freeze_bn_stats=True)
        if settings.lock_text or settings.two_views:
            model.lock_text_tower(settings.unlocked_layers)
    except (
        AssertionError,
        AttributeError,
        KeyError,
    ) as error:  # of a tower whose layers open_clip, or timm, cannot tell apart
        raise ValueError(f"model.unlocked_layers={settings.unlocked_layers}: {settings.name}: {error}") from None
    for side, tower in zip(("image", "text"), _parameters_by_tower(model), strict=True):
        if settings.unlocked_layers and getattr(settings, f"lock_{side}") and all(p.requires_grad for p in tower):
            trains = f"trains all of the {side} tower"
            raise ValueError(f"model.unlocked_layers={settings.unlocked_layers} {trains}; leave model.lock_{side} out")
    model.logit_scale.requires_grad_(learns_scale)


def _warn_of_batch_norm(model: nn.Module) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if names:
        logger.warning(
            "BatchNorm in %s (%d layers): its statistics are those of a micro-batch, so the gradient depends "
            "on how the global batch is cut",
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
            len(names),
        )
