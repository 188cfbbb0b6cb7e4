"""Are the kernels right on this GPU? Triton and torch at every precision against float64, printed as a table.

    python tools/check_kernels.py [fp32 tf32 fp16 bf16]

An error is the largest difference over the largest true value. Triton's may be twice torch's at the same precision.
Exit 1 if one is larger, or if there is no GPU. The first run takes minutes: every kernel is compiled and timed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.kernels import (
    Block,
    Precision,
    Tiling,
    full_dtype,
    sigmoid_block,
    softmax_gradient,
    softmax_sums,
    torch_tiles,
)

# n rows, m columns, D width
SHAPES: list[tuple[int, int, int, int | None]] = [
    (1, 1, 1, 0),
    (127, 129, 64, None),
    (300, 200, 100, 3),
    (513, 1025, 515, -7),
    (1000, 1024, 512, 500),
    (4096, 4096, 768, 0),
]
"""n, m, D, and the column of row 0's pair; from a million elements on, block sizes are chosen by timing."""
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "tf32", "fp32")
SHIFT = 3.0
TINY = 1e-6


class Check(NamedTuple):
    name: str
    triton: float
    torch: float

    @property
    def passes(self) -> bool:
        return self.triton <= 2 * self.torch + TINY


def features(n: int, D: int, device: str, seed: int) -> Tensor:
    """Unit rows [n, D] in fp32, every second row of a tensor with other numbers between and behind them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((2 * n, D + 3), torch.nan, device=device)
    wide[::2, :D] = F.normalize(torch.randn(n, D, generator=generator), dim=1).to(device)
    return wide[::2, :D]


def check_tiles(rows: Tensor, columns: Tensor, pairs: int | None, tiling: Tiling) -> Iterator[Check]:
    """Every function of triton_tiles on one tile; rows [n, D] and columns [m, D] fp32."""
    from disco_ds.kernels import triton_tiles

    r, c = tiling.round(rows), tiling.round(columns)
    true = on_tile(torch_tiles, r.double(), c.double(), pairs, tiling)
    mine, theirs = (on_tile(tiles, r, c, pairs, tiling) for tiles in (triton_tiles, torch_tiles))
    for name, value in true.items():
        yield Check(name, error(mine[name], value), error(theirs[name], value))


def on_tile(tiles: ModuleType, r: Tensor, c: Tensor, pairs: int | None, tiling: Tiling) -> dict[str, Tensor]:
    """What each function returns or writes, by name."""
    dtype, (n, m), device = torch.promote_types(r.dtype, torch.float32), (len(r), len(c)), r.device
    out_dtype = dtype if tiles is torch_tiles else tiling.factor_dtype(r)
    out = poisoned(n, m, out_dtype, device)
    scale, bias = (torch.tensor([x], dtype=dtype, device=device) for x in (14.3, -10.0))
    shift = torch.tensor([SHIFT], dtype=torch.float64, device=device)
    a, beta = (torch.linspace(0.1, 1, k, dtype=dtype, device=device).mul_(tiling.gain() * 1e-6) for k in (n, m))
    kept = poisoned(n, m + 8, torch.bfloat16, device)[:, :m]
    names = "sums of rows", "sums of columns", "maxima of rows", "maxima of columns"
    found = dict(zip(names, tiles.exp_sums(r, c, scale, shift, pairs, tiling, out, kept, True), strict=True))
    sums = tiles.exp_sums(r, c, scale, shift, pairs, tiling, out, None, False)
    found |= {"sums alone": sums[0], "kept": kept.to(dtype)}
    found["weights"] = tiles.exp_weights(r, c, scale, shift, a, beta, pairs, tiling, out).clone()
    exact = torch.linspace(0.5, 2, n * m, dtype=dtype, device=device).view(n, m).bfloat16()
    found["kept weights"] = tiles.kept_weights(exact, a, beta, tiling, out).clone()
    # Exponents of up to 900, for which no single shift would do.
    row_scale, column_scale = (torch.linspace(1, top, k, dtype=dtype, device=device) for top, k in ((900, n), (700, m)))
    logs = tiles.log_sums(r, c, row_scale, column_scale, pairs, tiling, out, True)
    found |= {f"log {name}": value for name, value in zip(names, logs, strict=True)}
    lifted = [900 - math.log(tiling.gain()) * torch.ones(k, dtype=dtype, device=device) for k in (n, m)]
    moments = tuple(torch.zeros(k, dtype=torch.float64, device=device) for k in (n, m))
    found["log weights"] = tiles.log_weights(
        r, c, row_scale, column_scale, *lifted, pairs, tiling, out, moments
    ).clone()
    found |= {"moments of rows": moments[0], "moments of columns": moments[1]}
    loss, weight, W, row_max, column_max = tiles.sigmoid_weights(r, c, scale, bias, pairs, tiling, out, True)
    found |= {"sigmoid loss": loss, "sigmoid sum": weight, "sigmoid weights": W}
    return found | {"sigmoid maxima of rows": row_max, "sigmoid maxima of columns": column_max}


def poisoned(n: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, m] of what reads as not a number in any floating dtype."""
    memory = torch.empty(n, m, dtype=dtype, device=device)
    memory.view(torch.uint8).fill_(255)
    return memory


def check_blocks(rows: Tensor, columns: Tensor, first: int | None, tiling: Tiling) -> Iterator[Check]:
    """The public functions on a block of several tiles; the reference has its factors rounded to the same precision."""
    exact = [tiling.round(x).double() for x in (rows, columns)]
    true = on_block(*exact, first, replace(tiling, impl="torch"))
    mine, theirs = (on_block(rows, columns, first, replace(tiling, impl=impl)) for impl in ("triton", "torch"))
    for name, value in true.items():
        yield Check(name, error(mine[name], value), error(theirs[name], value))


def on_block(rows: Tensor, columns: Tensor, first: int | None, tiling: Tiling) -> dict[str, Tensor]:
    """What each public function returns or adds, by name."""
    rows, columns = tiling.hold(rows), tiling.hold(columns)
    dtype, (n, m), device = full_dtype(rows), (len(rows), len(columns)), rows.device
    scale, bias = (torch.tensor([x], dtype=dtype, device=device) for x in (14.3, -10.0))
    shift = torch.tensor([SHIFT], dtype=torch.float64, device=device)
    block = Block(rows, columns, scale.expand(n), scale.expand(m), first, shift, tiling)
    kept = poisoned(n, m, torch.bfloat16, device)
    sums = softmax_sums(block, True, kept)
    found = {"block rows": sums.rows.exp(), "block columns": sums.columns.exp(), "block maxima": sums.rows_max}
    # A number in place of the logarithm of nothing, which a row alone with its pair has.
    shifts = [x.clamp(min=-1.0) for x in (sums.rows, sums.columns)]
    free = replace(block, shift=None)
    without = softmax_sums(free, False)
    found |= {"block rows, no shift": without.rows.exp(), "block columns, no shift": without.columns.exp()}
    for name, at_hand, keep in (
        ("gradient", block, None),
        ("gradient stored", block, kept),
        ("gradient without shift", free, None),
    ):
        into = [torch.zeros(x.shape, dtype=dtype, device=device) for x in (rows, columns)]
        softmax_gradient(at_hand, *shifts, *into, keep)
        found |= {f"{name}, rows": into[0], f"{name}, columns": into[1]}
    into = [torch.zeros_like(x) for x in into]
    of_sigmoid = sigmoid_block(replace(block, shift=None), bias, *into)
    return found | {
        "sigmoid block loss": of_sigmoid.loss,
        "sigmoid block sum": of_sigmoid.weight,
        "sigmoid gradient of rows": into[0],
        "sigmoid gradient of columns": into[1],
    }


def error(got: Tensor, true: Tensor) -> float:
    """Largest difference over the largest finite true value; not a number if one is not."""
    got = got.to(true.dtype)
    size = torch.where(true.isfinite(), true, 0).abs().max().clamp(min=1e-30)
    return (torch.where(got == true, 0, (got - true).abs()).max() / size).item()


def check_far_offsets(device: str) -> Check:
    """Rows that start more than 2^31 elements into their tensor (8 GB)."""
    from disco_ds.kernels import triton_tiles

    n, m, D = (1 << 22) + 300, 64, 512
    tiling = Tiling(precision="fp16", impl="triton")
    r = torch.zeros(n, D, dtype=torch.float16, device=device)
    r[-256:] = features(256, D, device, 1).half()
    c, scale = features(m, D, device, 2).half(), torch.tensor([14.3], device=device)
    shift = torch.tensor([SHIFT], dtype=torch.float64, device=device)
    mine = triton_tiles.exp_sums(r, c, scale, shift, None, tiling, None, None, True)[0][-256:]
    true, theirs = (
        ((r[-256:].to(dtype) @ c.to(dtype).T) * scale.to(dtype) - SHIFT).exp().sum(1)
        for dtype in (torch.float64, torch.float32)
    )
    return Check("row sums past 2^31", error(mine, true), error(theirs, true))


def main(precisions: Sequence[str] = PRECISIONS) -> int:
    if not torch.cuda.is_available():
        print("no GPU here: the kernels can be checked only where one is", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"{'precision':<10}{'n x m x D':<18}{'pairs':<8}{'what':<30}{'triton':>10}{'torch':>10}")
    failures, start = 0, time.monotonic()
    for precision in precisions:
        for number, (n, m, D, pairs) in enumerate(SHAPES):
            rows, columns = features(n, D, "cuda", number), features(m, D, "cuda", number + 100)
            whole, tiled = Tiling(None, precision, "triton"), Tiling((256, 512), precision, "triton")
            for check in (*check_tiles(rows, columns, pairs, whole), *check_blocks(rows, columns, pairs, tiled)):
                failures += report(check, precision, f"{n} x {m} x {D}", pairs)
    if torch.cuda.mem_get_info()[0] > 12e9:
        failures += report(check_far_offsets("cuda"), "fp16", "4.2M x 64 x 512", None)
    print(f"\n{failures} failed, {time.monotonic() - start:.0f} s")
    return int(failures > 0)


def report(check: Check, precision: str, shape: str, pairs: int | None) -> bool:
    """Prints a line. Returns: whether the check failed."""
    where = "none" if pairs is None else str(pairs)
    verdict = "" if check.passes else "  FAILED"
    print(f"{precision:<10}{shape:<18}{where:<8}{check.name:<30}{check.triton:10.1e}{check.torch:10.1e}{verdict}")
    return not check.passes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PRECISIONS))
