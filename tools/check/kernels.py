"""Check the Triton kernels on this GPU.

    python -m tools.check.kernels --budget 540            works for up to 540 s; repeat it until no slice is left
    python -m tools.check.kernels --only "forced bf16 *"  runs only some slices

At each precision, the results of Triton and of torch are compared with float64 results. The error of a result is its
largest difference from float64, divided by the largest float64 value. A check fails if Triton's error exceeds twice
torch's error by more than rounding explains (tiles.py). For losses, the error of a gradient is measured by the norms
of its rows, and there are additional limits (losses.py).

The work is divided into slices (tools/bench/slices.py), each of which runs in a separate process. P is a precision, and
C is a configuration of a kernel, which consists of block sizes, numbers of warps and stages, and flags:
  default P    checks tiles, and blocks of tiles, with the configuration that is used without autotuning
  losses P     checks complete losses, called as in training (losses.py)
  float64      compares the float64 results of this GPU with those of a CPU
  far          checks rows, columns and tiles that lie more than 2^31 elements after the start of their tensor
  forced P C   checks tiles with a configuration that the autotuner may choose. In fp16 and bf16, it also checks that
               repeated results are bitwise equal

The exit code is 1 if a check fails, if a slice crashes or takes too long, or if there is no GPU (without --rehearse).
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses.kernels.tiles import Precision, Tiling
from tools.bench import slices
from tools.bench.slices import Outcome, Record, Slice
from tools.check import losses as loss_checks
from tools.check.tiles import (
    SHIFT,
    Check,
    OnTile,
    Tile,
    check_blocks,
    check_tiles,
    device,
    error,
    features,
    keep,
    on_tile,
    poisoned,
    sums_on_tile,
)

# n rows, m columns, D width
FOLDER = "runs/check_kernels"
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "tf32", "fp32")


@dataclass(frozen=True)
class Sizes:
    square: Tile
    """Tile with the default size for the functions that write a weight for each of its entries."""
    wide: Tile
    """Tile with the default size for the functions that compute only sums and maxima of rows and columns."""
    block: Tile
    """Block that is computed in tiles of the default size. In FULL, it is larger than one tile, `square`."""
    ragged: Tile
    others: tuple[Tile, ...]
    batch: int
    """Global batch of the slices that check losses."""
    far: int
    """Number of elements that check_far puts in front of the checked elements in the same tensor."""
    repeats: int
    """Number of times that check_bits repeats a computation to compare the result bitwise with the first one."""


FULL = Sizes(
    Tile(8192, 8192, 512, 0),
    Tile(16384, 16384, 512, -5),
    Tile(9000, 17000, 512, 100),
    Tile(513, 1025, 515, -7, "strided"),
    (
        Tile(4096, 4096, 768, 0),
        Tile(1000, 1024, 512, 500, "strided"),
        Tile(1, 1, 1, 0, "strided"),
        Tile(127, 129, 64, None, "strided"),
        Tile(300, 200, 100, 3, "transposed"),
        Tile(2000, 3000, 640, -64),
        Tile(3000, 2000, 1024, None),
        Tile(1500, 1500, 1152, 7),
    ),
    9000,
    1 << 31,
    100,
)
REHEARSAL = Sizes(
    Tile(64, 64, 32, 0), Tile(65, 70, 32, -5), Tile(40, 70, 16, 10), Tile(33, 40, 19, -7, "strided"),
    (Tile(20, 30, 24, 3, "transposed"), Tile(1, 1, 1, 0, "strided")), 33, 1 << 12, 2,
)  # fmt: skip


def factors(tile: Tile) -> tuple[Tensor, Tensor]:
    """Return random unit rows [n, D] and columns [m, D] with the sizes and the memory layout of `tile`."""
    rows = features(tile.n, tile.D, device(), 1, tile.layout)
    return rows, features(tile.m, tile.D, device(), 2, tile.layout)


def check_far(beyond: int, record: Record) -> None:
    """Check rows, columns and weights that lie more than `beyond` elements after the start of their tensor.

    With `beyond` = 2^31, this takes 9 GB of memory.
    """
    from disco_ds.losses.kernels import triton_tiles as tiles

    n, D, tiling = (
        min(300, beyond >> 6),
        min(512, beyond >> 6),
        Tiling(precision="fp16", impl="triton"),
    )
    shift, scale = (torch.tensor([x], dtype=torch.float64, device=device()) for x in (SHIFT, 14.3))
    near, last = (
        tiling.quantize_tile(features(n, D, device(), 1)),
        tiling.quantize_tile(features(n, D, device(), 2)),
    )
    true = (near.double() @ last.double().T * scale - shift).exp()

    def note(name: str, got: Tensor, right: Tensor, like: torch.dtype = torch.float32) -> None:
        """Record the error of `got`. It may be about twice the error of rounding `right` to the dtype `like`."""
        keep(record, "far", Check(name, error(got, right), error(right.to(like), right)))

    with slices.case(record, case="far rows and columns"):
        far = torch.zeros(beyond // D + n, D, dtype=near.dtype, device=device())
        far[-n:] = last
        sums = partial(tiles.exp_sums, scale=scale.float(), shift=shift, maxima=False)
        note("rows", sums(tiles.Tile(far, near, None, tiling, None))[0][-n:], true.sum(0))
        note(
            "columns",
            sums(tiles.Tile(near, far, None, tiling, None))[1][-n:],
            true.sum(0),
        )
        del far
    a, beta = (torch.rand(n, device=device()) for _ in "ab")
    weights = true * (a[:, None] + beta).double()
    with slices.case(record, case="far weights"):
        across = 1 + (beyond >> 25)
        down = beyond // (across * n) // n + 2
        out = torch.empty(down * n, across * n, dtype=near.dtype, device=device())
        whole = tiles.Tile(near.repeat(down, 1), last.repeat(across, 1), None, tiling, out)
        W = tiles.exp_weights(whole, scale.float(), shift, a.repeat(down), beta.repeat(across))
        note("weights", W[-n:, -n:], weights, near.dtype)


def check_default(precision: Precision, sizes: Sizes, record: Record) -> None:
    # In deterministic mode, the kernels are not autotuned, and torch.empty fills its memory with NaN.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    check_square(precision, sizes, record)
    for tile in sizes.others:
        check_tile(tile, Tiling(None, precision, "triton"), record)
    grouped = partial(on_tile, grouped=True)
    check_tile(sizes.ragged, Tiling(None, precision, "triton"), record, grouped)
    for tile, cut in ((sizes.ragged, (256, 512)), (sizes.block, None)):
        with slices.case(record, case=f"block {tile}"):
            rows, columns = factors(tile)
            tiling = Tiling(cut, precision, "triton")
            for check in check_blocks(rows, columns, tile.pairs, tiling):
                keep(record, f"block {tile}", check)


def check_forced(precision: Precision, number: int, sizes: Sizes, record: Record) -> None:
    from disco_ds.losses.kernels import triton_kernels as kernels

    kernels.force(configurations(precision)[number])
    check_square(precision, sizes, record)
    if precision in ("fp16", "bf16"):
        check_bits(precision, sizes, record)


def check_bits(precision: Precision, sizes: Sizes, record: Record) -> None:
    """Compute each result repeatedly, and count how often its bits differ from the first result.

    A race between the copies of operands and the matrix multiplications can cause such differences.
    """
    from disco_ds.losses.kernels import triton_tiles as tiles

    n, m = sizes.square.n, sizes.square.m
    tiling = Tiling(None, precision, "triton")
    rows, columns = (tiling.quantize_tile(x) for x in factors(sizes.square))
    shift = torch.tensor([SHIFT], dtype=torch.float64, device=device())
    scale, bias = (torch.tensor([x], device=device()) for x in (14.3, -9.0))
    a, beta = torch.rand(n, device=device()), torch.rand(m, device=device())
    with slices.case(record, case=f"{sizes.repeats} repeats"):
        tile = tiles.Tile(rows, columns, 0, tiling, poisoned(n, m, rows.dtype, rows.device))
        results: dict[str, Callable[[], Sequence[Tensor]]] = {
            "sums": lambda: tiles.exp_sums(tile, scale, shift, False)[:2],
            "weights": lambda: [tiles.exp_weights(tile, scale, shift, a, beta)],
            "sigmoid weights": lambda: tiles.sigmoid_weights(tile, scale, bias, False)[:3],
        }
        for name, compute in results.items():
            first = [x.clone() for x in compute()]
            differing = sum(
                not all(map(torch.equal, first, compute())) for _ in range(sizes.repeats)
            )
            keep(record, "repeats", Check(f"{name} with other bits", differing, 0.0))


def check_square(precision: Precision, sizes: Sizes, record: Record) -> None:
    """Check the tiles `sizes.square`, `sizes.wide` and `sizes.ragged`.

    The first two have default sizes. The sizes of the last one are not multiples of the kernels' block sizes.
    """
    tiling = Tiling(None, precision, "triton")
    check_tile(sizes.square, tiling, record)
    check_tile(sizes.wide, tiling, record, sums_on_tile)
    check_tile(sizes.ragged, tiling, record)


def check_tile(tile: Tile, tiling: Tiling, record: Record, on: OnTile | None = None) -> None:
    with slices.case(record, case=str(tile)):
        rows, columns = factors(tile)
        for check in check_tiles(rows, columns, tile.pairs, tiling, on):
            keep(record, str(tile), check)


def check_losses(precision: Precision, sizes: Sizes, record: Record) -> None:
    loss_checks.check(precision, sizes.batch, sizes.square.D, record)


def check_reference(sizes: Sizes, record: Record) -> None:
    loss_checks.check_reference(sizes.batch, sizes.square.D, record)


def configurations(precision: str) -> list[Any]:
    from disco_ds.losses.kernels import triton_kernels as kernels

    return kernels.PLAIN_CORES if precision == "fp32" else [*kernels.LIGHT, *kernels.HEAVY]


def in_short(config: Any) -> str:
    sizes = config.kwargs
    block = f"{sizes['BLOCK_M']}x{sizes['BLOCK_N']} w{config.num_warps} s{config.num_stages}"
    return block + " persistent" * sizes.get("PERSISTENT", False)


def work(sizes: Sizes) -> dict[Slice, Callable[[Record], None]]:
    """Return all slices, and for each the function that runs it."""
    found: dict[Slice, Callable[[Record], None]] = {}
    for precision in PRECISIONS:
        found[Slice(f"default {precision}", 100)] = partial(check_default, precision, sizes)
    for precision in ("auto", *PRECISIONS[1:]):
        found[Slice(f"losses {precision}", 150)] = partial(check_losses, precision, sizes)
    found[Slice("float64", 30)] = partial(check_reference, sizes)
    found[Slice("far", 30)] = partial(check_far, sizes.far)
    for precision in PRECISIONS:
        for number, config in enumerate(configurations(precision)):
            name = f"forced {precision} {in_short(config)}"
            found[Slice(name, 60)] = partial(check_forced, precision, number, sizes)
    return found


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=4,
        help="number of slices that run at the same time (default: 4)",
    )
    args = slices.parse(parser, argv, FOLDER)
    if not (torch.cuda.is_available() or args.rehearse):
        print(
            "no GPU here: --rehearse runs every slice on tiny tiles under Triton's interpreter",
            file=sys.stderr,
        )
        return 1
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    todo = work(REHEARSAL if args.rehearse else FULL)
    if args.slice:
        do = next(do for x, do in todo.items() if x.name == args.slice)
        return slices.run_here(args, do)
    outcomes, left = slices.run(list(todo), args, args.jobs, show)
    print("\n".join(summary(outcomes)))
    if left:
        print(f"{left} slices are left: repeat the command")
    return int(
        any(failures(name, x) or x.end not in (None, "done") for name, x in outcomes.items())
    )


def failures(name: str, outcome: Outcome) -> list[dict[str, Any]]:
    return [
        x
        for x in outcome.records
        if not x.get("ok", "problem" not in x) and not does_not_fit(name, x)
    ]


def does_not_fit(name: str, record: dict[str, Any]) -> bool:
    """Return whether a forced configuration failed because it needs more shared memory than this GPU has."""
    return name.startswith("forced") and record.get("problem", "").startswith("OutOfResources")


def show(name: str, outcome: Outcome) -> str:
    """Describe the result of a slice that has ended: one line, and a line for each failed check."""
    lines = [in_a_line(name, outcome)]
    for x in failures(name, outcome):
        errors = f": Triton {x['triton']:.1e}, torch {x['torch']:.1e}" if "triton" in x else ""
        lines.append(f"  FAILED {x['case']}: {x.get('problem') or x['what'] + errors}")
    return "\n".join(lines)


def in_a_line(name: str, outcome: Outcome) -> str:
    checks, unfit = (
        sum("ok" in x for x in outcome.records),
        sum(does_not_fit(name, x) for x in outcome.records),
    )
    notes = [f"{unfit} do not fit this GPU"] if unfit else []
    notes += [] if outcome.end == "done" else [str(outcome.end)]
    counts = f"{checks:>6} checks{len(failures(name, outcome)):>5} failed{outcome.seconds:>7.0f} s"
    return f"{name:<28}{counts}  {', '.join(notes)}".rstrip()


def summary(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Yield the lines of the summary: the machine and each slice."""
    yield ""
    for where in {str(x.where): x.where for x in outcomes.values() if x.where}.values():
        yield f"{where['device']}, {where['date']}, " + ", ".join(
            f"{k} {v}" for k, v in where["versions"].items()
        )
    for name, outcome in outcomes.items():
        yield in_a_line(name, outcome)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
