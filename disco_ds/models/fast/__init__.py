"""Faster replacements for parts of open_clip's towers.

`replace_parts` (replace.py) puts them into a model that open_clip has built. The names and values of parameters stay
the same, and the model computes the same function up to rounding.

attention.py     self-attention
tile_kernels.py  its Triton kernels
blocks.py        the residual block and the patch embedding
texts.py         text towers that do not compute padding
replace.py       replacing the parts of a model
compile.py       torch.compile, block by block
"""

from disco_ds.models.fast.compile import compile_towers, is_compiled
from disco_ds.models.fast.replace import describe_parts, replace_parts
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
