"""Measure the speed of the Triton kernels on large tiles.

Each autotuned kernel runs with the configuration that the autotuner chooses. The matrix products that torch computes
with a tile of weights are measured too. check_kernels.py runs these measurements.
"""

# n rows and columns of a tile, D width

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import slices
import torch
from slices import Record
from tile_checks import SHIFT, device, features
from timing import matmul_tflops, median_ms

from disco_ds.losses.kernels import Tiling


class Call(NamedTuple):
    name: str
    kernel: str | None
    """Name of the Triton kernel whose configuration and registers are reported. None: nothing is reported."""
    n: int
    do: Callable[[], object]


def measure_rates(
    precision: str, n: int, wide: int, widths: tuple[int, ...], record: Record
) -> None:
    """Measure every call that `calls` yields, at every width.

    Args:
        precision: Precision of the matrix multiplications.
        n: Number of rows, and of columns, of a tile whose weights are computed.
        wide: Number of rows, and of columns, of a tile whose sums are computed.
        widths: Values of D.
        record: Called with each result.
    """
    matmul = matmul_tflops()
    for D in widths:
        for call in calls(precision, n, wide, D):
            with slices.case(record, case=f"{call.name}, D {D}"):
                chosen = launched(call)
                ms = median_ms(call.do, *((10, 3) if torch.cuda.is_available() else (1, 0)))
                tflops = 2 * call.n**2 * D / ms / 1e9
                record(
                    rate=call.name,
                    D=D,
                    n=call.n,
                    ms=ms,
                    tflops=tflops,
                    share=tflops / matmul,
                    **chosen,
                )


def calls(precision: str, n: int, wide: int, D: int) -> Iterator[Call]:
    from disco_ds.losses.kernels import triton_tiles as tiles

    tiling, d = Tiling(None, precision, "triton"), device()
    r, c = (tiling.round(features(wide, D, d, seed, "contiguous")) for seed in (1, 2))
    R, C, many = r[:n], c[:n], torch.full((wide,), 14.3, device=d)
    scale, bias, shift = (
        many[:1],
        torch.tensor([-10.0], device=d),
        torch.tensor([SHIFT], dtype=torch.float64, device=d),
    )
    whole = tiles.Tile(r, c, 0, tiling, None)
    yield Call("sums", "exp_sums", wide, lambda: tiles.exp_sums(whole, scale, shift, False))
    yield Call("sums, maxima", "exp_sums", wide, lambda: tiles.exp_sums(whole, scale, shift, True))
    a, out, total = (
        torch.rand(n, device=d),
        torch.empty(n, n, dtype=r.dtype, device=d),
        torch.zeros(n, D, device=d),
    )
    part = tiles.Tile(R, C, 0, tiling, out)
    yield Call("weights", "exp_weights", n, lambda: tiles.exp_weights(part, scale, shift, a, a))
    yield Call("log sums", "log_sums", wide, lambda: tiles.log_sums(whole, many, many, False))
    some, moments = many[:n], tuple(torch.zeros(n, dtype=torch.float64, device=d) for _ in "ab")
    yield Call("log weights", "log_weights", n, lambda: tiles.log_weights(part, some, some, a, a))
    yield Call(
        "log weights, moments",
        "log_weights",
        n,
        lambda: tiles.log_weights(part, some, some, a, a, moments),
    )
    yield Call(
        "sigmoid", "sigmoid_weights", n, lambda: tiles.sigmoid_weights(part, scale, bias, False)
    )
    yield Call(
        "sigmoid, maxima",
        "sigmoid_weights",
        n,
        lambda: tiles.sigmoid_weights(part, scale, bias, True),
    )
    yield Call("torch: W columns", None, n, lambda: tiling.add_product(total, out, C))
    yield Call("torch: W^T rows", None, n, lambda: tiling.add_product(total, out.T, R))


def launched(call: Call) -> dict[str, Any]:
    """Run a call once, and describe the kernel that it launches.

    Returns:
        The chosen configuration, registers per thread, spilled registers and shared memory in bytes. Under Triton's
        interpreter, only the configuration. If the call names no kernel, an empty dict.
    """
    if call.kernel is None:
        return {}
    from disco_ds.losses.kernels import triton_kernels

    kernel = getattr(triton_kernels, f"{call.kernel}_kernel")
    compiled: list[Any] = []
    run = kernel.fn.run

    def noting(*args: Any, **options: Any) -> Any:
        compiled.append(run(*args, **options))
        return compiled[-1]

    with mock.patch.object(kernel.fn, "run", noting):
        call.do()
    code, found = compiled[-1], {"config": in_short(kernel.best_config)}
    if code is None:  # Triton's interpreter compiles nothing
        return found
    return found | {
        "registers": code.n_regs,
        "spilled": code.n_spills,
        "shared": code.metadata.shared,
    }


def in_short(config: Any) -> str:
    sizes = config.kwargs
    block = f"{sizes['BLOCK_M']}x{sizes['BLOCK_N']} w{config.num_warps} s{config.num_stages}"
    return block + " persistent" * sizes.get("PERSISTENT", False)


def table(rates: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table of rates.

    Args:
        rates: Pairs of the name of a slice and a record that `measure_rates` has added.
    """
    yield (
        f"\n{'':<12}{'':<22}{'n = m':>7}{'D':>6}{'ms':>9}{'TFLOP/s':>9}{'of matmul':>10}  "
        f"{'configuration':<26}{'registers':>9}{'spilled':>8}{'shared KB':>10}"
    )
    for name, x in rates:
        code = (
            f"{x['registers']:>9}{x['spilled']:>8}{x['shared'] / 1024:>10.0f}"
            if "registers" in x
            else ""
        )
        yield (
            f"{name:<12}{x['rate']:<22}{x['n']:>7}{x['D']:>6}{x['ms']:>9.3f}{x['tflops']:>9.0f}"
            f"{100 * x['share']:>9.0f}%  {x.get('config', ''):<26}{code}"
        )
