"""Compile the towers of a model, block by block where they have blocks.

A residual block is compiled once, and all blocks of a tower share the code. Compiling a whole tower takes several times
as long and is not faster (docs/results.md). Activation checkpointing surrounds the compiled blocks, so it restores the
random generators for their second forward, as for eager blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from disco_ds.models.fast.blocks import Block

OPTIONS = {"fallback_random": True}
"""Draw random numbers from torch's generators, whose states GradAccum and activation checkpointing restore.

Since torch 2.13, dropout in a compiled kernel may also be wrong on CUDA (pytorch issue 198333).
"""


def compile_towers(model: Any, checkpointing: bool) -> list[str]:
    """Apply torch.compile to both towers in place. The names of parameters do not change.

    Args:
        model: The model, before an engine wraps it.
        checkpointing: Whether activation checkpointing is on. A tower without known blocks is then left as it is, since
            checkpointing inside of compiled code may repeat a forward with other random numbers (pytorch issue 192635).

    Returns:
        For each side, "image" and "text", whose tower was not compiled: a reason.
    """
    towers = {"image": model.visual}
    text = getattr(model, "text", model)
    towers["text"] = text if hasattr(model, "tokenizer") else getattr(text, "transformer", text)
    reasons = []
    for side, tower in towers.items():
        blocks = list(_find_blocks(tower))
        for block in blocks:
            # Packed texts have another number of tokens in every batch.
            block.compile(options=OPTIONS, dynamic=True if side == "text" else None)
        if not blocks and checkpointing:
            reasons.append(
                f"{side} tower: activation checkpointing inside of a tower without known blocks"
            )
        elif not blocks:
            tower.compile(options=OPTIONS)
    return reasons


def is_compiled(model: Any) -> bool:
    """Return whether a part of the model is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _find_blocks(tower: Any) -> Iterator[nn.Module]:
    """Yield the residual blocks of a tower: ours, or those of a transformer from timm."""
    trunk: Any = getattr(tower, "trunk", None)
    if isinstance(getattr(trunk, "blocks", None), nn.Sequential | nn.ModuleList):
        yield from trunk.blocks
    else:
        yield from (module for module in tower.modules() if isinstance(module, Block))
