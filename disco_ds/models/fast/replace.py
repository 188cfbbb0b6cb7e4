"""Replace parts of a model that open_clip has built with faster ones that have the same parameters."""

from __future__ import annotations

from typing import Any, TypeVar

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
from disco_ds.models.fast.texts import CutText, PackedText, can_pack, fits_kernels, is_causal, packs
from disco_ds.models.two_towers import TwoTowers

Module = TypeVar("Module", bound=nn.Module)


def replace_parts(model: Any) -> None:
    """Replace the blocks, the patch embedding and the text tower of a model with faster versions, where these exist.

    The function that the model computes, its parameters and their names stay the same. Modules without a faster version
    are not changed. An example is attention with scaled cosines, head scales or dropout.

    Args:
        model: A model that open_clip has built, or a custom model.
    """
    text = getattr(model, "text", model)
    causal: set[nn.Module] = set(text.transformer.resblocks) if is_causal(text) else set()
    replaced: dict[nn.Module | None, nn.Module] = {}
    for parent in list(model.modules()):
        # A block may be shared: by several layers, or by both towers. named_children() would omit its second name.
        for name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, name, replaced[child])
            elif _is_known_block(child):
                is_in_causal_tower = child in causal
                child.attn = _adopt(Attention, child.attn)
                child.attn.causal = is_in_causal_tower
                replaced[child] = _adopt(Block, child)
                setattr(parent, name, replaced[child])
            elif name in ("conv1", "proj") and _is_patch_embedding(child):
                setattr(parent, name, _adopt(Patches, child))
    if _has_custom_encode_text(model):
        return
    if type(text) is TextTransformer and packs(packed := _adopt(PackedText, text)):
        model.text = packed
    elif type(text) is HFTextEncoder:
        model.text = _adopt(CutText, text)


def describe_parts(model: Any, device: torch.device, is_half: bool) -> list[str]:
    """Return phrases for the log that describe which parts of the model are replaced.

    Args:
        model: The model.
        device: The device that the model will run on.
        is_half: Whether the model computes with 16-bit values.
    """
    text = getattr(model, "text", model)
    found = []
    if model.two_views:
        pass  # the text tower does not run
    elif packs(text) and fits_kernels(text, text.context_length, device, is_half):
        found.append("packed texts")
    elif packs(text):
        limits = f"16-bit values, up to {MAX_ROWS} tokens and heads of up to {MAX_ROWS}"
        found.append(f"padded texts (packing on a GPU needs {limits})")
    elif isinstance(text, CutText):
        found.append("texts cut to the longest one")
    elif _has_custom_encode_text(model):
        found.append("padded texts (custom encode_text)")
    else:
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


def _has_custom_encode_text(model: Any) -> bool:
    """Return whether the model may use its text tower in another way than to pass tokens to it."""
    return isinstance(model, TwoTowers) and type(model).encode_text is not TwoTowers.encode_text


def _adopt(kind: type[Module], module: nn.Module) -> Module:
    """Return a module of class `kind` that has the parameters, children and attributes of `module`."""
    found = kind.__new__(kind)
    vars(found).update(vars(module))
    return found


def _is_known_block(block: Any) -> bool:
    if type(block) not in (ResidualAttentionBlock, CustomResidualAttentionBlock):
        return False
    attention = block.attn
    # Custom attention, also in a subclass, may compute another function.
    if type(attention) not in (nn.MultiheadAttention, OpenClipAttention):
        return False
    if hasattr(block, "ln_1_kv") or attention.in_proj_weight is None:  # cross attention
        return False
    if isinstance(attention, nn.MultiheadAttention):
        plain = attention.batch_first and attention.bias_k is None and not attention.add_zero_attn
        return plain and attention.dropout == 0
    norms = attention.ln_q, attention.ln_k, attention.ln_inner
    drops = attention.attn_drop.p or attention.out_drop.p
    scales = attention.logit_scale is not None or attention.head_scale is not None
    return all(type(norm) is nn.Identity for norm in norms) and not (drops or scales)


def _is_patch_embedding(layer: Any) -> bool:
    if type(layer) is not nn.Conv2d or layer.groups > 1 or any(layer.padding):
        return False
    return layer.kernel_size == layer.stride and layer.dilation == (1, 1) and layer.in_channels == 3
