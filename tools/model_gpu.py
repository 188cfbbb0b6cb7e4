"""Predict how fast the losses and a training step run on an H100 or H200, and print tables. No GPU is needed.

    python tools/model_gpu.py
    python tools/model_gpu.py --gpus H200 --shapes siglip:65536:65536:768 --models ViT-B-32:2048

The predictions use no measurements of this project. They use the machine code that the installed Triton generates
(compile_kernels.py), the traced operations of the towers, and three published rates:
- Large matrix products of a library reach 788 TFLOP/s on an H200 (torch, 8192^3), and 662 TFLOP/s on an H100.
- Reads from L2 reach 8.1 TB/s on an H100 in the fastest published matrix products.
- A product of 8192 x 8192 x 512 in blocks of 128 x 256 reaches 492 TFLOP/s on an H100 with one-shot programs. It
  reaches 540 TFLOP/s if the loads of the next block overlap the epilogue (Gluon tutorial 07). With an epilogue of 1,500
  cycles, this model gives 492 and 542 TFLOP/s.

A program computes one block of the tile at a time: first the matrix product, in a loop, and then an epilogue. A
one-shot program computes one block and ends. A persistent program computes several blocks.

The time of a block has two parts. The first is the longest of three times: for the product, for reads from L2, and for
issuing the instructions. The second is the time of the epilogue, during which the tensor cores wait. A one-shot program
also waits for its first operands. If two programs share a multiprocessor, one works while the other waits. A persistent
program loads the first operands of its next block during the epilogue. All multiprocessors compute a block, then all
compute the next one. In an epilogue, a scheduler issues one instruction per cycle in the case `best`, and 0.6
instructions per cycle in the case `expected`.
"""

# n rows, m columns, D width
# Cycles are clock cycles of a multiprocessor. The clock rate is the one that it has in large matrix products.

from __future__ import annotations

import argparse
import collections
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ISSUE = {"best": 1.0, "expected": 0.6}
"""Case -> instructions that one scheduler issues per cycle in an epilogue."""
FILL_CYCLES = 1000
"""Cycles that a one-shot program waits for its first operands."""
SMALL_CALLS_S = {"best": 0.15e-3, "expected": 0.4e-3}
"""Case -> seconds for the parts of a loss other than tiles and matrix products: operations on vectors, casts, and the
final copies of the gradients."""
LAUNCH_S = 4e-6


@dataclass(frozen=True)
class Card:
    matmul: float
    """FLOP/s of large 16-bit matrix products of a library."""
    memory: float
    """Bytes/s of memory that elementwise kernels reach: 80% of the rate in the data sheet."""
    multiprocessors: int = 132
    l2: float = 8.1e12
    peak: float = 989e12
    """FLOP/s in the data sheet, from which MFU is computed."""

    @property
    def clock(self) -> float:
        return self.matmul / (4096 * self.multiprocessors)


CARDS = {"H100": Card(662e12, 0.8 * 3.35e12), "H200": Card(788e12, 0.8 * 4.8e12)}
SHAPES = {
    "32,768 x 512": "softmax:32768:32768:512",
    "the same, stored": "stored:32768:32768:512",
    "share of 196,608 on 64": "softmax:3072:196608:512",
    "SigLIP 65,536 x 768": "siglip:65536:65536:768",
}
MODELS = ("ViT-B-32:2048", "ViT-B-16:768", "ViT-L-14:256")


def tile_s(card: Card, variant: str, n: int, m: int, D: int, case: str, persistent: bool) -> float:
    """Return the seconds that a kernel takes for one tile with the fastest configuration.

    Args:
        card: The GPU.
        variant: Name of the kernel in compile_kernels.VARIANTS.
        n: Number of rows of the tile.
        m: Number of columns of the tile.
        D: Width of the rows.
        case: A key of ISSUE.
        persistent: Whether configurations with persistent programs may be used.
    """
    return min(
        _timed(card, found, config, n, m, D, case)
        for found, config in _compiled(variant, D)
        if persistent or not config.kwargs.get("PERSISTENT")
    )


@cache
def _compiled(variant: str, D: int) -> list[tuple[Any, Any]]:
    """Compile a kernel with the default and all persistent configurations, and return those that fit the GPU."""
    import compile_kernels as tool

    configs = tool.cases(variant, "fp16", 90)
    chosen = [configs[0], *(x for x in configs if x.kwargs.get("PERSISTENT"))]
    found = [(tool.compile_kernel(variant, "fp16", D, x, 90), x) for x in chosen]
    return [(code, config) for code, config in found if code.fits]


def _timed(card: Card, code: Any, config: Any, n: int, m: int, D: int, case: str) -> float:
    rows, columns = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
    reads = 2 * (rows + columns) * D * card.multiprocessors / card.l2 * card.clock
    epilogue = code.epilogue_cycles / ISSUE[case]
    if config.kwargs.get("PERSISTENT"):
        passes = D / (config.kwargs["WIDTH_BYTES"] / 2)
        reads *= 1 - (config.num_stages - 1) / passes
        cycles = max(code.product_cycles, reads, code.issue_cycles - code.epilogue_cycles)
        cycles += epilogue
    else:
        cycles = max(code.product_cycles, reads, code.issue_cycles)
        cycles = max(cycles, (cycles + epilogue + FILL_CYCLES) / code.programs)
    blocks = math.ceil(n / rows) * math.ceil(m / columns)
    return math.ceil(blocks / card.multiprocessors) * cycles / card.clock


def product_s(card: Card, n: int, D: int, inner: int) -> float:
    """Return the seconds that torch takes to add the product [n, inner] @ [inner, D] to an fp32 tensor [n, D]."""
    # Smaller blocks have a lower rate, but fewer multiprocessors may be idle while the last blocks are computed.
    times = []
    for rows, columns, share in ((128, 256, 1.0), (128, 128, 0.85)):
        waves = math.ceil(math.ceil(n / rows) * math.ceil(D / columns) / card.multiprocessors)
        times.append(waves * 2 * rows * columns * inner / (4096 * share) / card.clock)
    return min(times) + 8 * n * D / card.memory


def loss_s(card: Card, kind: str, n: int, m: int, D: int, case: str, persistent: bool) -> float:
    """Return the seconds of forward and backward of a loss, without communication.

    Args:
        card: The GPU.
        kind: "softmax", "stored" (softmax with `store: true`) or "siglip".
        n: Number of rows of the rank's similarities.
        m: Number of columns of the rank's similarities.
        D: Width of the features.
        case: A key of ISSUE.
        persistent: Whether configurations with persistent programs may be used.
    """
    from disco_ds.losses.kernels.tiles import TILE_BYTES, Tiling, written_shape

    tiling, device = Tiling(None, "fp16"), torch.device("cuda")
    total = SMALL_CALLS_S[case]
    if kind != "siglip":
        variant = "exp_sums+keep" if kind == "stored" else "exp_sums"
        for i, j in tiling.cut(n, m, D, device, written=False):
            total += tile_s(card, variant, i.stop - i.start, j.stop - j.start, D, case, persistent)
    rows, columns = written_shape(n, D, TILE_BYTES // 2, card.multiprocessors)
    for i in range(0, n, rows):
        for j in range(0, m, columns):
            height, width = min(rows, n - i), min(columns, m - j)
            if kind == "stored":
                total += 4 * height * width / card.memory
            else:
                variant = "sigmoid-maxima" if kind == "siglip" else "exp_weights"
                total += tile_s(card, variant, height, width, D, case, persistent)
            total += product_s(card, height, D, width) + product_s(card, width, D, height)
    return total


VIEWS = {
    "view", "_unsafe_view", "expand", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "as_strided", "split", "split_with_sizes", "unbind", "chunk", "_reshape_alias", "empty", "empty_like",
    "new_empty", "empty_strided", "lift_fresh", "new_empty_strided", "unflatten",
}  # fmt: skip


class Roofline(TorchDispatchMode):
    """Dispatch mode that adds up the predicted times of all operations.

    The time of an operation is the longest of three times: for its FLOPs, for the bytes that it reads and writes, and
    for its launch.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card
        self.seconds: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in VIEWS or function.namespace != "aten":
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        seconds = sum(x.numel() * x.element_size() for x in tensors) / self.card.memory
        flops = flop_registry.get(function.overloadpacket)
        if "attention" in name:
            q = tensors[0]
            B, heads, length, width = q.shape
            count = 4 * B * heads * length**2 * width * (2.5 if "backward" in name else 1)
            seconds = max(seconds, count / (110e12 if length < 100 else 250e12))
        elif flops:
            count = flops(*args, **(kwargs or {}), out_val=out)
            seconds = max(seconds, count / (0.84 * self.card.matmul))
        kind = "products" if flops or "attention" in name else "other"
        self.seconds[kind] += max(seconds, LAUNCH_S)
        return out


def step(card: Card, name: str, micro_batch: int) -> tuple[float, float, float]:
    """Predict a training step in eager mode under autocast.

    Returns:
        Seconds of matrix products, seconds of all other work, and MFU.
    """
    from disco_ds.config import check_config
    from disco_ds.config.ds_config import read_ds_config
    from disco_ds.models.clip import build_model
    from disco_ds.models.flops import count_flops
    from disco_ds.plan import towers

    recipe = {
        "name": "x", "global_batch": micro_batch, "micro_batch": micro_batch, "steps": 10, "model": {"name": name},
        "data": {"source": "synthetic"}, "optim": {"lr": 1e-4, "warmup_steps": 0},
        "deepspeed": read_ds_config("zero1", Path.cwd()),
    }  # fmt: skip
    config = check_config(recipe, "model_gpu")
    with towers._fake(True):
        model = towers.prepare_model(config)
        batch = towers.make_batch(model, micro_batch)
        roofline = Roofline(card)

        @contextmanager
        def watch(part: str) -> Iterator[None]:
            if part in ("forward", "backward", "held"):
                with roofline:
                    yield
            else:
                yield

        towers.run_passes(model, "autocast", batch, config.data.augment, watch)
        num_parameters = sum(p.numel() for p in model.parameters())
    # AdamW reads and writes 28 bytes per parameter, and the copies of ZeRO 1 about 32 bytes. Assume that the GPU
    # also waits 3 ms for the host.
    roofline.seconds["other"] += 60 * num_parameters / card.memory + 3e-3
    flops = micro_batch * count_flops(build_model(config.model))
    products, other = roofline.seconds["products"], roofline.seconds["other"]
    return products, other, flops / (products + other) / card.peak


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument(
        "--shapes",
        nargs="*",
        metavar="KIND:ROWS:COLUMNS:D",
        help="KIND is softmax, stored or siglip (default: the shapes in docs/results.md)",
    )
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="MODEL:MICRO_BATCH")
    args = parser.parse_args()
    shapes = SHAPES if args.shapes is None else {x: x for x in args.shapes}
    if shapes:
        print("| loss, forward and backward, ms | GPU | one-shot | with persistent programs |")
        print("|---|---|---|---|")
    for label, text in shapes.items():
        kind, *sizes = text.split(":")
        n, m, D = map(int, sizes)
        for gpu in args.gpus:
            card = CARDS[gpu]
            ranges = [
                " to ".join(
                    f"{1e3 * loss_s(card, kind, n, m, D, case, persistent):.1f}" for case in ISSUE
                )
                for persistent in (False, True)
            ]
            print(f"| {label} | {gpu} | {' | '.join(ranges)} |", flush=True)
    if args.models:
        print("\n| eager step | GPU | products, ms | other, ms | samples/s | MFU at best |")
        print("|---|---|---|---|---|---|")
    for text in args.models:
        name, micro_batch = text.split(":")
        for gpu in args.gpus:
            products, other, mfu = step(CARDS[gpu], name, int(micro_batch))
            rate = int(micro_batch) / (products + other)
            times = f"{1e3 * products:.0f} | {1e3 * other:.0f}"
            print(
                f"| {name}, {micro_batch} | {gpu} | {times} | {rate:,.0f} | {mfu:.1%} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
