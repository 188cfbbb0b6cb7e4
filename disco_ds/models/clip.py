"""Build the model that a run trains, with the logit scale and the forward that DeepSpeed needs.

The logit scale has shape [1], and one forward serves both towers. The model is a module from open_clip or a custom
module (two_towers.py). It is not wrapped, so the keys of its state_dict stay the same. The loss is in losses/; the
optimizer and precision are in training/engine.py.
"""

import hashlib
import json
import logging
import math
import tempfile
import types
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
from open_clip.factory import add_model_config
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.config import PACKAGE, ModelSettings
from disco_ds.models import convnet  # noqa: F401  (registers disco_convnet with timm)
from disco_ds.models.fast.replace import compile_towers, replace_parts
from disco_ds.models.fast.texts import (
    CutText,
    PackedText,
    encode_packed,
    find_ends,
    packs,
    read_pooling,
    runs_packed,
)
from disco_ds.models.param_groups import SCALES
from disco_ds.models.pretrained import (
    CONFIG,
    TIMM,
    choose_quick_gelu,
    find_preprocessing,
    find_weights,
    load_image_tower,
    load_weights,
    read_folder,
    read_overrides,
)
from disco_ds.models.tokenizer import FastTokenizer
from disco_ds.models.two_towers import TwoTowers, build_two_towers, freeze_statistics
from disco_ds.names import did_you_mean, explain_errors, load_custom

logger = logging.getLogger(__name__)

Features = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]
"""(image [b, D], text [b, D], scale [1], bias [1]) in fp32; image and text rows have norm 1.

If a tower did not run, its features are None. If the model has no bias, the bias is None.
"""


class Texts(NamedTuple):
    """The m texts of a micro-batch, as inputs of `forward`."""

    text: Tensor
    """[m, L] int64, the L tokens of each text."""
    lengths: np.ndarray | None
    """[m], how many tokens of each text the text tower needs (models/fast/texts.py). None: the tower counts them."""


def build_model(
    settings: ModelSettings,
    initial_scale: float = 1 / 0.07,
    initial_bias: float | None = None,
    learns_scale: bool = True,
    pretrained: bool = True,
) -> nn.Module:
    """Build the model of `settings`, in fp32 on the CPU, with this file's `forward`.

    The initial scale and bias come from the loss. A model config or pretrained weights may replace them; see
    docs/losses.md, "Where the scale and the bias start".

    Args:
        settings: The model settings of the recipe.
        initial_scale: exp of the initial logit_scale.
        initial_bias: Initial logit_bias. None: the model has no bias.
        learns_scale: Whether the logit scale is trained.
        pretrained: Whether to load the weights that the settings name. If False, the weights are random, and the
            caller must replace them.

    Raises:
        ValueError: For an unknown model, weights that are missing or do not fit, or settings that
            the model does not support.
    """
    if settings.factory:
        model: Any = build_two_towers(settings, initial_scale, initial_bias)
    else:
        model = _create(settings, initial_scale, initial_bias, learns_scale, pretrained)
    if settings.towers == "auto":
        replace_parts(model)
    _lock(model, settings, learns_scale)
    if settings.token_embedding_std is not None and settings.pretrained is None:
        nn.init.normal_(
            getattr(model, "text", model).token_embedding.weight, std=settings.token_embedding_std
        )
    if settings.activation_checkpointing:
        model.set_grad_checkpointing(True)
    model.two_views = settings.two_views
    # ZeRO 3 gathers a module's direct parameters only while the forward of that module runs. In the forward of a
    # wrapper, logit_scale, text_projection and positional_embedding of open_clip's module would be empty.
    model.forward = types.MethodType(forward, model)
    model.train = types.MethodType(train, model)
    model.train()
    if settings.compile is True and (
        problems := compile_towers(model, settings.activation_checkpointing)
    ):
        raise ValueError(
            f"model.compile=true is refused for model {settings.label}: {problems[0]}; set "
            "model.compile=auto or false, or model.activation_checkpointing=false"
        )
    _warn_of_batch_norm(model)
    return model


def _create(
    settings: ModelSettings,
    initial_scale: float,
    initial_bias: float | None,
    learns_scale: bool,
    pretrained: bool,
) -> nn.Module:
    """Let open_clip build the model.

    Raises:
        ValueError: If open_clip cannot build it.
    """
    name = register_config(settings.name)
    weights = find_weights(name, settings) if pretrained else None
    image_weights = settings.pretrained_image if pretrained else None
    config = open_clip.get_model_config(name) or {}
    quick_gelu = choose_quick_gelu(name, settings)
    if quick_gelu != config.get("quick_gelu", False) and settings.quick_gelu is None:
        logger.warning("model %s uses QuickGELU=%s, as its weights do", settings.name, quick_gelu)
    logit_scale, logit_bias = math.log(initial_scale), initial_bias
    # A config may contain null for either value.
    if learns_scale and config.get("init_logit_scale") is not None:
        logit_scale = config["init_logit_scale"]
    if initial_bias is not None and config.get("init_logit_bias") is not None:
        logit_bias = config["init_logit_bias"]
    # The weights of a timm tower are for its default image size, so load them before the size changes.
    is_timm = "timm_model_name" in config.get("vision_cfg", {})
    late_size = settings.image_size if weights and is_timm else None
    # open_clip warns if the weights are random, but that is normal for a model that will be trained.
    logging.disable(logging.WARNING)
    try:
        with explain_errors(f"model {settings.name}: open_clip could not build it"):
            model = open_clip.create_model(
                name,
                pretrained_image=str(image_weights) == TIMM,
                pretrained_text=pretrained and weights is None,
                quick_gelu=quick_gelu,
                force_patch_dropout=settings.patch_dropout,
                force_image_size=None if late_size else settings.image_size,
                force_preprocess_cfg=read_overrides(name, settings),
                output_dict=True,
                nonscalar_logit_scale=True,
                init_logit_scale=logit_scale,
                init_logit_bias=logit_bias,
            )
            if weights is not None:
                tag = open_clip.get_pretrained_cfg(name, weights)
                weights = open_clip.download_pretrained(tag) or weights
    finally:
        logging.disable(logging.NOTSET)
    if not isinstance(model, open_clip.CLIP | open_clip.CustomTextCLIP):
        raise ValueError(
            f"model {settings.name} is a {type(model).__name__}, but disco_ds trains two-tower "
            "CLIP models; choose another model.name"
        )
    if weights is not None:
        _, warning = find_preprocessing(name, settings)
        if warning and not (settings.image_mean and settings.image_std):
            logger.warning(warning)
        load_weights(model, Path(weights), settings.name)
    if late_size:
        model.visual.set_input_size(late_size)
        preprocess = open_clip.get_model_preprocess_cfg(model) | {"size": model.visual.image_size}
        open_clip.set_model_preprocess_cfg(model, preprocess)
    if not learns_scale:
        # The temperature is a constant of the loss, but the weights may have another scale.
        nn.init.constant_(model.logit_scale, math.log(initial_scale))
    if image_weights is not None and str(image_weights) != TIMM:
        load_image_tower(model, image_weights)
    return model


def check_image_size(settings: ModelSettings, model: Any) -> None:
    """Refuse an image size that open_clip's image tower does not support, instead of failing in the first step.

    Custom towers are not checked, because they may need an accelerator to run.

    Raises:
        ValueError: If the tower does not support the image size.
    """
    if settings.factory:
        return
    size = read_preprocessing(model).size
    model.visual.eval()  # BatchNorm refuses to train on one value per channel
    with (
        explain_errors(
            f"model.image_size: the image tower of {settings.name} does not take images of {size[0]} x {size[1]}; "
            "choose another size, or omit the setting to use the size in the model's config"
        ),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        model(image=torch.zeros(1, 3, *size))
    model.train()


def train(model: Any, mode: bool = True) -> Any:
    """Set training or eval mode, but keep modules without trained parameters in eval mode.

    Otherwise, dropout, drop path and patch dropout would change the features of a frozen module in every forward.
    build_model installs this function as the model's `train`.
    """
    nn.Module.train(model, mode)
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
    return model


def forward(
    model: Any,
    image: Tensor | None = None,
    text: Tensor | None = None,
    lengths: np.ndarray | None = None,
) -> Features:
    """Compute the unit features of one or both towers. build_model installs this function as the model's `forward`.

    Always call the model as model(image, text). Calling a tower or encode_image does not work at every ZeRO stage.

    Args:
        model: A model from build_model.
        image: [b, 3, H, W], uint8, or floating point in [0, 1].
        text: [b, L] int64 tokens. For a model with two views per image: the second views, with the shape and dtype of
            `image`.
        lengths: [b], how many tokens of each text the text tower needs, as counted by the function that find_counter
            (models/fast/texts.py) returns. None: they are counted here, and the host waits for the GPU. Towers that
            need all tokens ignore this argument.

    Returns:
        Features. The scale, exp(logit_scale), is always included, because at ZeRO 3 the graph of every micro-batch must
        contain every trained parameter (training/grad_accum.py).
    """
    image_features = text_features = bias = None
    if image is not None:
        image_features = unit_rows(model.encode_image(_normalize(model, image)))
    if text is not None and model.two_views:
        text_features = unit_rows(model.encode_image(_normalize(model, text)))
    elif text is not None:
        text_features = unit_rows(_encode_text(model, text, lengths))
    if model.logit_bias is not None:
        bias = model.logit_bias.float()
    return image_features, text_features, model.logit_scale.float().exp(), bias


def _encode_text(model: Any, text: Tensor, lengths: np.ndarray | None) -> Tensor:
    tower = getattr(model, "text", model)
    if isinstance(tower, PackedText | CutText):
        return tower(text, lengths)
    if tower is model and packs(model) and runs_packed(model, text):
        # open_clip's CLIP contains the parts of its text tower. ZeRO 3 gathers their parameters in this forward.
        return encode_packed(model, text, lengths)
    return model.encode_text(text)


def _normalize(model: Any, image: Tensor) -> Tensor:
    """Compute (pixels - mean) / std in one pass, in the precision of the tower's first layer."""
    device = image.device
    largest = 255.0 if image.dtype == torch.uint8 else 1.0
    preprocessing = read_preprocessing(model)
    factor, offset = pixel_affine(preprocessing.mean, preprocessing.std, largest, device)
    dtype = model.logit_scale.dtype
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    # On a GPU, convolutions run faster on channels_last. On a CPU they do not, and oneDNN 3.12 corrupts memory in the
    # backward of some 1x1 convolutions of such images, for example in MobileCLIP (oneDNN issue 6035).
    is_cpu = device.type == "cpu"
    layout = torch.contiguous_format if is_cpu else torch.channels_last
    out = torch.empty(image.shape, dtype=dtype, device=device, memory_format=layout)
    # addcmul computes in fp32, no matter what dtypes the input and output have.
    return torch.addcmul(offset, image, factor, out=out)


@lru_cache
def pixel_affine(
    mean: tuple[float, ...], std: tuple[float, ...], largest: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return 1 / (largest x std) and -mean / std, [1, 3, 1, 1] fp32.

    These tensors are not buffers of the model, because an engine with 16-bit weights would round them.
    """
    factor = torch.tensor([1 / (largest * s) for s in std], device=device)
    offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
    return factor.view(1, -1, 1, 1), offset.view(1, -1, 1, 1)


def unit_rows(x: Tensor) -> Tensor:
    """Return x / |x| in fp32, also under autocast: 16-bit unit rows would make the loss inexact."""
    return F.normalize(x.float(), dim=-1)


def trained_sides(model: Any) -> dict[str, bool]:
    """Return whether the features of each side, "image" and "text", have a gradient."""
    # A parameter that both towers share has a name in each of them.
    parameters = model.named_parameters(remove_duplicate=False)
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    image = any(name.startswith("visual.") for name in trained)
    # In open_clip's CLIP, the parameters of the text tower are direct parameters of the model.
    text = any(not name.startswith("visual.") and name not in SCALES for name in trained)
    return {"image": image, "text": image if model.two_views else text}


def read_preprocessing(model: nn.Module) -> PreprocessCfg:
    """Return the model's preprocessing in open_clip's format: size (H, W), normalization and resizing."""
    cfg = PreprocessCfg(**open_clip.get_model_preprocess_cfg(model))
    return replace(cfg, size=cfg.input_size[1:], mean=tuple(cfg.mean), std=tuple(cfg.std))


def read_architecture(settings: ModelSettings) -> dict[str, Any]:
    """Return open_clip's config of the model, with the image size and activation replaced by those in the settings.

    For a custom model, return the name of the user's function and its options.
    """
    if settings.factory:
        load_custom(settings.factory, settings.options)
        return {"factory": settings.factory, "options": settings.options}
    name = register_config(settings.name)
    config = open_clip.get_model_config(name)
    if settings.image_size is not None:
        config["vision_cfg"]["image_size"] = settings.image_size
    quick_gelu = choose_quick_gelu(name, settings)
    if quick_gelu != config.get("quick_gelu", False):
        config["quick_gelu"] = quick_gelu
    return config


def read_text_size(model: Any) -> tuple[int, int]:
    """Return the context length and the vocabulary size."""
    if isinstance(model, TwoTowers):
        return model.context_length, model.vocab_size
    text = getattr(model, "text", model)
    # Hugging Face towers have the vocabulary size in their config.
    owner = text if hasattr(text, "vocab_size") else text.config
    return text.context_length, owner.vocab_size


def build_tokenizer(settings: ModelSettings, model: nn.Module) -> Any:
    """Build the tokenizer of this model, which turns a list of n strings into [n, L] int64.

    Raises:
        ValueError: If the tokenizer cannot be loaded, or has tokens for which the model has no embedding.
    """
    if isinstance(model, TwoTowers):
        return model.tokenizer
    name = register_config(settings.name)
    with explain_errors(
        f"model {settings.name}: its tokenizer could not be loaded; to use a local one, set "
        "text_cfg.hf_tokenizer_name in a model config (.json) to a folder written by save_pretrained"
    ):
        tokenizer = open_clip.get_tokenizer(name)
    _, vocab_size = read_text_size(model)
    if getattr(tokenizer, "vocab_size", 0) > vocab_size:
        raise ValueError(
            f"model {settings.name}: text_cfg.vocab_size {vocab_size} is smaller than the number of "
            f"tokens of the tokenizer, {tokenizer.vocab_size}; increase text_cfg.vocab_size, or choose "
            "another tokenizer"
        )
    if problem := _find_token_mismatch(getattr(model, "text", model), tokenizer):
        raise ValueError(f"model {settings.name}: {problem}")
    return FastTokenizer(tokenizer) if type(tokenizer) is SimpleTokenizer else tokenizer


def _find_token_mismatch(text: Any, tokenizer: Any) -> str | None:
    """Return why the text tower does not fit the tokenizer's end token or padding; None if it fits."""
    padding = tokenizer.tokenizer.pad_token_id if hasattr(tokenizer, "tokenizer") else 0
    masked = text.config.pad_token_id if hasattr(text, "config") else None
    if getattr(text, "cls_emb", None) is not None:
        masked = text.pad_id
    if masked not in (None, padding):
        return (
            f"the tokenizer pads with token {padding}, but the text tower masks token {masked} as padding, so it would "
            "attend to padding and mask a word; choose the tokenizer of the text tower, or set its padding to token "
            f"{masked}"
        )
    pooling, _ = read_pooling(text)
    if pooling not in ("argmax", "eos"):
        return None
    tokens = tokenizer(["a", "a cat"])
    positions = find_ends(text, tokens)
    short, long = tokens[[0, 1], positions].tolist()
    # The end token is the same in every text, but its position is not.
    if short == long and positions[0] != positions[1]:
        return None
    return (
        f"text_cfg.pool_type {pooling!r} takes the features of a text at a token that does not end it: token {short} "
        f"of {tokens[0].tolist()}, and token {long} of {tokens[1].tolist()}. Set text_cfg.pool_type to 'eos' and "
        "text_cfg.eos_id to the tokenizer's end token; or set text_cfg.pool_type to 'last', which needs a tokenizer "
        "that fills every text up to text_cfg.context_length"
    )


def register_config(name: str) -> str:
    """Return the model's name in open_clip. If `name` is a config file or a folder, register its model first.

    Raises:
        ValueError: If the name is neither a model of open_clip or disco_ds nor an existing file or folder, or if the
            file is malformed.
    """
    if (Path(name) / CONFIG).is_file():
        # Do not use the folder's name: if a name contains "siglip", open_clip chooses another tokenizer.
        return register_architecture("folder", read_folder(Path(name))["model_cfg"])
    bundled = PACKAGE / "assets" / "models"
    path = Path(name) if name.endswith(".json") else bundled / f"{name}.json"
    if path.is_file():
        with explain_errors(f"model.name: {name} is not valid JSON"):
            architecture = json.loads(path.read_bytes())
        # Under its own name, the file could replace a model of open_clip.
        return register_architecture(name, architecture)
    known = open_clip.list_models()
    if name not in known:
        ours = sorted(item.stem for item in bundled.glob("*.json"))
        hint = did_you_mean(name, [*known, *ours])
        raise ValueError(
            f"unknown model {name!r}{hint}; expected a model of open_clip or disco_ds "
            f"({', '.join(ours)}), an existing .json file, or a folder with {CONFIG}"
        )
    return name


def register_architecture(name: str, architecture: dict[str, Any]) -> str:
    """Register an architecture with open_clip under a new name, and return that name.

    The new name is the last part of the path `name`, without its suffix, followed by a digest of the architecture.
    """
    text = json.dumps(architecture)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{Path(name).stem}-{digest}.json"
        path.write_text(text, encoding="utf-8")
        add_model_config(path)
    return path.stem


def _lock(model: Any, settings: ModelSettings, learns_scale: bool) -> None:
    with explain_errors(
        f"model.unlocked_layers={settings.unlocked_layers}: {settings.name} cannot be locked in this way"
    ):
        if settings.lock_image:
            # open_clip 4 cannot lock a tower whose layers it does not know, even as a whole.
            if settings.unlocked_layers:
                model.lock_image_tower(unlocked_groups=settings.unlocked_layers)
            else:
                model.visual.requires_grad_(False)
            model.visual = freeze_statistics(model.visual)
        if settings.lock_text or settings.two_views:
            if settings.unlocked_layers or not hasattr(model, "text"):
                model.lock_text_tower(settings.unlocked_layers)
            else:
                # open_clip would leave the projection of a Hugging Face tower trained.
                model.text.requires_grad_(False)
    model.logit_scale.requires_grad_(learns_scale)


def _warn_of_batch_norm(model: nn.Module) -> None:
    norm = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in model.named_modules() if isinstance(module, norm)]
    if names:
        logger.warning(
            "%s and the other BatchNorm layers (%d in total) use the statistics of a micro-batch, so the gradient "
            "depends on how the global batch is split; with GroupNorm or LayerNorm it does not",
            names[0],
            len(names),
        )
