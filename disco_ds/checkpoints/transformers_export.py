"""Conversion of open_clip models to the CLIPModel and SiglipModel of transformers.

Two families can be converted: CLIP with open_clip's vision and text transformers, and SigLIP with timm's vision
transformer. Every conversion is checked: if the two models compute different features for a random batch, the model is
refused. This check also catches architectures that the code below does not handle.
"""

from __future__ import annotations

import copy
import importlib
import logging
import re
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer, get_clean_fn
from open_clip.transformer import QuickGELU
from PIL import Image
from timm.layers.activations import GELUTanh
from torch import Tensor, nn

from disco_ds.models.clip import read_preprocessing, unit_rows

logger = logging.getLogger(__name__)
_TOLERANCE = 1e-5
"""Maximum difference between the features of the original and the converted model, relative to the largest feature."""
_USER_TOLERANCE = 1e-4
"""Maximum difference between unit features when transformers prepares the inputs."""
_PIPELINE_TOLERANCE = 1e-3
"""Maximum difference between the scores of transformers' zero-shot pipeline and those of the original model."""
_PIPELINE_LENGTH = 64
"""Number of tokens to which transformers' zero-shot pipeline pads texts for SigLIP."""
_TEXTS = ["a photo of a cat", "Two_Dogs:  it's (3) o'clock!"]
"""Sample texts, of different lengths."""
_LABELS = ["cat", "two dogs"]
"""Sample labels. They are short, because transformers' pipeline does not truncate texts for CLIP."""
_NAMES = (
    (r"^visual\.(trunk\.)?", "vision_model."),
    (r"^(text\.)?(?=transformer|token_emb|positional_emb|ln_final|text_proj)", "text_model."),
    (r"\.(transformer\.res)?blocks\.", ".encoder.layers."),
    (r"\.attn\.(in_proj_|qkv\.)", ".self_attn.qkv_proj."),
    (r"\.attn\.(out_)?proj\.", ".self_attn.out_proj."),
    (r"\.(ln_|norm)([12])\.", r".layer_norm\2."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
    (r"\.attn_pool\.latent$", ".head.probe"),
    (r"\.attn_pool\.(q|kv)\.", ".head.attention.in_proj_"),
    (r"\.attn_pool\.proj\.", ".head.attention.out_proj."),
    (r"\.attn_pool\.norm\.", ".head.layernorm."),
    (r"\.attn_pool\.mlp\.", ".head.mlp."),
    (r"\.(conv1|patch_embed\.proj)\.", ".embeddings.patch_embedding."),
    (r"\.(positional_embedding|pos_embed)$", ".embeddings.position_embedding.weight"),
    (r"\.(class_embedding$|token_embedding\.)", r".embeddings.\1"),
    (r"\.ln_pre\.", ".pre_layrnorm."),
    (r"\.(ln_post|norm)\.", ".post_layernorm."),
    (r"\.ln_final\.", ".final_layer_norm."),
    (r"^vision_model\.proj$", "visual_projection.weight"),
    (r"^text_model\.text_projection$", "text_projection.weight"),
    (r"^text_model\.text_projection\.", "text_model.head."),
)
"""Replacements that turn open_clip's and timm's tensor names into transformers' names: (pattern, replacement).

They are applied in order."""


def convert(model: Any, name: str) -> Any:
    """Convert a model to the transformers model that has the same outputs.

    Args:
        model: A model that open_clip built, in fp32 on the CPU.
        name: Name of the model for error messages.

    Raises:
        ValueError: If transformers has no equivalent architecture, or is not installed.
    """
    transformers = _import_transformers()
    text = getattr(model, "text", model)
    trunk = getattr(model.visual, "trunk", None)
    build = _build_clip if trunk is None else _build_siglip
    try:
        converted = build(transformers, model, text)
        _load(converted, model)
        difference = _compare(model.eval(), text, converted.eval())
        if difference > _TOLERANCE:
            raise RuntimeError(f"the converted model's features differ by {difference:.1g}")
    except (RuntimeError, AttributeError, IndexError) as error:
        towers = f"{type(trunk or model.visual).__name__} and {type(text).__name__}"
        raise ValueError(
            f"model {name} ({towers}) has parts that transformers' CLIPModel and SiglipModel lack: {error}"
        ) from None
    return converted


def write_processor(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write the image processor and the tokenizer.

    Raises:
        ValueError: If transformers has no equivalent image processing or tokenizer.
    """
    transformers = _import_transformers()
    look = read_preprocessing(model)
    height, width = look.size
    common = {
        "image_mean": list(look.mean),
        "image_std": list(look.std),
        "resample": Image.Resampling[look.interpolation.upper()].value,
    }
    if look.resize_mode == "longest":
        raise ValueError(
            "transformers cannot resize images by their longest side: choose another format"
        )
    size = {"height": height, "width": width}
    if look.resize_mode == "squash":
        images: Any = transformers.SiglipImageProcessor(size=size, **common)
    else:
        images = transformers.CLIPImageProcessor(
            size={"shortest_edge": min(look.size)}, crop_size=size, **common
        )
    images.save_pretrained(folder)
    _convert_tokenizer(transformers, tokenizer).save_pretrained(folder)


@torch.no_grad()
def check_as_user(converted: Any, model: Any, tokenizer: Any) -> None:
    """Check that features and scores stay the same if transformers prepares the images and texts.

    The image processor, the tokenizer and the pipeline are called as a user would call them, and all of their outputs
    are passed to the model.

    Args:
        converted: What `convert` returned, in fp32.
        model: The model from which it was converted.
        tokenizer: Tokenizer of `model`.

    Raises:
        ValueError: If the features or the scores differ, or if transformers has no equivalent image processing or
            tokenizer.
    """
    transformers = _import_transformers()
    with tempfile.TemporaryDirectory() as folder:
        write_processor(Path(folder), model, tokenizer)
        images = transformers.AutoImageProcessor.from_pretrained(folder)
        texts = transformers.AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    size = (3, *read_preprocessing(model).size)
    pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image, text, scale, bias = model(image=pixels[None], text=tokenizer(_TEXTS))
    tokens = texts(_TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    prepared = images(picture, return_tensors="pt")
    for what, ours, theirs in (
        ("pictures", image, converted.get_image_features(**prepared)),
        ("texts", text, converted.get_text_features(**tokens)),
    ):
        difference = (unit_rows(getattr(theirs, "pooler_output", theirs)) - ours).abs().max().item()
        if difference > _USER_TOLERANCE:
            raise ValueError(
                f"transformers cannot prepare {what} as open_clip does for this model, for example because it splits, "
                f"cleans or pads them differently: features differ by {difference:.1g}; choose another format"
            )
    logits = (scale * image @ model(text=tokenizer(_LABELS))[1].T)[0]
    scores = logits.softmax(dim=0)
    if hasattr(converted, "logit_bias"):
        scores = (logits + (0 if bias is None else bias)).sigmoid()
        if tokens["input_ids"].shape[1] != _PIPELINE_LENGTH:
            logger.warning(
                "transformers' zero-shot pipeline pads texts for SigLIP to %d tokens, but this model needs %d, so use "
                "the exported model without the pipeline",
                _PIPELINE_LENGTH,
                tokens["input_ids"].shape[1],
            )
            return
    pipeline = transformers.pipeline(
        "zero-shot-image-classification",
        model=converted,
        tokenizer=texts,
        image_processor=images,
        device="cpu",
    )
    found = pipeline(picture, candidate_labels=_LABELS, hypothesis_template="{}")
    score_of = {item["label"]: item["score"] for item in found}
    difference = (torch.tensor([score_of[label] for label in _LABELS]) - scores).abs().max().item()
    if difference > _PIPELINE_TOLERANCE:
        raise ValueError(
            f"the scores of transformers' zero-shot pipeline differ by {difference:.1g}; choose another format"
        )


def _convert_tokenizer(transformers: Any, tokenizer: Any) -> Any:
    if isinstance(tokenizer, HFTokenizer):
        converted = copy.deepcopy(tokenizer.tokenizer)
        # Return no attention mask, as in open_clip, because SigLIP attends to padding.
        converted.model_input_names = ["input_ids"]
        if tokenizer.clean_fn is get_clean_fn("canonicalize"):
            converted = _canonicalize(transformers, converted)
    elif isinstance(tokenizer, SimpleTokenizer):
        words = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
        vocabulary = {
            words.get(token, token): number for token, number in tokenizer.encoder.items()
        }
        merges = sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.__getitem__)
        converted = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges)
    else:
        raise ValueError(f"transformers has no tokenizer like {type(tokenizer).__name__}")
    converted.model_max_length = tokenizer.context_length
    return converted


def _canonicalize(transformers: Any, tokenizer: Any) -> Any:
    """Return a tokenizer that also cleans texts as open_clip does for SigLIP: lowercase, without punctuation."""
    tokenizers = importlib.import_module("tokenizers")  # transformers requires it
    normalizers = tokenizers.normalizers
    backend = tokenizer.backend_tokenizer
    steps = [
        normalizers.Replace("_", " "),
        normalizers.Replace(tokenizers.Regex(f"[{re.escape(string.punctuation)}]"), ""),
        normalizers.Lowercase(),
        normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    if backend.normalizer:
        steps.append(backend.normalizer)
    backend.normalizer = normalizers.Sequence(steps)
    # Use the generic class. Others, such as T5Tokenizer, replace the normalizer when they are loaded.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=tokenizer.model_input_names,
        padding_side=tokenizer.padding_side,
        **tokenizer.special_tokens_map,
    )


def _import_transformers() -> Any:
    """Import transformers, an optional dependency that only this export needs.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"--format transformers: {error}; pip install 'disco_ds[transformers]'"
        ) from None


def _build_clip(transformers: Any, model: Any, text: Any) -> Any:
    visual = model.visual
    last = text.vocab_size - 1
    config = transformers.CLIPConfig(
        vision_config=_describe_vision(model, visual.transformer.resblocks, visual.ln_post),
        text_config=_describe_text(text)
        | {"eos_token_id": last, "bos_token_id": last - 1, "pad_token_id": last},
        projection_dim=visual.proj.shape[1],
    )
    return transformers.CLIPModel(config)


def _build_siglip(transformers: Any, model: Any, text: Any) -> Any:
    trunk = model.visual.trunk
    width = {"projection_size": text.text_projection.out_features}
    config = transformers.SiglipConfig(
        vision_config=_describe_vision(model, trunk.blocks, trunk.norm),
        text_config=_describe_text(text) | width,
    )
    return transformers.SiglipModel(config)


def _describe_vision(model: Any, blocks: Any, norm: Any) -> dict[str, Any]:
    convolutions = [part for part in model.visual.modules() if isinstance(part, nn.Conv2d)]
    return _describe(blocks, norm) | {
        "image_size": read_preprocessing(model).size[0],
        "patch_size": convolutions[0].kernel_size[0],
    }


def _describe_text(text: Any) -> dict[str, Any]:
    return _describe(text.transformer.resblocks, text.ln_final) | {
        "vocab_size": text.vocab_size,
        "max_position_embeddings": len(text.positional_embedding),
    }


def _describe(blocks: Any, norm: Any) -> dict[str, Any]:
    """Derive the settings of an open_clip or timm transformer from its blocks and final norm."""
    mlp = blocks[0].mlp
    first, activation = (mlp.c_fc, mlp.gelu) if hasattr(mlp, "c_fc") else (mlp.fc1, mlp.act)
    return {
        "hidden_size": first.in_features,
        "intermediate_size": first.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": blocks[0].attn.num_heads,
        "layer_norm_eps": norm.eps,
        "hidden_act": _name_activation(activation),
    }


def _name_activation(activation: nn.Module) -> str:
    if isinstance(activation, GELUTanh) or getattr(activation, "approximate", "") == "tanh":
        return "gelu_pytorch_tanh"
    # With any other activation, the features differ, so `convert` refuses the model.
    return "quick_gelu" if isinstance(activation, QuickGELU) else "gelu"


def _load(converted: Any, model: Any) -> None:
    """Copy the tensors of `model` into `converted`.

    Raises:
        RuntimeError: If either model has tensors that the other lacks, or shapes differ.
    """
    tensors = _rename(model.state_dict())
    # CLIPModel cannot store a bias, so drop it. SiglipModel needs a bias, so use 0 if the model has none.
    # Neither changes the ranking of the scores.
    bias = tensors.pop("logit_bias", torch.zeros(1))
    if hasattr(converted, "logit_bias"):
        tensors["logit_bias"] = bias
    converted.load_state_dict(tensors)


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their names and shapes in transformers."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        if at := re.fullmatch(r"(.*\.self_attn\.)qkv_proj(.*)", name):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{at[1]}{letter}_proj{at[2]}"] = part
        elif name.endswith("position_embedding.weight"):
            renamed[name] = tensor.reshape(-1, tensor.shape[-1])
        elif name in ("visual_projection.weight", "text_projection.weight"):
            renamed[name] = tensor.T
        elif name in renamed:  # attention pooling: append the kv projection to the q projection
            renamed[name] = torch.cat([renamed[name], tensor])
        else:
            renamed[name] = tensor
    return renamed


@torch.no_grad()
def _compare(model: Any, text: Any, converted: Any) -> float:
    """Return the largest difference between the models' features of random inputs, relative to the largest feature."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, *read_preprocessing(model).size, generator=generator)
    length = len(text.positional_embedding)
    tokens = torch.randint(1, text.vocab_size - 1, (2, length), generator=generator)
    tokens[:, -1] = text.vocab_size - 1
    worst = 0.0
    for ours, theirs in (
        (model.encode_image(images), converted.get_image_features(pixel_values=images)),
        (model.encode_text(tokens), converted.get_text_features(input_ids=tokens)),
    ):
        theirs = getattr(theirs, "pooler_output", theirs)
        difference = (ours - theirs).abs().max() / ours.abs().max()
        worst = max(worst, difference.item())
    return worst
