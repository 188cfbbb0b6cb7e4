"""Sums and gradients of matrices of similarities that are never in memory as a whole.

This folder imports torch and Triton only.
"""

from disco_ds.losses.kernels.availability import find_problem
from disco_ds.losses.kernels.sigmoid import SigmoidSums, sigmoid_block
from disco_ds.losses.kernels.similarity import Block, Sums, softmax_gradient, softmax_sums
from disco_ds.losses.kernels.tiles import Impl, Precision, Tiling, full_dtype

__all__ = [
    "Block",
    "Impl",
    "Precision",
    "SigmoidSums",
    "Sums",
    "Tiling",
    "find_problem",
    "full_dtype",
    "sigmoid_block",
    "softmax_gradient",
    "softmax_sums",
]
