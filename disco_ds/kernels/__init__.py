"""Sums over, and products with, matrices of similarities that are never held whole. Imports torch and Triton only."""

from disco_ds.kernels.sigmoid import SigmoidSums, sigmoid_block
from disco_ds.kernels.similarity import Sums, softmax_gradient, softmax_sums
from disco_ds.kernels.tiles import Impl, Precision, Tiling

__all__ = ["Impl", "Precision", "SigmoidSums", "Sums", "Tiling", "sigmoid_block", "softmax_gradient", "softmax_sums"]
