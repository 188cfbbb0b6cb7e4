"""Faster replacements for parts of open_clip's towers.

`replace_parts` (replace.py) puts them into a model that open_clip has built. The names and values of parameters stay
the same, and the model computes the same function up to rounding.

attention.py     self-attention, the residual block and the patch embedding
tile_kernels.py  Triton kernels of self-attention
texts.py         text towers that do not compute padding
replace.py       replacing the parts of a model, and torch.compile, block by block
"""
