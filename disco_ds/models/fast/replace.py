"""Replace parts of a model by faster ones that have the same parameters, and compile its towers block by block.

A residual block is compiled once, and all blocks of a tower share the code, so compiling takes seconds. Activation
checkpointing wraps the compiled blocks. Before it repeats the forward of a block, it therefore restores the states of
the random number generators, as it does for eager blocks.
"""

from collections.abc import Iterator
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

from disco_ds.models.fast.attention import MAX_ROWS, Attention, Block, Patches, has_fast_kernel
from disco_ds.models.fast.texts import CutText, PackedText, find_counter, is_causal, packs
from disco_ds.models.two_towers import TwoTowers

Module = TypeVar("Module", bound=nn.Module)
OPTIONS = {"fallback_random": True}
"""Options for torch.compile: draw random numbers from torch's generators.

Activation checkpointing and GradAccum (training/grad_accum.py) restore the states of these generators.

Without this option, dropout in compiled kernels may also be wrong on CUDA since torch 2.13 (pytorch issue 198333).
"""


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
                child.attn = _adopt(Attention, child.attn)
                child.attn.causal = child in causal
                replaced[child] = _adopt(Block, child)
                setattr(parent, name, replaced[child])
            elif name in ("conv1", "proj") and _is_patch_embedding(child):
                setattr(parent, name, _adopt(Patches, child))
    if isinstance(model, TwoTowers) and type(model).encode_text is not TwoTowers.encode_text:
        return  # a custom encode_text may use the text tower in another way
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
    phrases = []
    if find_counter(model, device, is_half):
        is_cut = isinstance(getattr(model, "text", model), CutText)
        phrases.append("texts cut to the longest one" if is_cut else "packed texts")
    if any(isinstance(module, Block) for module in model.visual.modules()):
        num_tokens = len(getattr(model.visual, "positional_embedding", ()))
        triton = is_half and has_fast_kernel(device) and 0 < num_tokens <= MAX_ROWS
        phrases.append(f"image attention by {'Triton' if triton else 'torch'}")
    return phrases


def _adopt(cls: type[Module], module: nn.Module) -> Module:
    """Return a module of class `cls` that has the parameters, children and attributes of `module`."""
    adopted = cls.__new__(cls)
    vars(adopted).update(vars(module))
    return adopted


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


def compile_towers(model: Any, checkpointing: bool) -> list[str]:
    """Apply torch.compile to both towers in place. The names of parameters do not change.

    Args:
        model: The model, before an engine wraps it.
        checkpointing: Whether activation checkpointing is on. If it is, a tower without known blocks is not compiled,
            because checkpointing inside compiled code may repeat a forward with different random numbers (pytorch issue
            192635).

    Returns:
        For each tower that was not compiled, the reason.
    """
    towers = {"image": model.visual}
    text = getattr(model, "text", model)
    towers["text"] = text if hasattr(model, "tokenizer") else getattr(text, "transformer", text)
    reasons = []
    for side, tower in towers.items():
        blocks = list(_find_blocks(tower))
        for block in blocks:
            # Packed texts have a different number of tokens in every batch.
            block.compile(options=OPTIONS, dynamic=True if side == "text" else None)
        if not blocks and checkpointing:
            reasons.append(
                f"{side} tower: its blocks are unknown, and activation checkpointing inside compiled code is not safe"
            )
        elif not blocks:
            tower.compile(options=OPTIONS)
    return reasons


def is_compiled(model: Any) -> bool:
    """Return whether a part of the model is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _find_blocks(tower: Any) -> Iterator[nn.Module]:
    """Yield the residual blocks of a tower: those of this package, or those of a transformer from timm."""
    trunk: Any = getattr(tower, "trunk", None)
    if isinstance(getattr(trunk, "blocks", None), nn.Sequential | nn.ModuleList):
        yield from trunk.blocks
    else:
        yield from (module for module in tower.modules() if isinstance(module, Block))
