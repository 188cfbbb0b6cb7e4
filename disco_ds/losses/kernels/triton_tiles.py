"""What is done to one tile, in Triton. torch_tiles.py has the same functions, with the same arguments, in torch.

Which block sizes a kernel takes is timed once in a process for each kind of large tile, so two processes may differ by
rounding; under torch.use_deterministic_algorithms nothing is timed and the choice is fixed.

Verified under Triton's interpreter against torch_tiles.py and float64 (tests/losses/kernels/test_tiles.py), and
compiled for GPUs from the A100 on (tests/losses/kernels/test_triton_compiled.py). Never run on a GPU so far:
tools/check_kernels.py does that.
"""

# n rows, m columns, D width of a tile

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from disco_ds.losses.kernels import triton_kernels as kernels
from disco_ds.losses.kernels.tiles import Precision, Tiling

KEPT_BLOCK = {"BLOCK_M": 16, "BLOCK_N": 256}


def exp_sums(
    r: Tensor, c: Tensor, scale: Tensor, shift: Tensor, pairs: int | None, tiling: Tiling, out: Tensor | None,
    keep: Tensor | None, maxima: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As in torch_tiles, but nothing is written to `out`."""
    row_sum, column_sum = _parts(r, c)
    row_max, column_max = _parts(r, c) if maxima else (row_sum, column_sum)
    kept = row_sum if keep is None else keep
    rows, columns = _launch(
        kernels.exp_sums_kernel, r, c, pairs, tiling,
        scale, shift.float(), kept, kept.stride(0), row_sum, column_sum, row_max, column_max,
        KEEP=keep is not None, MAXIMA=maxima,
    )  # fmt: skip
    sums = row_sum[:columns].sum(0, dtype=torch.float64), column_sum[:rows].sum(0, dtype=torch.float64)
    return *sums, *_largest(row_max, column_max, rows, columns, maxima)


def exp_weights(
    r: Tensor, c: Tensor, scale: Tensor, shift: Tensor, a: Tensor, beta: Tensor, pairs: int | None, tiling: Tiling,
    out: Tensor,
) -> Tensor:  # fmt: skip
    _launch(kernels.exp_weights_kernel, r, c, pairs, tiling, scale, shift.float(), out, a, beta)
    return out


def kept_weights(e: Tensor, a: Tensor, beta: Tensor, tiling: Tiling, out: Tensor) -> Tensor:
    n, m = e.shape
    grid = triton.cdiv(n, KEPT_BLOCK["BLOCK_M"]), triton.cdiv(m, KEPT_BLOCK["BLOCK_N"])
    with torch.cuda.device_of(out):
        kernels.kept_weights_kernel[grid](
            e, e.stride(0), a, beta, out, n, m, PRECISION=_precision(tiling), **KEPT_BLOCK
        )
    return out


def log_sums(
    r: Tensor, c: Tensor, row_scale: Tensor, column_scale: Tensor, pairs: int | None, tiling: Tiling,
    out: Tensor | None, maxima: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As in torch_tiles, but nothing is written to `out`."""
    row_sum, column_sum = _parts(r, c)
    row_max, column_max = _parts(r, c) if maxima else (row_sum, column_sum)
    rows, columns = _launch(
        kernels.log_sums_kernel, r, c, pairs, tiling,
        row_scale.contiguous(), column_scale.contiguous(), row_sum, column_sum, row_max, column_max,
        MAXIMA=maxima,
    )  # fmt: skip
    sums = row_sum[:columns].double().logsumexp(0), column_sum[:rows].double().logsumexp(0)
    return *sums, *_largest(row_max, column_max, rows, columns, maxima)


def log_weights(
    r: Tensor, c: Tensor, row_scale: Tensor, column_scale: Tensor, row_shift: Tensor, column_shift: Tensor,
    pairs: int | None, tiling: Tiling, out: Tensor, moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    row_moment, column_moment = (out, out) if moments is None else _parts(r, c)
    rows, columns = _launch(
        kernels.log_weights_kernel, r, c, pairs, tiling,
        row_scale.contiguous(), column_scale.contiguous(), row_shift, column_shift, out, row_moment, column_moment,
        TWO_WEIGHTS=True, MOMENTS=moments is not None,
    )  # fmt: skip
    if moments is not None:
        moments[0].add_(row_moment[:columns].sum(0, dtype=torch.float64))
        moments[1].add_(column_moment[:rows].sum(0, dtype=torch.float64))
    return out


def sigmoid_weights(
    r: Tensor, c: Tensor, scale: Tensor, bias: Tensor, pairs: int | None, tiling: Tiling, out: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    row_max, column_max = _parts(r, c)
    loss, weight = r.new_empty(2, len(row_max) * len(column_max), dtype=torch.float32)
    rows, columns = _launch(
        kernels.sigmoid_weights_kernel, r, c, pairs, tiling,
        scale, bias, tiling.gain(), out, loss, weight, row_max, column_max, SIGMOID=True, MAXIMA=maxima,
    )  # fmt: skip
    sums = (part[: rows * columns].sum(dtype=torch.float64) for part in (loss, weight))
    return *sums, out, *_largest(row_max, column_max, rows, columns, maxima)


def try_out(device: torch.device, precision: Precision) -> None:
    """Run two kernels on a small tile. Raises: whatever Triton, its C compiler or the driver raises."""
    tiling, shift = Tiling(None, precision), torch.zeros(1, dtype=torch.float64, device=device)
    x, scale = tiling.round(torch.zeros(128, 128, device=device)), torch.ones(128, device=device)
    exp_sums(x, x, scale[:1], shift, 0, tiling, None, None, True)
    exp_weights(x, x, scale[:1], shift, scale, scale, 0, tiling, torch.empty_like(x))
    torch.cuda.synchronize(device)  # a launch that fails says so only here


def _launch(
    kernel: Any, r: Tensor, c: Tensor, pairs: int | None, tiling: Tiling, *rest: Any, **options: Any
) -> tuple[int, int]:
    """One program for every block of the tile. Returns how many that were: blocks of rows, blocks of columns."""
    n, m, D = len(r), len(c), r.shape[1]
    beyond = m
    with torch.cuda.device_of(r):
        kernel[lambda sizes: (triton.cdiv(n, sizes["BLOCK_M"]) * triton.cdiv(m, sizes["BLOCK_N"]),)](
            r, c, n, m, D, beyond if pairs is None else pairs, *r.stride(), *c.stride(), _size_class(n, m, D), *rest,
            PRECISION=_precision(tiling), enable_fp_fusion=True, **options,
        )  # fmt: skip
    sizes = kernel.best_config.kwargs
    return triton.cdiv(n, sizes["BLOCK_M"]), triton.cdiv(m, sizes["BLOCK_N"])


def _size_class(n: int, m: int, D: int) -> int:
    """Tiles of one class take the same configuration; 0: the first one, without timing."""
    if n * m < kernels.LARGE or torch.are_deterministic_algorithms_enabled():
        return 0
    return (triton.next_power_of_2(D) << 12) + (n.bit_length() << 6) + m.bit_length()


def _precision(tiling: Tiling) -> str:
    return "tf32" if tiling.precision == "tf32" else "ieee"


def _parts(r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Room for a number of each row from every block of columns, and the reverse, whatever blocks are chosen."""
    lowest, narrowest = (min(config.kwargs[name] for config in kernels.CONFIGS) for name in ("BLOCK_M", "BLOCK_N"))
    n, m = len(r), len(c)
    return (
        r.new_empty(triton.cdiv(m, narrowest), n, dtype=torch.float32),
        r.new_empty(triton.cdiv(n, lowest), m, dtype=torch.float32),
    )


def _largest(
    row_max: Tensor, column_max: Tensor, rows: int, columns: int, maxima: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (row_max[:columns].amax(0), column_max[:rows].amax(0)) if maxima else (None, None)
