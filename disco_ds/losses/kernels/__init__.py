"""Sums and gradients of similarity matrices that are computed in tiles and never stored as a whole.

The only third-party packages that this folder imports are torch, Triton and packaging.
"""

from disco_ds.losses.kernels.availability import find_problem
from disco_ds.losses.kernels.sigmoid import SigmoidSums, SigmoidTarget, sigmoid_block
from disco_ds.losses.kernels.similarity import (
    Block,
    Groups,
    Sums,
    Weights,
    softmax_gradient,
    softmax_sums,
)
from disco_ds.losses.kernels.tiles import Impl, Precision, Tiling, full_dtype

__all__ = [
    "Block",
    "Groups",
    "Impl",
    "Precision",
    "SigmoidSums",
    "SigmoidTarget",
    "Sums",
    "Tiling",
    "Weights",
    "find_problem",
    "full_dtype",
    "sigmoid_block",
    "softmax_gradient",
    "softmax_sums",
]
