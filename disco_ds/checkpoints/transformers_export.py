"""Conversion of open_clip models to the CLIPModel and SiglipModel of transformers.

Two families can be converted: CLIP with open_clip's vision and text transformers, and SigLIP with timm's vision
transformer. Every conversion is checked: the features of a random batch must be equal, or the model is refused.
"""

from __future__ import annotations

import importlib
import re
import string
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer, get_clean_fn
from open_clip.transformer import QuickGELU, TextTransformer, VisionTransformer
from torch import Tensor, nn

from disco_ds.models.clip import read_preprocessing

_BPE_SIZE = 49_408
"""Vocabulary of open_clip's built-in tokenizer, whose last token ends every text."""
_TOLERANCE = 1e-5
_TEXTS = ["a photo of a cat", "Two_Dogs:  it's (3) o'clock!"]
"""Texts whose tokens are compared."""
_FILTERS = {"bilinear": 2, "bicubic": 3}
"""PIL's numbers of the interpolations."""


def convert(model: Any, name: str) -> Any:
    """Return the model of transformers that has equal outputs.

    Args:
        model: A model that open_clip built, in fp32 on the CPU.
        name: Its name in messages.

    Raises:
        ValueError: If transformers has no such architecture, or is not installed.
    """
    transformers = _import_transformers()
    text = model.text if isinstance(model, open_clip.CustomTextCLIP) else model
    trunk = getattr(model.visual, "trunk", None)
    if isinstance(model.visual, VisionTransformer) and isinstance(
        text, TextTransformer | open_clip.CLIP
    ):
        build = _build_clip
    elif type(trunk).__name__ == "VisionTransformer" and isinstance(text, TextTransformer):
        build = _build_siglip
    else:
        towers = f"{type(trunk or model.visual).__name__} and {type(text).__name__}"
        raise ValueError(
            f"model {name}: transformers has no model with the towers {towers}; only CLIP and SigLIP with vision "
            "transformers can be exported for it"
        )
    try:
        converted = build(transformers, model, text)
    except (RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(
            f"model {name} has parts that transformers' model lacks: {error}"
        ) from None
    converted.eval()
    if (difference := _compare(model.eval(), text, converted)) > _TOLERANCE:
        raise ValueError(
            f"model {name} has parts that transformers' model lacks: its features differ by {difference:.1g}"
        )
    return converted


def write_processor(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write the image processor and the tokenizer.

    Raises:
        ValueError: If transformers has no such image processing or tokenizer.
    """
    transformers = _import_transformers()
    look = read_preprocessing(model)
    height, width = look.size
    common = {
        "image_mean": list(look.mean),
        "image_std": list(look.std),
        "resample": _FILTERS[look.interpolation],
    }
    if look.resize_mode == "longest":
        raise ValueError(
            "transformers cannot resize images by their longest side: choose another format"
        )
    if look.resize_mode == "squash":
        images: Any = transformers.SiglipImageProcessor(
            size={"height": height, "width": width}, **common
        )
    else:
        crop = {"height": height, "width": width}
        images = transformers.CLIPImageProcessor(
            size={"shortest_edge": min(look.size)}, crop_size=crop, **common
        )
    images.save_pretrained(folder)
    _convert_tokenizer(transformers, tokenizer).save_pretrained(folder)
    read = transformers.AutoTokenizer.from_pretrained(folder)(
        _TEXTS,
        padding="max_length",
        truncation=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    # CLIP's models ignore the padding, which differs.
    differs = (read["input_ids"] != tokenizer(_TEXTS)) & read["attention_mask"].bool()
    if differs.any():
        raise ValueError(
            f"transformers has no tokenizer that splits {_TEXTS} like open_clip's: choose another format"
        )


def _convert_tokenizer(transformers: Any, tokenizer: Any) -> Any:
    if isinstance(tokenizer, HFTokenizer):
        converted = tokenizer.tokenizer
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
    """Return the tokenizer with open_clip's cleaning of texts for SigLIP: lowercase, without punctuation."""
    tokenizers = importlib.import_module("tokenizers")  # transformers needs it too
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
    # Other classes, such as T5Tokenizer, replace the normalizer when they are loaded.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side=tokenizer.padding_side,
        **tokenizer.special_tokens_map,
    )


def _import_transformers() -> Any:
    """Import transformers, which only this export needs.

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
    if text.vocab_size != _BPE_SIZE:
        raise KeyError(f"a vocabulary of {text.vocab_size} tokens")
    side = visual.conv1.kernel_size[0]
    vision_config = _describe(visual.transformer.resblocks, visual.ln_post) | {
        "image_size": _square(visual.image_size),
        "patch_size": side,
    }
    text_config = _describe(text.transformer.resblocks, text.ln_final) | {
        "vocab_size": text.vocab_size,
        "max_position_embeddings": len(text.positional_embedding),
        "eos_token_id": _BPE_SIZE - 1,
        "bos_token_id": _BPE_SIZE - 2,
        "pad_token_id": _BPE_SIZE - 1,
    }
    config = transformers.CLIPConfig(
        vision_config=vision_config,
        text_config=text_config,
        projection_dim=visual.proj.shape[1],
    )
    tensors = {
        "logit_scale": model.logit_scale.reshape(()),
        "visual_projection.weight": visual.proj.T,
        "text_projection.weight": text.text_projection.T,
        "vision_model.embeddings.class_embedding": visual.class_embedding,
        "vision_model.embeddings.patch_embedding.weight": visual.conv1.weight,
        "vision_model.embeddings.position_embedding.weight": visual.positional_embedding,
        **_rename(visual.ln_pre, "vision_model.pre_layrnorm"),
        **_rename(visual.ln_post, "vision_model.post_layernorm"),
        **_convert_blocks(visual.transformer.resblocks, "vision_model"),
        **_convert_text(text),
    }
    return _load(transformers.CLIPModel(config), tensors)


def _build_siglip(transformers: Any, model: Any, text: Any) -> Any:
    trunk = model.visual.trunk
    pool = trunk.attn_pool
    vision_config = _describe(trunk.blocks, trunk.norm) | {
        "image_size": _square(model.visual.image_size),
        "patch_size": trunk.patch_embed.proj.kernel_size[0],
    }
    text_config = _describe(text.transformer.resblocks, text.ln_final) | {
        "vocab_size": text.vocab_size,
        "max_position_embeddings": len(text.positional_embedding),
        "projection_size": text.text_projection.out_features,
    }
    config = transformers.SiglipConfig(vision_config=vision_config, text_config=text_config)
    bias = model.logit_bias
    tensors = {
        "logit_scale": model.logit_scale.reshape(1),
        # A loss without a bias leaves the ranking of the scores unchanged.
        "logit_bias": torch.zeros(1) if bias is None else bias.reshape(1),
        "vision_model.embeddings.position_embedding.weight": trunk.pos_embed[0],
        **_rename(trunk.patch_embed.proj, "vision_model.embeddings.patch_embedding"),
        **_rename(trunk.norm, "vision_model.post_layernorm"),
        **_convert_blocks(trunk.blocks, "vision_model"),
        "vision_model.head.probe": pool.latent,
        "vision_model.head.attention.in_proj_weight": torch.cat([pool.q.weight, pool.kv.weight]),
        "vision_model.head.attention.in_proj_bias": torch.cat([pool.q.bias, pool.kv.bias]),
        **_rename(pool.proj, "vision_model.head.attention.out_proj"),
        **_rename(pool.norm, "vision_model.head.layernorm"),
        **_rename(pool.mlp.fc1, "vision_model.head.mlp.fc1"),
        **_rename(pool.mlp.fc2, "vision_model.head.mlp.fc2"),
        **_rename(text.text_projection, "text_model.head"),
        **_convert_text(text),
    }
    return _load(transformers.SiglipModel(config), tensors)


def _convert_text(text: Any) -> dict[str, Tensor]:
    return {
        "text_model.embeddings.token_embedding.weight": text.token_embedding.weight,
        "text_model.embeddings.position_embedding.weight": text.positional_embedding,
        **_rename(text.ln_final, "text_model.final_layer_norm"),
        **_convert_blocks(text.transformer.resblocks, "text_model"),
    }


def _describe(blocks: Any, norm: Any) -> dict[str, Any]:
    """Return the settings of a transformer that its first block shows."""
    block = blocks[0]
    first, activation = _read_mlp(block)
    heads = block.attn.num_heads
    return {
        "hidden_size": first.in_features,
        "intermediate_size": first.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": heads,
        "layer_norm_eps": norm.eps,
        "hidden_act": _name_activation(activation),
    }


def _read_mlp(block: Any) -> tuple[nn.Linear, nn.Module]:
    """Return the first layer and the activation of a block's MLP, of open_clip or timm."""
    mlp = block.mlp
    return (mlp.c_fc, mlp.gelu) if hasattr(mlp, "c_fc") else (mlp.fc1, mlp.act)


def _name_activation(activation: nn.Module) -> str:
    if isinstance(activation, QuickGELU):
        return "quick_gelu"
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_pytorch_tanh"
    raise KeyError(f"the activation {type(activation).__name__}")


def _convert_blocks(blocks: Any, tower: str) -> dict[str, Tensor]:
    """Return the tensors of a transformer's blocks, of open_clip or timm, under their names in transformers."""
    tensors: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        at = f"{tower}.encoder.layers.{number}"
        is_timm = hasattr(block.attn, "qkv")
        attention = block.attn
        weight = attention.qkv.weight if is_timm else attention.in_proj_weight
        bias = attention.qkv.bias if is_timm else attention.in_proj_bias
        for letter, rows, values in zip("qkv", weight.chunk(3), bias.chunk(3), strict=True):
            tensors[f"{at}.self_attn.{letter}_proj.weight"] = rows
            tensors[f"{at}.self_attn.{letter}_proj.bias"] = values
        mlp = block.mlp
        parts = {
            "self_attn.out_proj": attention.proj if is_timm else attention.out_proj,
            "layer_norm1": block.norm1 if is_timm else block.ln_1,
            "layer_norm2": block.norm2 if is_timm else block.ln_2,
            "mlp.fc1": mlp.fc1 if is_timm else mlp.c_fc,
            "mlp.fc2": mlp.fc2 if is_timm else mlp.c_proj,
        }
        for name, part in parts.items():
            tensors |= _rename(part, f"{at}.{name}")
    return tensors


def _rename(part: nn.Module, name: str) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}


def _square(size: tuple[int, int] | int) -> int:
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise KeyError(f"images of {height} x {width} pixels")
    return height


def _load(converted: Any, tensors: dict[str, Tensor]) -> Any:
    # Copies, because safetensors refuses tensors that share memory.
    converted.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()})
    return converted


@torch.no_grad()
def _compare(model: Any, text: Any, converted: Any) -> float:
    """Return the largest difference of the features of random images and texts, relative to the largest feature."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, *read_preprocessing(model).size, generator=generator)
    length = len(text.positional_embedding)
    tokens = torch.randint(1, text.vocab_size - 1, (2, length), generator=generator)
    tokens[:, -1] = text.vocab_size - 1
    pairs = (
        (model.encode_image(images), converted.get_image_features(pixel_values=images)),
        (model.encode_text(tokens), converted.get_text_features(input_ids=tokens)),
    )
    differences = []
    for ours, theirs in pairs:
        theirs = getattr(theirs, "pooler_output", theirs)
        if ours.shape != theirs.shape:
            return float("inf")
        differences.append(((ours - theirs).abs().max() / ours.abs().max()).item())
    return max(differences)
