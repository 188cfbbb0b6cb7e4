"""Replace parts of a model that open_clip has built with faster ones that have the same parameters."""

from __future__ import annotations

from typing import Any, TypeVar

import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import Attention as OpenClipAttention
from open_clip.transformer import (
    CustomResidualAttentionBlock,
    ResidualAttentionBlock,
    TextTransformer,
)
from torch import nn

from disco_ds.models.fast.attention import MAX_ROWS, Attention, has_fast_kernel
from disco_ds.models.fast.blocks import Block, Patches
from disco_ds.models.fast.texts import (
    CutText,
    PackedText,
    can_pack,
    can_run_packed,
    is_causal,
    packs,
)

Module = TypeVar("Module", bound=nn.Module)


def replace_parts(model: Any) -> None:
    """Replace the blocks, the patch embedding and the text tower of a model with faster versions, if they exist.

    The function that the model computes, its parameters and their names stay the same. Modules without a faster version
    are not changed, such as attention with scaled cosines, head scales or dropout.

    Args:
        model: A model that open_clip has built, or a custom model.
    """
    text = getattr(model, "text", model)
    causal: set[nn.Module] = set()
    if isinstance(text, TextTransformer | open_clip.CLIP) and is_causal(text):
        causal = set(text.transformer.resblocks)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_known_block(child):
                is_in_causal_tower = child in causal
                child.attn = _adopt(Attention, child.attn)
                child.attn.causal = is_in_causal_tower
                setattr(parent, name, _adopt(Block, child))
            elif name in ("conv1", "proj") and _is_patch_embedding(child):
                setattr(parent, name, _adopt(Patches, child))
    if type(text) is TextTransformer and can_pack(text) and packs(text):
        model.text = _adopt(PackedText, text)
    elif type(text) is HFTextEncoder:
        model.text = _adopt(CutText, text)


def describe_parts(model: Any, device: torch.device, is_half: bool) -> list[str]:
    """Return phrases for the log that describe which parts of the model are replaced.

    Args:
        model: The model.
        device: The device that it will run on.
        is_half: Whether its matrix products are in 16 bits.
    """
    text = getattr(model, "text", model)
    found = []
    if packs(text) and not can_run_packed(text.attn_mask.shape[0], device, is_half):
        found.append("padded texts (no kernel for this GPU, precision and context length)")
    elif packs(text):
        found.append("packed texts")
    elif isinstance(text, CutText):
        found.append("texts cut to the longest one")
    elif not model.two_views:
        known = not hasattr(text, "transformer") or can_pack(text)
        reason = "unknown blocks" if known else "padding changes the features of this tower"
        found.append(f"padded texts ({reason})")
    kinds = {type(module) for module in model.visual.modules()}
    if Patches in kinds:
        found.append("matrix patches")
    if Block in kinds:
        num_tokens = len(getattr(model.visual, "positional_embedding", ()))
        triton = is_half and has_fast_kernel(device) and 0 < num_tokens <= MAX_ROWS
        found.append(f"image attention by {'Triton' if triton else 'torch'}")
    return found


def _adopt(kind: type[Module], module: nn.Module) -> Module:
    """Return a module of class `kind` that has the parameters, children and attributes of `module`."""
    found = kind.__new__(kind)
    vars(found).update(vars(module))
    return found


def _is_known_block(block: nn.Module) -> bool:
    if type(block) not in (ResidualAttentionBlock, CustomResidualAttentionBlock):
        return False
    attention: Any = block.attn
    if hasattr(block, "ln_1_kv") or attention.in_proj_weight is None:  # cross attention
        return False
    if isinstance(attention, nn.MultiheadAttention):
        plain = attention.batch_first and attention.bias_k is None and not attention.add_zero_attn
        return plain and attention.dropout == 0
    if type(attention) is not OpenClipAttention:
        return False
    norms = attention.ln_q, attention.ln_k, attention.ln_inner
    drops = attention.attn_drop.p or attention.out_drop.p
    scales = attention.logit_scale is not None or attention.head_scale is not None
    return all(type(norm) is nn.Identity for norm in norms) and not (drops or scales)


def _is_patch_embedding(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d or layer.groups > 1 or any(layer.padding):
        return False
    return layer.kernel_size == layer.stride and layer.dilation == (1, 1) and layer.in_channels == 3
