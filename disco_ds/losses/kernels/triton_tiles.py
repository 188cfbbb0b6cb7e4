"""The operations on one tile in Triton.

torch_tiles.py implements the same functions in torch, with the same arguments, and documents them.

For large tiles, the block sizes of a kernel are chosen by timing two configurations, once
for each size class. Two processes may choose different block sizes, so their results may differ by rounding. Under
torch.use_deterministic_algorithms, nothing is timed and the block sizes are fixed.

The kernels are tested under Triton's interpreter against torch_tiles.py and float64
(tests/losses/kernels/test_tiles.py), and compiled for the A100 and newer GPUs
(tests/losses/kernels/test_triton_compiled.py). tools/check/kernels.py tests them on a GPU.
"""

# n rows, m columns, D width of a tile

import math
from typing import Any

import torch
import triton
from torch import Tensor

from disco_ds.losses.kernels import triton_kernels as kernels
from disco_ds.losses.kernels.tiles import Precision, Tile, Tiling, count_multiprocessors


def exp_sums(
    tile: Tile, scale: Tensor, shift: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute torch_tiles.exp_sums without writing to tile.out."""
    row_sum, column_sum, row_max, column_max = _launch_sums(
        kernels.exp_sums_kernel, tile, scale, shift.float(),
        maxima=maxima, persistent=_can_describe(tile.r, tile.c),
    )  # fmt: skip
    sums = row_sum.sum(0, dtype=torch.float64), column_sum.sum(0, dtype=torch.float64)
    return *sums, row_max, column_max


def exp_weights(
    tile: Tile, scale: Tensor, shift: Tensor, row_factor: Tensor, column_factor: Tensor
) -> Tensor:
    """Compute torch_tiles.exp_weights in tile.out."""
    assert tile.out is not None
    persistent = _can_describe(tile.r, tile.c, tile.out)
    _launch(
        kernels.exp_weights_kernel, tile,
        scale, shift.float(), tile.out, row_factor, column_factor,
        persistent=persistent,
    )  # fmt: skip
    return tile.out


def log_sums(
    tile: Tile, row_scale: Tensor, column_scale: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute torch_tiles.log_sums without writing to tile.out."""
    row_sum, column_sum, row_max, column_max = _launch_sums(
        kernels.log_sums_kernel, tile, row_scale.contiguous(), column_scale.contiguous(), maxima=maxima
    )  # fmt: skip
    sums = row_sum.double().logsumexp(0), column_sum.double().logsumexp(0)
    return *sums, row_max, column_max


def log_weights(
    tile: Tile,
    row_scale: Tensor,
    column_scale: Tensor,
    row_shift: Tensor,
    column_shift: Tensor,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute torch_tiles.log_weights in tile.out."""
    out = tile.out
    assert out is not None
    row_moment, column_moment = (out, out) if moments is None else _partial_vectors(tile)
    rows, columns = _launch(
        kernels.log_weights_kernel, tile,
        row_scale.contiguous(), column_scale.contiguous(), row_shift, column_shift, out, row_moment, column_moment,
        TWO_WEIGHTS=True, MOMENTS=moments is not None,
    )  # fmt: skip
    if moments is not None:
        moments[0].add_(row_moment[:columns].sum(0, dtype=torch.float64))
        moments[1].add_(column_moment[:rows].sum(0, dtype=torch.float64))
    return out


def sigmoid_weights(
    tile: Tile, scale: Tensor, bias: Tensor, maxima: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute torch_tiles.sigmoid_weights, with the weights in tile.out."""
    out = tile.out
    assert out is not None
    row_max, column_max = _partial_vectors(tile)
    loss, weight = out.new_empty(2, len(row_max) * len(column_max), dtype=torch.float32)
    rows, columns = _launch(
        kernels.sigmoid_weights_kernel, tile,
        scale, bias, tile.tiling.underflow_scale(), out, loss, weight, row_max, column_max,
        persistent=_can_describe(tile.r, tile.c, out), SIGMOID=True, MAXIMA=maxima,
    )  # fmt: skip
    sums = (part[: rows * columns].sum(dtype=torch.float64) for part in (loss, weight))
    return *sums, out, *_largest(row_max, column_max, rows, columns, maxima)


def try_out(device: torch.device, precision: Precision) -> None:
    """Run two kernels on a small tile, to find out whether Triton works on this device.

    Raises:
        Exception: Any error of Triton, its C compiler or the driver.
    """
    tiling = Tiling(None, precision)
    shift = torch.zeros(1, dtype=torch.float64, device=device)
    scale = torch.ones(128, device=device)
    x = tiling.quantize_tile(torch.zeros(128, 128, device=device))
    tile = Tile(x, x, 0, tiling, torch.empty_like(x))
    exp_sums(tile, scale[:1], shift, True)
    exp_weights(tile, scale[:1], shift, scale, scale)
    torch.cuda.synchronize(device)  # raises the errors of the launches


def _launch_sums(
    kernel: Any, tile: Tile, *scales: Tensor, maxima: bool, persistent: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run a kernel for sums on every block of a tile.

    Returns:
        Partial sums of the rows [column blocks, n] and of the columns [row blocks, m], and the maxima of rows and
        columns.
    """
    row_sum, column_sum = _partial_vectors(tile)
    row_max, column_max = _partial_vectors(tile) if maxima else (row_sum, column_sum)
    rows, columns = _launch(
        kernel, tile, *scales, row_sum, column_sum, row_max, column_max, persistent=persistent, MAXIMA=maxima
    )  # fmt: skip
    largest = _largest(row_max, column_max, rows, columns, maxima)
    return row_sum[:columns], column_sum[:rows], *largest


def _launch(
    kernel: Any, tile: Tile, *rest: Any, persistent: bool = False, **options: Any
) -> tuple[int, int]:
    """Run a kernel on every block of a tile. `persistent` permits configurations with one program per multiprocessor.

    Returns:
        The number of row blocks and the number of column blocks.
    """
    r, c = tile.r, tile.c
    n, m, D = len(r), len(c), r.shape[1]
    no_pairs = m  # a diagonal that lies outside the tile
    groups = tile.groups or (None, None)
    persistent &= tile.groups is None
    precision = "tf32" if tile.tiling.precision == "tf32" else "ieee"
    tuned = 2 * _size_class(n, m, D) + persistent
    if persistent:
        # Tensor descriptors need an allocator. Triton keeps it per thread, so set it before every launch.
        triton.set_allocator(_allocate)

    def blocks(sizes: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(n, sizes["BLOCK_M"]), triton.cdiv(m, sizes["BLOCK_N"])

    def programs(sizes: dict[str, Any]) -> tuple[int]:
        count = math.prod(blocks(sizes))
        if sizes.get("PERSISTENT"):
            # Under the interpreter, run few programs, so that each of them computes several blocks.
            count = min(count, count_multiprocessors(r.device) if r.is_cuda else 4)
        return (count,)

    with torch.cuda.device_of(r):
        kernel[programs](
            r, c, n, m, D, no_pairs if tile.pairs is None else tile.pairs, *r.stride(), *c.stride(),
            tuned, *groups, *rest, PRECISION=precision, enable_fp_fusion=True, **options,
        )  # fmt: skip
    return blocks(kernel.best_config.kwargs)


def _can_describe(*tensors: Tensor) -> bool:
    """Return True if the GPU has tensor descriptors that accept the addresses and strides of these tensors."""
    device = tensors[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return all(
        x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
        for x in tensors
    )


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _size_class(n: int, m: int, D: int) -> int:
    """Return a key that is equal for tiles that share a configuration.

    The key is 0 if nothing is to be timed and the first configuration is used.
    """
    if n * m < kernels.LARGE or torch.are_deterministic_algorithms_enabled():
        return 0
    return (triton.next_power_of_2(D) << 12) + (n.bit_length() << 6) + m.bit_length()


def _partial_vectors(tile: Tile) -> tuple[Tensor, Tensor]:
    """Allocate partial results: one number per row for each column block, and one number per column for each row block.

    The memory is large enough for the smallest block sizes that may be chosen.
    """
    n, m = len(tile.r), len(tile.c)
    lowest = min(config.kwargs["BLOCK_M"] for config in kernels.CONFIGS)
    narrowest = min(config.kwargs["BLOCK_N"] for config in kernels.CONFIGS)
    return (
        tile.r.new_empty(triton.cdiv(m, narrowest), n, dtype=torch.float32),
        tile.r.new_empty(triton.cdiv(n, lowest), m, dtype=torch.float32),
    )


def _largest(
    row_max: Tensor, column_max: Tensor, rows: int, columns: int, maxima: bool
) -> tuple[Tensor | None, Tensor | None]:
    if not maxima:
        return None, None
    return row_max[:columns].amax(0), column_max[:rows].amax(0)
