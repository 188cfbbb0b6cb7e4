"""Towers that cost what their arithmetic costs: faster equivalents of parts of open_clip's modules.

`replace_parts` puts them into a model that open_clip has built. Names and values of the parameters stay the same, and
so does the function, up to rounding. attention.py and tile_kernels.py have the attention, blocks.py the residual block
and the patch embedding, texts.py the text towers without padding, and compile.py compiles block by block.
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
