"""Study which batch is best for the quickstart early, midway and late in training, for InfoNCE and siglip.

First, this tool trains the parents of the study: five runs of each loss, which differ in their seeds. They have a batch
of 128 and a constant learning rate. Then `disco-ds study` branches from the parents' checkpoints after 4,096, 16,384
and 65,536 samples. Up to `--jobs` processes run at a time, each with one thread. A second call does not repeat what has
finished. The tool prints the tables of the studies, and draws <out>/study.png.

    python tools/study_quickstart.py [--out DIR] [--jobs N]
"""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from grid import call, train_all

LOSSES = {"infonce": "disco", "siglip": "siglip"}
POINTS = (4096, 16384, 65536)
BATCHES = (64, 256, 1024)
SAMPLES = 4096
SEEDS = range(5)
BATCH = 128
METRICS = ("validation loss", "validation top-1")
CELL = re.compile(r"([\d.]+) ± ([\d.]+)")


def train_parents(out: Path, jobs: int) -> None:
    settings = {
        f"{name}-{seed}": [
            f"loss.name={loss}",
            f"seed={seed}",
            f"micro_batch={BATCH}",
            f"samples={POINTS[-1]}",
            "optim.schedule=constant",
            f"checkpoint.every_steps={POINTS[0] // BATCH}",
            "checkpoint.keep_last=null",
            "eval.labeled={}",
            "log.tensorboard=false",
        ]
        for seed, (name, loss) in product(SEEDS, LOSSES.items())
    }
    train_all(settings, out, jobs, "quickstart")


def study(name: str, samples: int, out: Path) -> str:
    """Run one study, which branches from the checkpoints of all seeds, and return its table.

    Args:
        name: A key of LOSSES.
        samples: Number of samples after which the checkpoints were saved.
        out: Folder of the parents and the studies.

    Raises:
        subprocess.CalledProcessError: If a branch fails. The reason is in <out>/study-<name>-<samples>.log.
    """
    folder = out / f"study-{name}-{samples}"
    step = f"step-{samples // BATCH:08}"
    arguments = ["study"]
    arguments += [str(out / f"{name}-{seed}" / "checkpoints" / step) for seed in SEEDS]
    arguments += ["--batches", *map(str, BATCHES), "--samples", str(SAMPLES), "--out", str(folder)]
    arguments += ["--set", "eval.labeled.validation=bundled:emoji/validation"]
    arguments += ["eval.validation.validation=bundled:emoji/validation"]
    arguments += ["eval.caption_key='{json[caption]}'", "log.tensorboard=false"]
    call(arguments, Path(f"{folder}.log"))
    return (folder / "study.md").read_text(encoding="utf-8")


def draw(tables: dict[tuple[str, int], str], path: Path) -> None:
    """Draw both metrics over the batch, with one line for each point of training.

    Args:
        tables: (loss, samples) -> table of the study in Markdown, with means and standard errors.
        path: Image file to write.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(LOSSES), figsize=(9, 6.5), layout="constrained")
    for (name, samples), table in tables.items():
        column = list(LOSSES).index(name)
        rows = [CELL.findall(line) for line in table.splitlines()]
        for row, metric in enumerate(METRICS):
            means, errors = zip(
                *((float(x), float(e)) for x, e in (cells[row] for cells in rows if cells)),
                strict=True,
            )
            ax = axes[row][column]
            ax.errorbar(BATCHES, means, errors, marker="o", capsize=3, label=f"{samples:,} samples")
            ax.set_xscale("log", base=2)
            ax.set_xticks(BATCHES, map(str, BATCHES))
            ax.set_ylabel(metric)
    for ax, name in zip(axes[0], LOSSES, strict=True):
        ax.set_title(name)
    for ax in axes[1]:
        ax.set_xlabel("global batch of the branches")
    lines, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, title="branched after", loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/study-quickstart"))
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one core each")
    args = parser.parse_args()
    out = args.out.resolve()
    train_parents(out, args.jobs)
    cases = [(name, samples) for samples in POINTS for name in LOSSES]
    with ThreadPoolExecutor(args.jobs) as pool:
        texts = list(pool.map(lambda case: study(*case, out), cases))
    tables = dict(zip(cases, texts, strict=True))
    for (name, samples), text in sorted(tables.items()):
        print(f"## {name} after {samples:,} samples\n\n{text}")
    draw(tables, out / "study.png")


if __name__ == "__main__":
    main()
