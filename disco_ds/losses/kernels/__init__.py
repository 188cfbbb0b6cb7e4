"""Sums and gradients of similarity matrices that are computed in tiles and never stored as a whole.

The only third-party packages that this folder imports are torch, Triton and packaging.
"""

from disco_ds.losses.kernels.similarity import (
    Block,
    Groups,
    SigmoidSums,
    SigmoidTarget,
    Sums,
    Weights,
    find_problem,
    sigmoid_block,
    softmax_gradient,
    softmax_sums,
)
from disco_ds.losses.kernels.tiles import Impl, Precision, TileSize, Tiling, full_dtype

__all__ = [
    "Block",
    "Groups",
    "Impl",
    "Precision",
    "SigmoidSums",
    "SigmoidTarget",
    "Sums",
    "TileSize",
    "Tiling",
    "Weights",
    "find_problem",
    "full_dtype",
    "sigmoid_block",
    "softmax_gradient",
    "softmax_sums",
]
