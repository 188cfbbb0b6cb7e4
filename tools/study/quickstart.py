"""Study which batch is best for the quickstart early, midway and late in training, for InfoNCE and siglip.

First, this tool trains the parents of the study: five runs of each loss, which differ in their seeds. They have a batch
of 128 and a constant learning rate. Then `batches` branches from the parents' checkpoints after 4,096, 16,384
and 65,536 samples. Up to `--jobs` processes run at a time, each with one thread. Runs that have finished are not
repeated by a second call. The tool prints the tables of the studies.

    python -m tools.study.quickstart [--out DIR] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

LOSSES = {"infonce": "disco", "siglip": "siglip"}
POINTS = (4096, 16384, 65536)
BATCHES = (64, 256, 1024)
SAMPLES = 4096
SEEDS = range(5)
BATCH = 128


def call(module: str, arguments: list[str], log: Path) -> None:
    """Run a Python module on the CPU, in a process with one thread, and write its output to `log`.

    Raises:
        subprocess.CalledProcessError: If the module fails.
    """
    with open(log, "w", encoding="utf-8") as file:
        subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | dict(os.environ),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
        )


def train(name: str, settings: list[str], out: Path) -> None:
    """Train the run <out>/<name>, unless it has finished. Its output is in <out>/<name>.log."""
    folder = out / name
    if not (folder / "finished.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        arguments = ["train", "--config", "quickstart", f"name={name}", f"runs={out}", *settings]
        call("disco_ds", arguments, out / f"{name}.log")


def train_parents(out: Path, jobs: int) -> None:
    runs = {
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
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda name: train(name, runs[name], out), runs))


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
    arguments = [str(out / f"{name}-{seed}" / "checkpoints" / step) for seed in SEEDS]
    arguments += ["--batches", *map(str, BATCHES), "--samples", str(SAMPLES), "--out", str(folder)]
    arguments += ["--set", "eval.labeled.validation=bundled:emoji/validation"]
    arguments += ["eval.validation.validation=bundled:emoji/validation"]
    arguments += ["eval.caption_key='{json[caption]}'", "log.tensorboard=false"]
    call("tools.study.batches", arguments, Path(f"{folder}.log"))
    return (folder / "study.md").read_text(encoding="utf-8")


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
        texts = list(pool.map(lambda case: study(case[0], case[1], out), cases))
    tables = dict(zip(cases, texts, strict=True))
    for (name, samples), text in sorted(tables.items()):
        print(f"## {name} after {samples:,} samples\n\n{text}")


if __name__ == "__main__":
    main()
