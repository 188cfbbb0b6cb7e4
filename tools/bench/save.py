"""Measure how long a training step waits for an asynchronous and for a synchronous save.

    python -m tools.bench.save --gb 1 4 --repeats 5 --folder /data/scratch

The tool runs on one rank. The state consists of fp32 tensors of 64 MB, on the GPU if there is one. They stand for the
master weights and the two AdamW moments that a rank saves at ZeRO 1. The files are written to a new folder in --folder,
with checksums and fsync, as in a training run.

The first asynchronous save is shown in a separate column, because it also allocates the host memory that later saves
use. All other results are medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from disco_ds.checkpoints.save import HostCopy, Save

PIECE = 64 * 10**6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gb", type=float, nargs="+", default=[1.0], help="sizes of the state, in 10^9 bytes"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("   GB  asynchronous s  first s  synchronous s")
    for gb in args.gb:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(measure(gb, args.repeats, Path(folder)), flush=True)


def measure(gb: float, repeats: int, folder: Path) -> str:
    """Measure saves of a state of `gb` GB, and return a line of the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pieces = max(round(gb * 1e9 / PIECE), 1)
    state = {f"part {k}": torch.full((PIECE // 4,), float(k), device=device) for k in range(pieces)}
    host = HostCopy()
    waits = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        save = _begin(folder / f"a{number}", host.take(state))
        waits.append(time.perf_counter() - start)
        _finish(save)
        _remove(folder)
    synchronous = []
    for number in range(max(repeats // 2, 1)):
        start = time.perf_counter()
        _finish(_begin(folder / f"s{number}", state))
        synchronous.append(time.perf_counter() - start)
        _remove(folder)
    first, *others = waits
    return f"{gb:5g}{median(others):16.3f}{first:9.3f}{median(synchronous):15.2f}"


def _begin(final: Path, state: dict[str, Any]) -> Save:
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir()
    return Save(final, partial, {"step": 0}, {partial / "rank_00000.pt": state})


def _finish(save: Save) -> None:
    for job in save.run():
        job.result()


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
