"""Compare results of the Triton kernels, and of torch at the same precision, with float64 results.

The checks cover single tiles, and blocks that are computed in several tiles. kernels.py runs them on a GPU. The tests
run them on a CPU under Triton's interpreter.
"""

# n rows, m columns, D width of a tile

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses.kernels import torch_tiles
from disco_ds.losses.kernels.similarity import Block, sigmoid_block, softmax_gradient, softmax_sums
from disco_ds.losses.kernels.tiles import Tiling, full_dtype
from tools.bench.slices import Record

SHIFT = 3.0
TINY = 2e-6
"""Triton's error may exceed twice torch's error by this much. fp32 sums of up to 1,152 products may differ by this much
if the products are added in another order."""
SUMS = "sums of rows", "sums of columns", "maxima of rows", "maxima of columns"
OnTile = Callable[..., dict[str, Tensor]]


class Tile(NamedTuple):
    n: int
    m: int
    D: int
    pairs: int | None
    """Row i and column i + pairs are a positive pair. None: the tile has no positive pairs."""
    layout: str = "contiguous"

    def __str__(self) -> str:
        where = "no pairs" if self.pairs is None else f"pairs from {self.pairs}"
        return f"{self.n} x {self.m} x {self.D}, {where}, {self.layout}"


class Check(NamedTuple):
    name: str
    triton: float
    torch: float

    @property
    def passes(self) -> bool:
        return self.triton <= 2 * self.torch + TINY


def features(n: int, D: int, device: str, seed: int, layout: str = "strided") -> Tensor:
    """Return random unit rows [n, D] in fp32.

    Args:
        n: Number of rows.
        D: Width of the rows.
        device: Device of the result.
        seed: Seed of the random numbers.
        layout: "contiguous"; "strided": memory filled with NaN lies between the rows; "transposed": the result is a
            view of a contiguous [D, n].
    """
    generator = torch.Generator().manual_seed(seed)
    rows = F.normalize(torch.randn(n, D, generator=generator), dim=1).to(device)
    if layout == "strided":
        return lay_out(rows, (2 * (D + 3), 1))
    return rows.T.contiguous().T if layout == "transposed" else rows


def lay_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Copy a tensor to memory with these strides. Memory between the elements is filled with NaN."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, strides, strict=True))
    return (
        torch.full((size,), math.nan, dtype=x.dtype, device=x.device)
        .as_strided(x.shape, strides)
        .copy_(x)
    )


def check_tiles(
    rows: Tensor, columns: Tensor, pairs: int | None, tiling: Tiling, on: OnTile | None = None
) -> Iterator[Check]:
    """Check every function of triton_tiles on a tile.

    Args:
        rows: [n, D], fp32. The functions get a copy that is rounded to the tiling's precision and has the same strides.
        columns: [m, D], fp32. The functions get such a copy too.
        pairs: Row i and column i + pairs are a positive pair. None: the tile has no positive pairs.
        tiling: The tiling.
        on: Function that computes the outputs, such as on_tile (the default) or sums_on_tile.
    """
    from disco_ds.losses.kernels import triton_tiles

    on = on or on_tile
    r, c = (lay_out(tiling.quantize_tile(x), x.stride()) for x in (rows, columns))
    true = on(torch_tiles, r.double(), c.double(), pairs, tiling)
    mine, theirs = (on(tiles, r, c, pairs, tiling) for tiles in (triton_tiles, torch_tiles))
    for name, value in true.items():
        yield Check(name, error(mine[name], value), error(theirs[name], value))


def on_tile(
    tiles: ModuleType,
    r: Tensor,
    c: Tensor,
    pairs: int | None,
    tiling: Tiling,
    grouped: bool = False,
) -> dict[str, Tensor]:
    """Run every function of a module on one tile.

    Args:
        tiles: triton_tiles or torch_tiles.
        r: [n, D], rows as Tiling.as_operand returns them.
        c: [m, D], columns as Tiling.as_operand returns them.
        pairs: Row i and column i + pairs are a positive pair. None: the tile has no positive pairs.
        tiling: The tiling.
        grouped: Whether some rows and columns belong to groups. The outputs then leave out the entries of a row and a
            column in the same group.

    Returns:
        Name of an output -> output.
    """
    dtype, (n, m), device = torch.promote_types(r.dtype, torch.float32), (len(r), len(c)), r.device
    out = poisoned(n, m, dtype if tiles is torch_tiles else tiling.operand_dtype(r), device)
    scale, bias = (torch.tensor([x], dtype=dtype, device=device) for x in (14.3, -10.0))
    shift = torch.tensor([SHIFT], dtype=torch.float64, device=device)
    a, beta = (
        torch.linspace(0.1, 1, k, dtype=dtype, device=device).mul_(tiling.underflow_scale() * 1e-6)
        for k in (n, m)
    )
    groups = sparse_groups(n, m, device) if grouped else None
    tile = torch_tiles.Tile(r, c, pairs, tiling, out, groups)
    found = dict(zip(SUMS, tiles.exp_sums(tile, scale, shift, True), strict=True))
    found |= sums_on_tile(tiles, r, c, pairs, tiling, grouped)
    found["weights"] = tiles.exp_weights(tile, scale, shift, a, beta).clone()
    row_scale, column_scale = many_scales(n, m, dtype, device)
    lifted = [
        900 - math.log(tiling.underflow_scale()) * torch.ones(k, dtype=dtype, device=device)
        for k in (n, m)
    ]
    moments = tuple(torch.zeros(k, dtype=torch.float64, device=device) for k in (n, m))
    found["log weights"] = tiles.log_weights(
        tile, row_scale, column_scale, *lifted, moments
    ).clone()
    found |= {"moments of rows": moments[0], "moments of columns": moments[1]}
    loss, weight, W, row_max, column_max = tiles.sigmoid_weights(tile, scale, bias, True)
    found |= {"sigmoid loss": loss, "sigmoid sum": weight, "sigmoid weights": W}
    return found | {"sigmoid maxima of rows": row_max, "sigmoid maxima of columns": column_max}


def sums_on_tile(
    tiles: ModuleType,
    r: Tensor,
    c: Tensor,
    pairs: int | None,
    tiling: Tiling,
    grouped: bool = False,
) -> dict[str, Tensor]:
    """Run the functions that compute sums and maxima but no weights. Arguments and result are like those of on_tile."""
    dtype, (n, m), device = torch.promote_types(r.dtype, torch.float32), (len(r), len(c)), r.device
    out = poisoned(n, m, dtype, device) if tiles is torch_tiles else None
    scale, shift = (torch.tensor([x], dtype=torch.float64, device=device) for x in (14.3, SHIFT))
    groups = sparse_groups(n, m, device) if grouped else None
    tile = torch_tiles.Tile(r, c, pairs, tiling, out, groups)
    sums = tiles.exp_sums(tile, scale.to(dtype), shift, False)
    found = {"sums of rows alone": sums[0], "sums of columns alone": sums[1]}
    logs = tiles.log_sums(tile, *many_scales(n, m, dtype, device), True)
    return found | {f"log {name}": value for name, value in zip(SUMS, logs, strict=True)}


def sparse_groups(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the group numbers of rows [n] and columns [m].

    Only every 31st row and every 19th column is in a group. So some blocks of a kernel contain entries within a group,
    and others contain none.
    """
    rows, columns = (torch.arange(k, dtype=torch.int32, device=device) for k in (n, m))
    return torch.where(rows % 31 == 2, rows % 7, -1), torch.where(
        columns % 19 == 3, columns % 7, -2
    )


def many_scales(n: int, m: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a different logit scale for each row [n] and for each column [m].

    The scales reach 900, so no single number can be subtracted from all logits to keep all sums of exp in range.
    """
    rows = torch.linspace(1, 900, n, dtype=dtype, device=device)
    return rows, torch.linspace(1, 700, m, dtype=dtype, device=device)


def poisoned(n: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor [n, m] whose elements are NaN. Every byte is 255, which is NaN in any floating-point dtype."""
    memory = torch.empty(n, m, dtype=dtype, device=device)
    memory.view(torch.uint8).fill_(255)
    return memory


def check_blocks(
    rows: Tensor, columns: Tensor, first: int | None, tiling: Tiling
) -> Iterator[Check]:
    """Check the public functions of disco_ds.losses.kernels on a block that is computed in several tiles.

    The float64 reference uses rows and columns that are first rounded to the precision of the tiling. So the errors do
    not include this rounding.

    Args:
        rows: [n, D], fp32.
        columns: [m, D], fp32.
        first: Row i and column i + first are a positive pair. None: the block has no positive pairs.
        tiling: The tiling. Its implementation is ignored: both are run.
    """
    exact_rows, exact_columns = (tiling.quantize_tile(x).double() for x in (rows, columns))
    true = on_block(exact_rows, exact_columns, first, replace(tiling, impl="torch"))
    mine, theirs = (
        on_block(rows, columns, first, replace(tiling, impl=impl)) for impl in ("triton", "torch")
    )
    for name, value in true.items():
        yield Check(name, error(mine[name], value), error(theirs[name], value))


def on_block(rows: Tensor, columns: Tensor, first: int | None, tiling: Tiling) -> dict[str, Tensor]:
    """Run the public functions of disco_ds.losses.kernels on a block, and return their outputs by name."""
    rows, columns = tiling.quantize(rows), tiling.quantize(columns)
    dtype, (n, m), device = full_dtype(rows), (len(rows), len(columns)), rows.device
    scale, bias = (torch.tensor([x], dtype=dtype, device=device) for x in (14.3, -10.0))
    shift = torch.tensor([SHIFT], dtype=torch.float64, device=device)
    diagonal = m if first is None else first  # the diagonal m lies outside the block
    block = Block(rows, columns, scale.expand(n), scale.expand(m), diagonal, shift, tiling)
    sums = softmax_sums(block, True)
    found = {
        "block rows": sums.rows.exp(),
        "block columns": sums.columns.exp(),
        "block maxima": sums.maxima[0],
    }
    # A row whose only column is its pair has no other entries, so its log-sum is log(0). Replace -inf by a number.
    shifts = [x.clamp(min=-1.0) for x in (sums.rows, sums.columns)]
    free = replace(block, shift=None)
    without = softmax_sums(free, False)
    found |= {
        "block rows, no shift": without.rows.exp(),
        "block columns, no shift": without.columns.exp(),
    }
    for name, at_hand in (("gradient", block), ("gradient without shift", free)):
        d_rows, d_columns = (
            torch.zeros(x.shape, dtype=dtype, device=device) for x in (rows, columns)
        )
        softmax_gradient(at_hand, shifts[0], shifts[1], d_rows, d_columns)
        found |= {f"{name}, rows": d_rows, f"{name}, columns": d_columns}
    d_rows, d_columns = torch.zeros_like(d_rows), torch.zeros_like(d_columns)
    of_sigmoid = sigmoid_block(replace(block, shift=None), bias, d_rows, d_columns)
    return found | {
        "sigmoid block loss": of_sigmoid.loss,
        "sigmoid block sum": of_sigmoid.weight,
        "sigmoid gradient of rows": d_rows,
        "sigmoid gradient of columns": d_columns,
    }


def error(got: Tensor, true: Tensor) -> float:
    """Return the largest difference, divided by the largest finite true value. Return NaN if any value is NaN."""
    got = got.to(true.dtype)
    size = torch.where(true.isfinite(), true, 0).abs().max().clamp(min=1e-30)
    return (torch.where(got == true, 0, (got - true).abs()).max() / size).item()


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def keep(record: Record, label: str, check: Check, limit: float = math.inf) -> None:
    """Record a check. It fails if Triton's error exceeds `limit`, or exceeds twice torch's error plus TINY."""
    record(
        case=label,
        what=check.name,
        triton=check.triton,
        torch=check.torch,
        ok=check.passes and check.triton <= limit,
    )
