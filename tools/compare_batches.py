"""Train the quickstart at several batch sizes, and on a quarter of the data; print the results as a Markdown table.

This asks the questions of DisCo-CLIP's Tables 5 and 6 on a small scale: What does the batch size change at equal
samples? How much better is more data than more epochs on less data? Each run has one process and one thread; `--jobs`
runs take place at a time, and finished runs are not repeated.

    python tools/compare_batches.py [--samples N] [--out DIR] [key=value ...]
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from grid import train_all

from disco_ds.data import index_shards, resolve_shards, write_manifest

BATCHES = (64, 128, 256, 512, 1024, 2048)
QUARTER_BATCHES = (64, 256, 1024)
MICRO_BATCH = 128
"""Larger batches are divided into micro-batches of this size (GradAccum)."""
WARMUP_SAMPLES = 5120
"""The recipe's 40 steps of 128: the same fraction of every run at any batch size."""


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    batch: int
    quarter: bool

    @property
    def name(self) -> str:
        return f"{'quarter' if self.quarter else 'all'}-{self.batch}"


def make_quarter(folder: Path) -> Path:
    """Link every fourth training shard into a separate folder. The shards were shuffled when they were written."""
    shards = sorted(resolve_shards("bundled:emoji/train").glob("*.tar"))[::4]
    folder.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        shutil.copy(shard, folder)
    write_manifest(index_shards(folder))
    return folder


def settings(cell: Cell, out: Path, samples: int) -> list[str]:
    """Return the settings of the run that differ from the recipe."""
    changes = [
        f"samples={samples}",
        f"global_batch={cell.batch}",
        f"micro_batch={min(cell.batch, MICRO_BATCH)}",
    ]
    changes += [f"optim.warmup_steps={max(1, WARMUP_SAMPLES // cell.batch)}"]
    changes += ["checkpoint.every_steps=0", "log.every_steps=5"]
    return changes + ([f"data.shards={out / 'quarter'}"] if cell.quarter else [])


def describe(cell: Cell, result: dict[str, float]) -> str:
    """Format the run's line of the table."""
    accuracies = [
        result[f"eval/{name}"] for name in ("validation_top1", "validation_top5", "unseen_top1")
    ]
    figures = " | ".join(f"{100 * value:.1f}" for value in accuracies)
    return f"| {'a quarter' if cell.quarter else 'all'} | {cell.batch} | {result['steps']:g} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=80_000, help="length of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of the runs")
    parser.add_argument("overrides", nargs="*", help="settings of every run, key=value")
    args = parser.parse_args()
    out = args.out.resolve()
    make_quarter(out / "quarter")
    cells = [Cell(batch, False) for batch in BATCHES] + [
        Cell(batch, True) for batch in QUARTER_BATCHES
    ]
    runs = {cell.name: settings(cell, out, args.samples) + args.overrides for cell in cells}
    results = train_all(runs, out, args.jobs, "quickstart").values()
    print(
        "| data | batch | steps | validation top-1 | top-5 | unseen top-1 |\n|---|---|---|---|---|---|"
    )
    print("\n".join(describe(cell, result) for cell, result in zip(cells, results, strict=True)))


if __name__ == "__main__":
    main()
