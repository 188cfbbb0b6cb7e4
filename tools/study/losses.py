"""Train the quickstart with several losses and seeds, all on the same number of samples, and compare the accuracies.

    python -m tools.study.losses [key=value ...] [--losses ...] [--batches ...]
    python -m tools.study.losses --of fastclip_v3 optim.tau_lr=1e-4          changes a setting for one loss only

Like FastCLIP's tables, but on a small scale, this shows which loss learns most from small batches. The tool prints a
table with the mean and standard deviation over seeds. Each run has one process with one thread; --jobs N runs N
trainings in parallel. Runs that have already finished are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from disco_ds.losses import list_losses
from tools.study.grid import train_all

LOSSES = ("clip", "siglip", "sogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3")
WARMUP_SAMPLES = 5120
"""Length of the warmup in samples at every batch size. The quickstart recipe has 40 warmup steps of 128 samples."""
SHOWN = {
    "eval/validation_top1": "validation top-1",
    "eval/validation_top5": "top-5",
    "eval/unseen_top1": "unseen top-1",
    "eval/unseen_top5": "top-5",
}
Results = dict["Cell", list[dict[str, float]]]


@dataclass(frozen=True)
class Cell:
    """One row of the table: runs that differ only in their seeds."""

    loss: str
    batch: int
    optimizer: str

    def name(self, seed: int) -> str:
        return f"{self.loss}-{self.batch}-{self.optimizer}-seed{seed}"

    def settings(self, seed: int, samples: int) -> list[str]:
        """Return the settings of a run that differ from the recipe."""
        return [
            f"loss={{name: {self.loss}}}",
            f"global_batch={self.batch}",
            f"micro_batch={self.batch}",
            f"optim.name={self.optimizer}",
            f"optim.warmup_steps={max(1, WARMUP_SAMPLES // self.batch)}",
            f"samples={samples}",
            f"seed={seed}",
            "checkpoint.every_steps=0",
            "log.every_steps=20",
        ]


def compare(cells: list[Cell], args: argparse.Namespace) -> Results:
    own = {loss: changes for loss, *changes in args.of}
    runs = {
        cell.name(seed): cell.settings(seed, args.samples) + args.overrides + own.get(cell.loss, [])
        for seed, cell in itertools.product(args.seeds, cells)
    }
    found = train_all(runs, args.out.resolve(), args.jobs)
    return {cell: [found[cell.name(seed)] for seed in args.seeds] for cell in cells}


def spread(values: Iterable[float]) -> str:
    """Format the mean and standard deviation of fractions, in percent."""
    percent = [100 * value for value in values]
    return (
        f"{mean(percent):.1f} ± {stdev(percent):.1f}" if len(percent) > 1 else f"{percent[0]:.1f}"
    )


def describe(results: Results) -> str:
    lines = [
        f"| batch | loss | optimizer | {' | '.join(SHOWN.values())} |",
        f"|---|---|---|{'---|' * len(SHOWN)}",
    ]
    for cell, runs in results.items():
        figures = " | ".join(spread(run[key] for run in runs) for key in SHOWN)
        lines.append(f"| {cell.batch} | `{cell.loss}` | {cell.optimizer} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--losses", nargs="+", default=LOSSES, choices=list_losses(), metavar="LOSS"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=(64, 128), help="global batches")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=("muon",),
        choices=("adamw", "lamb", "lion", "muon", "sgd"),
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--samples", type=int, default=60_000, help="training samples of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument(
        "--of", nargs="+", action="append", default=[], metavar=("LOSS", "key=value")
    )
    parser.add_argument("--out", type=Path, default=Path("runs/losses"), help="folder of the runs")
    parser.add_argument("overrides", nargs="*", help="settings of every run, key=value")
    args = parser.parse_args()
    cells = [
        Cell(loss, *rest)
        for *rest, loss in itertools.product(args.batches, args.optimizers, args.losses)
    ]
    print(describe(compare(cells, args)))


if __name__ == "__main__":
    main()
