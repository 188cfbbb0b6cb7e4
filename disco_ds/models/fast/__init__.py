"""Faster replacements for parts of open_clip's towers.

`replace_parts` (replace.py) puts them into a model that open_clip has built. The names and values of parameters stay
the same, and the model computes the same function up to rounding.

attention.py     self-attention, the residual block and the patch embedding
tile_kernels.py  Triton kernels of self-attention
texts.py         text towers that do not compute padding
replace.py       replacing the parts of a model, and torch.compile, block by block
"""

from disco_ds.models.fast.replace import compile_towers, describe_parts, is_compiled, replace_parts
from disco_ds.models.fast.texts import (
    CountTokens,
    CutText,
    PackedText,
    encode_packed,
    find_counter,
    packs,
    runs_packed,
)

__all__ = [
    "CountTokens",
    "CutText",
    "PackedText",
    "compile_towers",
    "describe_parts",
    "encode_packed",
    "find_counter",
    "is_compiled",
    "packs",
    "replace_parts",
    "runs_packed",
]
