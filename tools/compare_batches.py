"""Train the quickstart at several batches, and on a quarter of the data, and print the results as a Markdown table.

In small what DisCo-CLIP's Tables 5 and 6 ask: what does the batch do at equal samples, and what is more data worth
against more epochs on less? One process and one thread per run, `--jobs` runs at a time; a run that has finished is not
done again. From a clone: python tools/compare_batches.py [--samples N] [--out DIR] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from disco_ds.data import index_shards, resolve_shards, write_manifest

BATCHES = (64, 128, 256, 512, 1024, 2048)
QUARTER_BATCHES = (64, 256, 1024)
MICRO_BATCH = 128
"""Larger batches are cut into micro-batches of this size (GradAccum)."""
WARMUP_SAMPLES = 5120
"""The recipe's 40 steps of 128: the same part of every run, whatever its batch."""


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    batch: int
    quarter: bool

    @property
    def name(self) -> str:
        return f"{'quarter' if self.quarter else 'all'}-{self.batch}"


def make_quarter(folder: Path) -> Path:
    """Every fourth shard of the training set, in a folder of its own. The shards were shuffled when they were made."""
    shards = sorted(resolve_shards("bundled:emoji/train").glob("*.tar"))[::4]
    folder.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        shutil.copy(shard, folder)
    write_manifest(index_shards(folder))
    return folder


def train(cell: Cell, out: Path, samples: int, overrides: list[str]) -> dict[str, float]:
    """Do a run, or find it done, and return its finished.json."""
    finished = out / cell.name / "finished.json"
    if not finished.exists():
        shutil.rmtree(finished.parent, ignore_errors=True)
        settings = [f"name={cell.name}", f"runs={out}", f"samples={samples}", f"global_batch={cell.batch}"]
        settings += [f"micro_batch={min(cell.batch, MICRO_BATCH)}", "checkpoint.every_steps=0", "log.every_steps=5"]
        settings += [f"optim.warmup_steps={max(1, WARMUP_SAMPLES // cell.batch)}"]
        settings += [f"data.shards={out / 'quarter'}"] if cell.quarter else []
        with open(out / f"{cell.name}.log", "w", encoding="utf-8") as log:
            subprocess.run(
                [sys.executable, "-m", "disco_ds.train", "--config", "quickstart", *settings, *overrides],
                env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | dict(os.environ),
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
    return json.loads(finished.read_text(encoding="utf-8"))


def describe(cell: Cell, result: dict[str, float]) -> str:
    """The cell's line of the table."""
    accuracies = [result[f"eval/{name}"] for name in ("validation_top1", "validation_top5", "unseen_top1")]
    figures = " | ".join(f"{100 * value:.1f}" for value in accuracies)
    return f"| {'a quarter' if cell.quarter else 'all'} | {cell.batch} | {result['steps']:g} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=80_000, help="length of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of the runs")
    parser.add_argument("overrides", nargs="*", help="settings of every run, key=value")
    args = parser.parse_args()
    out = args.out.resolve()
    make_quarter(out / "quarter")
    cells = [Cell(batch, False) for batch in BATCHES] + [Cell(batch, True) for batch in QUARTER_BATCHES]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda cell: train(cell, out, args.samples, args.overrides), cells))
    print("| data | batch | steps | validation top-1 | top-5 | unseen top-1 |\n|---|---|---|---|---|---|")
    print("\n".join(describe(cell, result) for cell, result in zip(cells, results, strict=True)))


if __name__ == "__main__":
    main()
