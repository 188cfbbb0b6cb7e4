"""Cut a block of similarities into tiles, and multiply tiles at the chosen precision."""

# n rows, m columns, D width; a tile is a part of the n x m block

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
Impl = Literal["auto", "torch", "triton"]
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FULL = (torch.float32, torch.float64)
TILE_BYTES = 144 << 20
"""A tile that is written to a GPU's memory has at most as many elements as fit into this size at `precision`."""
PRODUCT_BLOCK = 128 * 256
"""Assumed number of gradient elements that one multiprocessor computes at a time in torch's matrix products."""
PLANNED_MULTIPROCESSORS = 132
"""Number of multiprocessors assumed on a machine without a GPU: that of an H100."""


@dataclass(frozen=True)
class Tiling:
    """How similarities are computed. These settings affect results only through rounding.

    Args:
        tile: Largest number of rows and columns of a tile. None selects a default. On a CPU, it is 2048 x 2048. On a
            GPU, a tile that is written to memory has at most as many elements as fit into 144 MiB at `precision`. A
            tile that a fused kernel never writes has at most 16384 rows and 2^28 elements, which is enough work to
            hide kernel launches.
        precision: Precision of the operands of every matrix multiplication; results accumulate in fp32. "auto" is
            fp32 on a CPU and fp16 on a GPU: fp16 has as many mantissa bits as tf32, and unit rows are within its
            range. Float64 features are always multiplied in float64.
        impl: "torch" runs everywhere. "triton" needs a GPU. "auto" selects Triton where its kernels run on the GPU,
            and torch otherwise.
    """

    tile: Sequence[int] | None = None
    precision: Precision = "auto"
    impl: Impl = "auto"

    def on(self, device: torch.device) -> Tiling:
        """Return this tiling, with the precision "auto" replaced by the device's default precision."""
        if self.precision != "auto":
            return self
        return replace(self, precision="fp16" if device.type == "cuda" else "fp32")

    def size(
        self, n: int, m: int, D: int, device: torch.device, written: bool = True
    ) -> tuple[int, int]:
        """Return the largest number of rows and columns of a tile.

        Args:
            n: Number of rows of the block.
            m: Number of columns of the block.
            D: Width of the rows.
            device: Where the tile is computed.
            written: True if the tile is written to memory.
        """
        if self.tile is not None:
            rows, columns = self.tile
        elif device.type == "cpu":
            rows, columns = 2048, 2048
        elif not written:
            rows = min(n, 16384)
            columns = 2**28 // rows
        else:
            elements = TILE_BYTES // (2 if self.precision in _HALF else 4)
            rows, columns = written_shape(n, D, elements, count_multiprocessors(device))
        return min(rows, n), min(columns, m)

    def underflow_scale(self) -> float:
        """Return the power of two by which the weights in a gradient are multiplied, so that none becomes too small.

        The weights are at most 2. Without this factor, small weights would be denormal numbers, whose multiplication
        takes 200 times as long on a CPU (AVX-512, MKL). In fp16, small weights would become zero.
        """
        assert self.precision != "auto", "call Tiling.on(device) first; it decides the precision"
        return 2.0**14 if self.precision == "fp16" else 2.0**40

    def quantize(self, x: Tensor) -> Tensor:
        """Round rows to `precision`. Float64 rows are not rounded.

        The result is contiguous and detached, and never has a wider dtype than x.
        """
        x = x.detach()
        if x.dtype == torch.float64:
            return x.contiguous()
        if self.precision == "tf32" and x.dtype == torch.float32:
            # Round to 11 significant bits (Veltkamp's splitting). Otherwise the tensor cores would truncate the
            # numbers, which would bias every result.
            split = x * (2**13 + 1)
            return (split - (split - x)).contiguous()
        half = _HALF.get(self.precision)
        return (x if half is None else x.to(half)).contiguous()

    def as_operand(self, quantized: Tensor) -> Tensor:
        """Convert rows, as returned by `quantize`, to the dtype in which they are multiplied.

        On a CPU, 16-bit rows become fp32, because 16-bit matrix multiplications on a CPU also round the sums.
        """
        return quantized.to(self.operand_dtype(quantized))

    def operand_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype to which `as_operand` converts rows that have the dtype and the device of x."""
        if x.dtype == torch.float64:
            return torch.float64
        return _HALF.get(self.precision, torch.float32) if x.is_cuda else torch.float32

    def quantize_tile(self, x: Tensor) -> Tensor:
        """Round a full-precision tile, for example of weights, for use in a matrix multiplication."""
        return self.as_operand(self.quantize(x))

    def product(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Compute out = a @ b for operands that `as_operand` returned. out is fp32, or float64 for float64 operands."""
        with self._tf32(a):
            if a.dtype in _FULL:
                return torch.mm(a, b, out=out)
            return torch.mm(a, b, out_dtype=out.dtype, out=out)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Compute total += a @ b for operands that `as_operand` returned.

        total is fp32, or float64 for float64 operands.
        """
        with self._tf32(a):
            if a.dtype in _FULL:
                total.addmm_(a, b)
            else:
                torch.addmm(total, a, b, out_dtype=total.dtype, out=total)

    @contextmanager
    def _tf32(self, x: Tensor) -> Iterator[None]:
        if not x.is_cuda or x.dtype != torch.float32:
            yield
            return
        # Do not use allow_tf32: reading it raises an error after a user has set fp32_precision.
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if self.precision == "tf32" else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


@dataclass(frozen=True)
class Tile:
    """One tile of a block, which the functions in torch_tiles.py and triton_tiles.py take as an argument."""

    r: Tensor
    """[n, D], the rows, as returned by Tiling.as_operand."""
    c: Tensor
    """[m, D], the columns, as returned by Tiling.as_operand."""
    pairs: int | None
    """Offset of the diagonal with the positive pairs, which are left out; None if the tile has no positive pairs."""
    tiling: Tiling
    out: Tensor | None
    """[n, m] memory for the tile: in full precision for torch, in the operand dtype for weights in Triton. It may be
    None for sums in Triton, which are computed without writing the tile."""
    groups: tuple[Tensor, Tensor] | None = None
    """Group numbers [n] of the rows and [m] of the columns. Entries with equal numbers are left out."""


def written_shape(n: int, D: int, elements: int, multiprocessors: int) -> tuple[int, int]:
    """Return the default number of rows and columns of a tile that is written to a GPU's memory.

    The tile and its transpose are each multiplied by a matrix of width D. A wave is the number of rows of the product
    that all multiprocessors compute at once. The sides of a tile are multiples of a wave, so that no multiprocessor is
    idle at the end of a product. If a block has few rows, its tiles have more columns.

    Args:
        n: Number of rows of the block.
        D: Width of the rows.
        elements: Largest number of elements of the tile.
        multiprocessors: Number of multiprocessors of the GPU.
    """
    side = math.isqrt(elements)
    wave = max(min(multiprocessors * PRODUCT_BLOCK // D, side) // 256, 1) * 256
    rows = min(n, side // wave * wave)
    return rows, elements // rows // wave * wave


@cache
def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of this GPU, or of an H100 if there is no GPU."""
    if not torch.cuda.is_available():
        return PLANNED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def full_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which inner products of rows like x accumulate: fp32, or float64 if x is float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def pairs_offset(rows: slice, columns: slice, diagonal: int) -> int | None:
    """Return the offset, as in torch.diagonal, of the diagonal of positive pairs (i, i + diagonal) within a tile.

    None if no pair is in the tile.
    """
    offset = rows.start + diagonal - columns.start
    return offset if rows.start - rows.stop < offset < columns.stop - columns.start else None
