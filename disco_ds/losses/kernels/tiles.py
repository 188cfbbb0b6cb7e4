"""Cut a block of similarities into tiles, and multiply tiles at the chosen precision."""

# n rows, m columns, D width; a tile is a part of the n x m block

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
Impl = Literal["auto", "torch", "triton"]
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FULL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Tiling:
    """How similarities are computed. It affects results through rounding only.

    Args:
        tile: Rows and columns of a tile. None: 2048 x 2048 on a CPU. On a GPU 16384 x 16384 if the
            tile is not written to memory, which is enough work to hide the launches, else 128 MiB.
        precision: Precision of the factors of every product; sums are fp32. "auto" is fp32 on a CPU
            and fp16 on a GPU: tf32 has no more mantissa bits, and unit rows are within the range of
            fp16. Float64 features are always multiplied in float64.
        impl: "torch" runs everywhere, "triton" on a GPU; "auto" is Triton if it runs.

    Raises:
        ValueError: For another value.
    """

    tile: Sequence[int] | None = None
    precision: Precision = "auto"
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        pair = isinstance(self.tile, list | tuple) and len(self.tile) == 2
        if self.tile is not None and not (
            pair and all(isinstance(n, int) and n > 0 for n in self.tile)
        ):
            raise ValueError(f"tile must be two positive integers, got {self.tile}")
        for name, known in (("precision", get_args(Precision)), ("impl", get_args(Impl))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    def on(self, device: torch.device) -> Tiling:
        """Return the same tiling with the precision that "auto" stands for on this device."""
        if self.precision != "auto":
            return self
        return replace(self, precision="fp16" if device.type == "cuda" else "fp32")

    def size(self, device: torch.device, written: bool = True) -> tuple[int, int]:
        """Return the rows and columns of a tile.

        Args:
            device: Where the tile is computed.
            written: The tile is written to memory.
        """
        if self.tile is not None:
            rows, columns = self.tile
            return rows, columns
        if device.type == "cpu":
            return 2048, 2048
        if not written:
            return 16384, 16384
        return (8192, 8192) if self.precision in _HALF else (4096, 8192)

    def cut(
        self, n: int, m: int, device: torch.device, written: bool = True
    ) -> Iterator[tuple[slice, slice]]:
        """Yield the row and column range of every tile of an n x m block."""
        rows, columns = self.size(device, written)
        for i in range(0, n, rows):
            for j in range(0, m, columns):
                yield slice(i, min(i + rows, n)), slice(j, min(j + columns, m))

    def gain(self) -> float:
        """Return the power of two by which the gradient's weights are multiplied.

        The weights are at most 2, and without it small ones would be denormal. On a CPU, products
        of denormal numbers take 200 times as long (AVX-512, MKL), and fp16 would underflow.
        """
        assert self.precision != "auto", "call Tiling.on(device) first, which decides the precision"
        return 2.0**14 if self.precision == "fp16" else 2.0**40

    def hold(self, x: Tensor) -> Tensor:
        """Round rows to `precision`, for keeping and sending them.

        The result is contiguous, has no gradient and is never wider than x.
        """
        x = x.detach()
        if x.dtype == torch.float64:
            return x.contiguous()
        if self.precision == "tf32" and x.dtype == torch.float32:
            # Round to 11 bits (Veltkamp's splitting): the tensor cores truncate, which would bias
            # every product.
            split = x * (2**13 + 1)
            return (split - (split - x)).contiguous()
        half = _HALF.get(self.precision)
        return (x if half is None else x.to(half)).contiguous()

    def factor(self, held: Tensor) -> Tensor:
        """Convert a tile of rows from `hold` to a factor of a product.

        On a CPU that is fp32, because 16-bit products would round their sums there.
        """
        return held.to(self.factor_dtype(held))

    def factor_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which rows like x are multiplied."""
        if x.dtype == torch.float64:
            return torch.float64
        return _HALF.get(self.precision, torch.float32) if x.is_cuda else torch.float32

    def round(self, x: Tensor) -> Tensor:
        """Round a tile in full precision, such as one of weights, to a factor of a product."""
        return self.factor(self.hold(x))

    def product(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Compute out = a @ b of two factors; out is fp32, or float64 for float64 factors."""
        with self._tf32(a):
            if a.dtype in _FULL:
                return torch.mm(a, b, out=out)
            return torch.mm(a, b, out_dtype=out.dtype, out=out)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Compute total += a @ b of two factors; total is fp32, or float64 for float64 factors."""
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
        # Not allow_tf32, which raises if it is read after a user has set fp32_precision.
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if self.precision == "tf32" else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


@dataclass(frozen=True)
class Tile:
    """One tile of a block, the argument of the functions in torch_tiles.py and triton_tiles.py."""

    r: Tensor
    """[n, D], as returned by Tiling.factor."""
    c: Tensor
    """[m, D], as returned by Tiling.factor."""
    pairs: int | None
    """Diagonal of the tile that contains the pairs, which are left out; None if it has no pairs."""
    tiling: Tiling
    out: Tensor | None
    """[n, m] memory for the tile: full precision in torch, factors in Triton, None for its sums."""


def full_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of products of rows like x accumulate."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def pairs_offset(rows: slice, columns: slice, first: int | None) -> int | None:
    """Return the diagonal of a tile that has the pairs (i, i + first) of its block, or None."""
    if first is None:
        return None
    offset = rows.start + first - columns.start
    return offset if rows.start - rows.stop < offset < columns.stop - columns.start else None
