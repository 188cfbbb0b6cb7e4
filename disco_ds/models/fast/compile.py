"""Compile the towers of a model, block by block if their blocks are known.

A residual block is compiled once, and all blocks of a tower share the code, so compiling takes seconds. Activation
checkpointing wraps the compiled blocks. Before it repeats the forward of a block, it therefore restores the states of
the random number generators, as it does for eager blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from disco_ds.models.fast.blocks import Block

OPTIONS = {"fallback_random": True}
"""Options for torch.compile: draw random numbers from torch's generators.

Activation checkpointing and GradAccum (training/grad_accum.py) restore the states of these generators.

Without this option, dropout in compiled kernels may also be wrong on CUDA since torch 2.13 (pytorch issue 198333).
"""


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
    """Yield the residual blocks of a tower: those of this package (blocks.py), or those of a transformer from timm."""
    trunk: Any = getattr(tower, "trunk", None)
    if isinstance(getattr(trunk, "blocks", None), nn.Sequential | nn.ModuleList):
        yield from trunk.blocks
    else:
        yield from (module for module in tower.modules() if isinstance(module, Block))
