"""What is done to one tile, in Triton: a product whose epilogue does the rest. torch_tiles.py has the same in torch.

Sums write nothing as large as the tile; weights write it once, as the factor of the library products that follow
(losses.md section 3). No atomics: the same choice of block sizes gives the same bits. That choice is timed once in a
process for large tiles, so two processes may differ by rounding.

Verified under Triton's interpreter against torch_tiles.py and float64 (tests/test_kernels.py); compiled for A100 and
H100 by Triton 3.6 and 3.9. Never run on a GPU so far: tools/check_kernels.py does that.
"""

# n rows, m columns, D width of a tile; a block is what one program computes of it
# Triton takes annotations of a kernel's arguments for instructions.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from disco_ds.kernels.tiles import Tiling

INTERPRETED = triton.knobs.runtime.interpret
LARGE = 1 << 20
"""Elements of a tile from which block sizes are worth timing."""


def _config(rows: int, columns: int, stages: int, warps: int, width_bytes: int = 128, group: int = 8) -> triton.Config:
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "WIDTH_BYTES": width_bytes, "GROUP": group}
    return triton.Config(sizes, num_stages=stages, num_warps=warps)


TENSOR_CORES = [
    _config(128, 128, 3, 8),
    _config(128, 128, 4, 4),
    _config(128, 256, 3, 8),
    _config(256, 128, 3, 8),
    _config(128, 256, 4, 8),
    _config(64, 128, 4, 4),
]
# Products of fp32 without tensor cores hold every operand in registers.
PLAIN_CORES = [_config(64, 64, 2, 4, 64), _config(64, 128, 2, 8, 64), _config(128, 128, 2, 8, 32)]
CONFIGS = [_config(32, 64, 1, 1, 64, 2)] if INTERPRETED else [*TENSOR_CORES, *PLAIN_CORES]


def _worth_timing(configs: list[triton.Config], args: dict[str, Any], **options: Any) -> list[triton.Config]:
    plain = args["r"].dtype == torch.float32 and options["PRECISION"] == "ieee"
    fitting = PLAIN_CORES if plain else TENSOR_CORES
    if "gain" in args:
        # The sigmoid's epilogue has twice the live values: with more of them in a thread it spills registers.
        fitting = [x for x in fitting if x.kwargs["BLOCK_M"] * x.kwargs["BLOCK_N"] <= 64 * 32 * x.num_warps]
    return fitting if args["tuned"] else fitting[:1]


_tuned = triton.autotune(CONFIGS, key=["tuned", "PRECISION"], prune_configs_by={"early_config_prune": _worth_timing})
# Their divisibility makes no address quicker, so it is no reason to compile again.
_jit = triton.jit(do_not_specialize=["n", "pairs", "tuned"])


@triton.jit
def _exponents(
    r, c, scale, offset, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """scale <r_i, c_j> + offset of this program's block, -inf at the pairs and outside the tile.

    Returns: that [BLOCK_M, BLOCK_N], its rows' and columns' numbers in the tile, and its own number in both directions.
    """
    # Programs that run at the same time share rows and columns in the L2 cache: GROUP blocks high, then along.
    num_n = tl.cdiv(m, BLOCK_N)
    program = tl.program_id(0)
    top = program // (GROUP * num_n) * GROUP
    height = tl.minimum(tl.cdiv(n, BLOCK_M) - top, GROUP)
    i = top + program % (GROUP * num_n) % height
    j = program % (GROUP * num_n) // height

    BLOCK_D: tl.constexpr = WIDTH_BYTES // (r.dtype.element_ty.primitive_bitwidth // 8)
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.arange(0, BLOCK_D)
    # Past an edge the last row is read again, which needs no mask. 64 bits: rows x D passes 2^31.
    r_at = r + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * r_row + width.to(tl.int64)[None, :] * r_width
    c_at = c + tl.minimum(columns, m - 1).to(tl.int64)[None, :] * c_row + width.to(tl.int64)[:, None] * c_width
    x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = width < D - start
        a = tl.load(r_at, mask=inside[None, :], other=0.0)
        b = tl.load(c_at, mask=inside[:, None], other=0.0)
        x = tl.dot(a, b, x, input_precision=PRECISION)
        r_at += BLOCK_D * tl.cast(r_width, tl.int64)
        c_at += BLOCK_D * tl.cast(c_width, tl.int64)
    x = x * scale + offset

    # Most blocks have no pair and no edge.
    left = j * BLOCK_N - pairs
    on_diagonal = (i * BLOCK_M < left + BLOCK_N) & (left < (i + 1) * BLOCK_M)
    if on_diagonal | ((i + 1) * BLOCK_M > n) | ((j + 1) * BLOCK_N > m):
        kept = (rows[:, None] < n) & (columns[None, :] < m) & (rows[:, None] + pairs != columns[None, :])
        x = tl.where(kept, x, float("-inf"))
    return x, rows, columns, i, j


@triton.jit
def _store_parts(x_row, x_column, by_row, by_column, rows, columns, i, j, n, m):
    """A block's number for each of its rows and columns; by_row [column blocks, n], by_column [row blocks, m]."""
    tl.store(by_row + tl.cast(j, tl.int64) * n + rows, x_row, mask=rows < n)
    tl.store(by_column + tl.cast(i, tl.int64) * m + columns, x_column, mask=columns < m)


@triton.jit
def _store_tile(out, x, rows, columns, n, m, PRECISION: tl.constexpr):
    if PRECISION == "tf32":
        # To 11 bits, as Tiling.factor does; not a number stays what it is.
        bits = x.to(tl.int32, bitcast=True) + 0x1000 & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    at = out + rows.to(tl.int64)[:, None] * m + columns[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=(rows[:, None] < n) & (columns[None, :] < m))


@_tuned
@_jit
def _exp_sums(
    r, c, scale, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned,
    shift, out, row_sum, column_sum, row_max, column_max,
    KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    x, rows, columns, i, j = _exponents(
        r, c, tl.load(scale), -shift, n, m, D, pairs, r_row, r_width, c_row, c_width,
        PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP,
    )  # fmt: skip
    _store_parts(tl.max(x, 1) + shift, tl.max(x, 0) + shift, row_max, column_max, rows, columns, i, j, n, m)
    x = tl.exp(x)
    _store_parts(tl.sum(x, 1), tl.sum(x, 0), row_sum, column_sum, rows, columns, i, j, n, m)
    if KEEP:
        _store_tile(out, x, rows, columns, n, m, "ieee")


@_tuned
@_jit
def _exp_weights(
    r, c, scale, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned,
    shift, out, a, beta,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    x, rows, columns, _, _ = _exponents(
        r, c, tl.load(scale), -shift, n, m, D, pairs, r_row, r_width, c_row, c_width,
        PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP,
    )  # fmt: skip
    of_rows = tl.load(a + rows, mask=rows < n, other=0.0)
    of_columns = tl.load(beta + columns, mask=columns < m, other=0.0)
    _store_tile(out, tl.exp(x) * (of_rows[:, None] + of_columns[None, :]), rows, columns, n, m, PRECISION)


@_tuned
@_jit
def _sigmoid_weights(
    r, c, scale, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned,
    bias, gain, out, loss, weight, row_max, column_max,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    z, rows, columns, i, j = _exponents(
        r, c, tl.load(scale), tl.load(bias), n, m, D, pairs, r_row, r_width, c_row, c_width,
        PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP,
    )  # fmt: skip
    _store_parts(tl.max(z, 1), tl.max(z, 0), row_max, column_max, rows, columns, i, j, n, m)
    e = tl.exp(-tl.abs(z))
    # log1p(e) as 2 artanh(e / (2 + e)), to 2e-8: Triton has no log1p, and log(1 + e) loses a small e.
    s = e / (2 + e)
    q = s * s
    log1p = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q / 13))))))
    sigmoid = tl.where(z < 0, e, 1.0) / (1 + e)
    tl.store(loss + tl.program_id(0), tl.sum(tl.maximum(z, 0.0) + log1p))
    tl.store(weight + tl.program_id(0), tl.sum(sigmoid))
    _store_tile(out, sigmoid * gain, rows, columns, n, m, PRECISION)


def exp_sums(
    r: Tensor, c: Tensor, scale: Tensor, shift: float, pairs: int | None, tiling: Tiling, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in torch_tiles, but exp(x - shift) is written only where there is an `out` for it."""
    row_sum, column_sum, row_max, column_max = (x for _ in range(2) for x in _parts(r, c))
    rows, columns = _launch(
        _exp_sums, r, c, scale, pairs, tiling,
        shift, row_sum if out is None else out, row_sum, column_sum, row_max, column_max, KEEP=out is not None,
    )  # fmt: skip
    sums = row_sum[:columns].sum(0, dtype=torch.float64), column_sum[:rows].sum(0, dtype=torch.float64)
    return *sums, row_max[:columns].amax(0), column_max[:rows].amax(0)


def exp_weights(
    r: Tensor,
    c: Tensor,
    scale: Tensor,
    shift: float,
    a: Tensor,
    beta: Tensor,
    pairs: int | None,
    tiling: Tiling,
    out: Tensor,
) -> Tensor:
    W = _as_factor(out, r)
    _launch(_exp_weights, r, c, scale, pairs, tiling, shift, W, a, beta)
    return W


def sigmoid_weights(
    r: Tensor, c: Tensor, scale: Tensor, bias: Tensor, pairs: int | None, tiling: Tiling, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    W = _as_factor(out, r)
    row_max, column_max = _parts(r, c)
    loss, weight = r.new_empty(2, len(row_max) * len(column_max), dtype=torch.float32)
    rows, columns = _launch(
        _sigmoid_weights, r, c, scale, pairs, tiling, bias, tiling.gain(), W, loss, weight, row_max, column_max
    )
    sums = (part[: rows * columns].sum(dtype=torch.float64) for part in (loss, weight))
    return *sums, W, row_max[:columns].amax(0), column_max[:rows].amax(0)


def _launch(
    kernel: Any, r: Tensor, c: Tensor, scale: Tensor, pairs: int | None, tiling: Tiling, *rest: Any, **options: Any
) -> tuple[int, int]:
    """One program for every block of the tile. Returns how many that were: blocks of rows, blocks of columns."""
    n, m, D = len(r), len(c), r.shape[1]
    beyond = m
    tuned = triton.next_power_of_2(D) if n * m >= LARGE else 0
    with torch.cuda.device_of(r):
        kernel[lambda sizes: (triton.cdiv(n, sizes["BLOCK_M"]) * triton.cdiv(m, sizes["BLOCK_N"]),)](
            r, c, scale, n, m, D, beyond if pairs is None else pairs, *r.stride(), *c.stride(), tuned, *rest,
            PRECISION="tf32" if tiling.precision == "tf32" else "ieee", enable_fp_fusion=True, **options,
        )  # fmt: skip
    sizes = kernel.best_config.kwargs
    return triton.cdiv(n, sizes["BLOCK_M"]), triton.cdiv(m, sizes["BLOCK_N"])


def _parts(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Room for a number of each row from every block of columns, and the reverse, whatever blocks are chosen."""
    lowest, narrowest = (min(config.kwargs[name] for config in CONFIGS) for name in ("BLOCK_M", "BLOCK_N"))
    n, m = len(r), len(c)
    return (
        r.new_empty(triton.cdiv(m, narrowest), n, dtype=torch.float32),
        r.new_empty(triton.cdiv(n, lowest), m, dtype=torch.float32),
    )


def _as_factor(out: Tensor, r: Tensor) -> Tensor:
    """The memory of `out` [n, m] as a matrix of r's dtype, which is no wider."""
    return out.view(-1).view(r.dtype)[: out.numel()].view(out.shape)
