"""The Triton kernels and their block sizes.

There is one kernel for each operation on a tile. Each multiplies the rows by the columns and then applies an epilogue
to the product. Kernels for sums write nothing as large as the tile. Kernels for weights write each tile of weights
once, for use in ordinary torch matrix multiplications (docs/losses.md section 3). Exponentials are computed as powers
of two, for which the hardware has an instruction. There are no atomics, so equal block sizes give bitwise equal
results. In this package, only triton_tiles.py imports this file.
"""

# n rows, m columns, D width of a tile; a block is the part of a tile that one program computes
# Triton interprets annotations of a kernel's arguments, so the kernels have no type annotations.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LARGE = 1 << 20
"""Block sizes are timed for tiles of at least this number of elements."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def _config(
    rows: int,
    columns: int,
    stages: int,
    warps: int,
    width_bytes: int = 128,
    group: int = 8,
    **flags: bool,
) -> triton.Config:
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "WIDTH_BYTES": width_bytes, "GROUP": group}
    return triton.Config(sizes | flags, num_stages=stages, num_warps=warps)


# A persistent configuration, for GPUs since the H100, runs one program on each multiprocessor. The program computes one
# block after another, and loads the operands of the next block while it finishes the current one. triton_tiles.py
# decides for which tiles this works.
LIGHT = (_config(128, 128, 3, 4), _config(128, 256, 3, 8), _config(128, 256, 3, 8, PERSISTENT=True))
"""The default configuration, the other one that is timed, and the persistent one, which is timed in its place.

The default one takes 96 KB of shared memory, which every GPU since the A100 has. Two of its programs fit on one
multiprocessor of a data center GPU, so the epilogue of one program overlaps the matrix multiplication of the other."""
HEAVY = (_config(128, 128, 3, 8), _config(64, 128, 4, 4), _config(128, 128, 4, 8, PERSISTENT=True))
"""The same for kernels with the flag SIGMOID or TWO_WEIGHTS, which need more registers per element."""
# Before Triton 3.8, tl.dot needs at least 16 numbers of each row, which are 64 bytes in fp32.
PLAIN_CORES = [_config(64, 64, 2, 4, 64), _config(64, 128, 2, 8, 64)]
"""The default configuration in fp32, and the other one that is timed.

fp32 matrix multiplications without tensor cores hold every operand in registers, which limits the block sizes."""
SMALL = _config(32, 64, 1, 1, 64, 2)
"""A configuration for Triton's interpreter, which computes a whole block even if the tile is smaller."""
CONFIGS = [*LIGHT, *HEAVY, *PLAIN_CORES, *([SMALL] if INTERPRETED else [])]

_forced: triton.Config | None = None


def force(config: triton.Config | None) -> None:
    """Use this configuration for every tile from now on; None: time the configurations again. For tests and tools."""
    global _forced
    _forced = config
    for kernel in KERNELS:
        kernel.cache.clear()


def worth_timing(
    configs: Sequence[triton.Config], args: dict[str, Any], **options: Any
) -> list[triton.Config]:
    """Return the configurations to time for these arguments. A single one is used without timing.

    args["tuned"] is twice the size class, which is 0 if nothing is to be timed, plus 1 if persistent programs can
    compute the tile.
    """
    size_class, persistent = divmod(args["tuned"], 2)
    if _forced is not None and (persistent or "PERSISTENT" not in _forced.kwargs):
        return [_forced]
    if INTERPRETED:
        return [SMALL]
    candidates = list_candidates(args, **options)
    return candidates if size_class else candidates[:1]


def list_candidates(args: dict[str, Any], **options: Any) -> list[triton.Config]:
    """Return the default configuration for these arguments, and the other one that is timed."""
    if args["r"].dtype == torch.float32 and options["PRECISION"] == "ieee":
        return PLAIN_CORES
    heavy = options.get("SIGMOID") or options.get("TWO_WEIGHTS")
    default, other, persistent = HEAVY if heavy else LIGHT
    return [default, persistent if args["tuned"] % 2 else other]


def _milliseconds(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """Return quantiles of the milliseconds that `call` takes, which launches a kernel with one configuration.

    They are infinity if the configuration fails with this version of Triton or on this GPU.
    """
    try:
        return triton.testing.do_bench(call, quantiles=list(quantiles))
    except torch.OutOfMemoryError:
        raise  # Triton would store the result of this failed measurement for later runs
    except (triton.TritonError, RuntimeError):  # RuntimeError: from the compiler's passes
        return [float("inf")] * len(quantiles)


def _tuned(*flags: str) -> Callable[[Any], Any]:
    """Return a decorator that times a kernel's configurations once per size class, precision and set of flags.

    MAXIMA, which is set only on logged steps, is not one of the flags. If it were, the first logged step would time all
    configurations again. The times are kept in Triton's cache folder for the next run.
    """
    return triton.autotune(
        CONFIGS,
        key=["tuned", "PRECISION", *flags],
        prune_configs_by={"early_config_prune": worth_timing},
        do_bench=_milliseconds,
        cache_results=not INTERPRETED,
    )


# By default, Triton compiles another version of a kernel for integer arguments that are multiples of 16. For the
# arguments below, such a version would not make any address computation cheaper.
_jit = triton.jit(do_not_specialize=["n", "pairs", "tuned"])


@triton.jit
def _blocks(n, m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PERSISTENT: tl.constexpr):
    """Return the range of the indices of the blocks that this program computes, as start, stop and step."""
    first = tl.program_id(0)
    if PERSISTENT:
        return first, tl.cdiv(n, BLOCK_M) * tl.cdiv(m, BLOCK_N), tl.num_programs(0)
    else:
        return first, first + 1, 1  # the compiler removes a loop of one iteration


@triton.jit
def _memory(x, n, m, row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PERSISTENT: tl.constexpr):
    """Return a tensor descriptor of x [n, m] for a persistent program, or the pointer x for any other program."""
    if PERSISTENT:
        return tl.make_tensor_descriptor(x, [n, m], [row, 1], [BLOCK_M, BLOCK_N])
    else:
        return x


@triton.jit
def _factors(
    r, c, n, m, D: tl.constexpr, r_row, c_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Return tensor descriptors of r and c for a persistent program, or the pointers r and c for any other program."""
    BLOCK_D: tl.constexpr = WIDTH_BYTES // (r.dtype.element_ty.primitive_bitwidth // 8)
    r = _memory(r, n, D, r_row, BLOCK_M, BLOCK_D, PERSISTENT)
    c = _memory(c, m, D, c_row, BLOCK_N, BLOCK_D, PERSISTENT)
    return r, c


@triton.jit
def _product(
    x, r, c, n, m, D: tl.constexpr, r_row, r_width, c_row, c_width, rows, columns,
    PRECISION: tl.constexpr, WIDTH_BYTES: tl.constexpr,
):  # fmt: skip
    """Return x + <r_i, c_j> for a block. The rows and columns may have any strides."""
    BLOCK_D: tl.constexpr = WIDTH_BYTES // (r.dtype.element_ty.primitive_bitwidth // 8)
    width = tl.arange(0, BLOCK_D)
    # Beyond the tile's edge, the last row is read again, which needs no mask. Addresses take 64 bits, because rows x D
    # can exceed 2^31.
    r_at = (
        r
        + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * r_row
        + width.to(tl.int64)[None, :] * r_width
    )
    c_at = (
        c
        + tl.minimum(columns, m - 1).to(tl.int64)[None, :] * c_row
        + width.to(tl.int64)[:, None] * c_width
    )
    for start in range(0, D, BLOCK_D):
        if D % BLOCK_D == 0:
            a = tl.load(r_at)
            b = tl.load(c_at)
        else:
            a = tl.load(r_at, mask=width[None, :] < D - start, other=0.0)
            b = tl.load(c_at, mask=width[:, None] < D - start, other=0.0)
        x = tl.dot(a, b, x, input_precision=PRECISION)
        r_at += BLOCK_D * tl.cast(r_width, tl.int64)
        c_at += BLOCK_D * tl.cast(c_width, tl.int64)
    return x


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _leave_out_groups(x, row_groups, column_groups, rows, columns, n, m):
    """Set the entries between rows and columns of the same group to -inf."""
    of_rows = tl.load(row_groups + rows, mask=rows < n, other=-1)
    of_columns = tl.load(column_groups + columns, mask=columns < m, other=-2)
    # Few blocks contain such entries. Each group sets one of 64 bits, so a block whose rows and columns share no bit
    # contains none.
    one = tl.full((), 1, tl.int64)
    row_bits = tl.reduce(tl.where(of_rows < 0, 0, one << (of_rows & 63)), 0, _either)
    column_bits = tl.reduce(tl.where(of_columns < 0, 0, one << (of_columns & 63)), 0, _either)
    if row_bits & column_bits != 0:
        x = tl.where(of_rows[:, None] == of_columns[None, :], float("-inf"), x)
    return x


@triton.jit
def _cosines(
    block, r, c, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, row_groups, column_groups,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr,
    GROUP: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Compute <r_i, c_j> for a block, with -inf at positive pairs, within groups and outside the tile.

    Returns:
        The inner products [BLOCK_M, BLOCK_N], the indices of the block's rows and columns in the tile,
        and the row index and column index of the block.
    """
    # Blocks that are computed at the same time should share rows and columns in the L2 cache, so the
    # numbering goes down GROUP blocks of a column before it moves to the next column.
    num_n = tl.cdiv(m, BLOCK_N)
    top = block // (GROUP * num_n) * GROUP
    height = tl.minimum(tl.cdiv(n, BLOCK_M) - top, GROUP)
    i = top + block % (GROUP * num_n) % height
    j = block % (GROUP * num_n) // height
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PERSISTENT:
        # Past the last row of the tile, and past column D of a row, a descriptor reads zeros, so no mask is needed.
        BLOCK_D: tl.constexpr = r.block_shape[1]
        for start in range(0, D, BLOCK_D):
            a = r.load([i * BLOCK_M, start])
            b = c.load([j * BLOCK_N, start])
            x = tl.dot(a, b.T, x, input_precision=PRECISION)
        # Triton 3.6 to 3.9 wait for the last product just before the first use of x. Without this copy, the first use
        # would be in the branch of the mask below, and blocks that skip this branch would not wait. The copy is a use
        # outside of any branch, and compiles to no instruction.
        if not INTERPRETED:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        x = _product(
            x, r, c, n, m, D, r_row, r_width, c_row, c_width, rows, columns, PRECISION, WIDTH_BYTES
        )

    # Only blocks at an edge or on the diagonal of the positive pairs need the mask. Most blocks do not.
    left = j * BLOCK_N - pairs
    on_diagonal = (i * BLOCK_M < left + BLOCK_N) & (left < (i + 1) * BLOCK_M)
    if on_diagonal | ((i + 1) * BLOCK_M > n) | ((j + 1) * BLOCK_N > m):
        kept = (
            (rows[:, None] < n)
            & (columns[None, :] < m)
            & (rows[:, None] + pairs != columns[None, :])
        )
        x = tl.where(kept, x, float("-inf"))
    if row_groups is not None:
        x = _leave_out_groups(x, row_groups, column_groups, rows, columns, n, m)
    return x, rows, columns, i, j


@triton.jit
def _store_part(x, parts, numbers, block, num):
    """Store one number for each row of a block in parts [blocks, num], or one for each column.

    num is the number of rows of the tile, or of its columns. `numbers` are the indices of the block's rows, or columns.
    """
    tl.store(parts + tl.cast(block, tl.int64) * num + numbers, x, mask=numbers < num)


@triton.jit
def _store_parts(x_row, x_column, by_row, by_column, rows, columns, i, j, n, m):
    """Store row values in by_row [column blocks, n] and column values in by_column [row blocks, m]."""
    _store_part(x_row, by_row, rows, j, n)
    _store_part(x_column, by_column, columns, i, m)


@triton.jit
def _store_tile(
    out, out_row, x, rows, columns, i, j, n, m, PRECISION: tl.constexpr, PERSISTENT: tl.constexpr
):
    """Store a block of the tile in the memory that `_memory` returned."""
    if PRECISION == "tf32":
        # Round to 11 bits as Tiling.quantize does, but leave NaN as it is.
        bits = x.to(tl.int32, bitcast=True) + 0x1000 & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if PERSISTENT:
        out.store([i * x.shape[0], j * x.shape[1]], x.to(out.dtype))
    else:
        at = out + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
        tl.store(at, x.to(out.dtype.element_ty), mask=(rows[:, None] < n) & (columns[None, :] < m))


@_tuned()
@_jit
def exp_sums_kernel(
    r, c, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned, row_groups, column_groups,
    scale, shift, row_sum, column_sum, row_max, column_max,
    MAXIMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr = False,
):  # fmt: skip
    """Compute torch_tiles.exp_sums: each block stores partial results for its rows and columns."""
    r, c = _factors(r, c, n, m, D, r_row, c_row, BLOCK_M, BLOCK_N, WIDTH_BYTES, PERSISTENT)
    start, stop, step = _blocks(n, m, BLOCK_M, BLOCK_N, PERSISTENT)
    for block in tl.range(start, stop, step, flatten=PERSISTENT):
        x, rows, columns, i, j = _cosines(
            block, r, c, n, m, D, pairs, r_row, r_width, c_row, c_width, row_groups, column_groups,
            PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP, PERSISTENT,
        )  # fmt: skip
        s = tl.load(scale)
        if MAXIMA:
            _store_parts(
                tl.max(x, 1) * s, tl.max(x, 0) * s, row_max, column_max, rows, columns, i, j, n, m
            )
        x = tl.exp2(x * (s * LOG2_E) - tl.load(shift) * LOG2_E)
        _store_parts(tl.sum(x, 1), tl.sum(x, 0), row_sum, column_sum, rows, columns, i, j, n, m)


@_tuned()
@_jit
def exp_weights_kernel(
    r, c, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned, row_groups, column_groups,
    scale, shift, out, row_factor, column_factor,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr = False,
):  # fmt: skip
    """Compute torch_tiles.exp_weights."""
    r, c = _factors(r, c, n, m, D, r_row, c_row, BLOCK_M, BLOCK_N, WIDTH_BYTES, PERSISTENT)
    out = _memory(out, n, m, m, BLOCK_M, BLOCK_N, PERSISTENT)
    start, stop, step = _blocks(n, m, BLOCK_M, BLOCK_N, PERSISTENT)
    for block in tl.range(start, stop, step, flatten=PERSISTENT):
        x, rows, columns, i, j = _cosines(
            block, r, c, n, m, D, pairs, r_row, r_width, c_row, c_width, row_groups, column_groups,
            PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP, PERSISTENT,
        )  # fmt: skip
        x = tl.exp2(x * (tl.load(scale) * LOG2_E) - tl.load(shift) * LOG2_E)
        of_rows = tl.load(row_factor + rows, mask=rows < n, other=0.0)
        of_columns = tl.load(column_factor + columns, mask=columns < m, other=0.0)
        _store_tile(
            out,
            m,
            x * (of_rows[:, None] + of_columns[None, :]),
            rows,
            columns,
            i,
            j,
            n,
            m,
            PRECISION,
            PERSISTENT,
        )


@triton.jit
def _log_sum(x, scales, numbers, num, AXIS: tl.constexpr):
    """Return the logarithm of the sum of exp(scale x), and the largest scale x, of each row (AXIS = 1) or column (0).

    The largest logit of each row or column is subtracted before exp2, and exactly the same number is added after log2.
    For an empty row or column this number is 0, because -inf - -inf is NaN.
    """
    scale = tl.load(scales + numbers, mask=numbers < num, other=1.0)
    largest = tl.max(x, AXIS)
    lifted = scale * LOG2_E
    top = tl.where(largest == float("-inf"), 0.0, largest * lifted)
    powers = tl.exp2(x * tl.expand_dims(lifted, AXIS) - tl.expand_dims(top, AXIS))
    return (tl.log2(tl.sum(powers, AXIS)) + top) * LN_2, largest * scale


@_tuned()
@_jit
def log_sums_kernel(
    r, c, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned, row_groups, column_groups,
    row_scale, column_scale, row_sum, column_sum, row_max, column_max,
    MAXIMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute torch_tiles.log_sums: each block stores partial results for its rows and columns."""
    x, rows, columns, i, j = _cosines(
        tl.program_id(0), r, c, n, m, D, pairs, r_row, r_width, c_row, c_width, row_groups, column_groups,
        PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP, False,
    )  # fmt: skip
    # Process the rows before the columns, because processing both together needs more registers.
    total, top = _log_sum(x, row_scale, rows, n, 1)
    _store_part(total, row_sum, rows, j, n)
    if MAXIMA:
        _store_part(top, row_max, rows, j, n)
    total, top = _log_sum(x, column_scale, columns, m, 0)
    _store_part(total, column_sum, columns, i, m)
    if MAXIMA:
        _store_part(top, column_max, columns, i, m)


@triton.jit
def _log_weight(x, scales, shifts, numbers, num, AXIS: tl.constexpr):
    """Return exp(scale x - shift), with a scale and a shift for each row (AXIS = 1) or each column (0)."""
    scale = tl.expand_dims(tl.load(scales + numbers, mask=numbers < num, other=1.0), AXIS)
    shift = tl.expand_dims(tl.load(shifts + numbers, mask=numbers < num, other=0.0), AXIS)
    return tl.exp2((x * scale - shift) * LOG2_E)


@_tuned("TWO_WEIGHTS", "MOMENTS")
@_jit
def log_weights_kernel(
    r, c, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned, row_groups, column_groups,
    row_scale, column_scale, row_shift, column_shift, out, row_moment, column_moment,
    TWO_WEIGHTS: tl.constexpr, MOMENTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute torch_tiles.log_weights: each block stores partial moments for its rows and columns."""
    x, rows, columns, i, j = _cosines(
        tl.program_id(0), r, c, n, m, D, pairs, r_row, r_width, c_row, c_width, row_groups, column_groups,
        PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP, False,
    )  # fmt: skip
    of_rows = _log_weight(x, row_scale, row_shift, rows, n, 1)
    of_columns = _log_weight(x, column_scale, column_shift, columns, m, 0)
    if MOMENTS:
        x = tl.maximum(x, -1e30)  # at positive pairs, -inf times the weight 0 would be NaN
        in_rows, in_columns = tl.sum(of_rows * x, 1), tl.sum(of_columns * x, 0)
        _store_parts(in_rows, in_columns, row_moment, column_moment, rows, columns, i, j, n, m)
    _store_tile(out, m, of_rows + of_columns, rows, columns, i, j, n, m, PRECISION, False)


@triton.jit
def _log1p(e):
    """Compute log(1 + e) for e in [0, 1], with a relative error of 3e-7.

    The result is e times a polynomial that interpolates log(1 + e) / e at the Chebyshev nodes. Triton has no log1p,
    log(1 + e) loses the digits of a small e, and a formula with a division would take longer than the polynomial.
    """
    p = 0.0051261024 * e - 0.029074065
    p = p * e + 0.077516086
    p = p * e - 0.13602248
    p = p * e + 0.19076881
    p = p * e - 0.24835399
    p = p * e + 0.33318120
    p = p * e - 0.49999446
    p = p * e + 0.99999994
    return e * p


@_tuned("SIGMOID")
@_jit
def sigmoid_weights_kernel(
    r, c, n, m, D: tl.constexpr, pairs, r_row, r_width, c_row, c_width, tuned, row_groups, column_groups,
    scale, bias, gain, out, loss, weight, row_max, column_max,
    SIGMOID: tl.constexpr, MAXIMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH_BYTES: tl.constexpr, GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr = False,
):  # fmt: skip
    """Compute torch_tiles.sigmoid_weights: each block stores partial sums and maxima."""
    r, c = _factors(r, c, n, m, D, r_row, c_row, BLOCK_M, BLOCK_N, WIDTH_BYTES, PERSISTENT)
    out = _memory(out, n, m, m, BLOCK_M, BLOCK_N, PERSISTENT)
    start, stop, step = _blocks(n, m, BLOCK_M, BLOCK_N, PERSISTENT)
    for block in tl.range(start, stop, step, flatten=PERSISTENT):
        z, rows, columns, i, j = _cosines(
            block, r, c, n, m, D, pairs, r_row, r_width, c_row, c_width, row_groups, column_groups,
            PRECISION, BLOCK_M, BLOCK_N, WIDTH_BYTES, GROUP, PERSISTENT,
        )  # fmt: skip
        s, t = tl.load(scale), tl.load(bias)
        if MAXIMA:
            _store_parts(
                tl.max(z, 1) * s + t,
                tl.max(z, 0) * s + t,
                row_max,
                column_max,
                rows,
                columns,
                i,
                j,
                n,
                m,
            )
        z = z * s + t
        e = tl.exp2(-tl.abs(z) * LOG2_E)
        sigmoid = tl.where(z < 0, e, 1.0) / (1 + e)
        tl.store(loss + block, tl.sum(tl.maximum(z, 0.0) + _log1p(e)))
        tl.store(weight + block, tl.sum(sigmoid))
        _store_tile(out, m, sigmoid * gain, rows, columns, i, j, n, m, PRECISION, PERSISTENT)


KERNELS = [
    exp_sums_kernel,
    exp_weights_kernel,
    log_sums_kernel,
    log_weights_kernel,
    sigmoid_weights_kernel,
]
