"""Evaluate exports with clip_benchmark on every data set in a folder.

    pip install clip_benchmark
    python examples/benchmark_exports.py exports/first exports/second --sets /data/sets --to results

Each folder in /data/sets that has clip_benchmark's webdataset layout (test/nshards.txt) is a data set. The result of a
model on a data set is kept in results/MODEL/SET.json, and is not computed again while that file exists. After an
interruption, or to add models or data sets, run the script again. It also writes results/results.jsonl, with one line
for each model, and prints a table. The models are exports in open_clip's format, and their names must differ.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

METRICS = {"zeroshot_classification": "acc1", "zeroshot_retrieval": "image_retrieval_recall@5"}
"""Task -> the metric that the table shows."""


def find_task(folder: Path) -> str:
    kind = folder / "dataset_type.txt"
    is_retrieval = kind.is_file() and kind.read_text().strip() == "retrieval"
    return "zeroshot_retrieval" if is_retrieval else "zeroshot_classification"


def evaluate(model: Path, folder: Path, to: Path, given: argparse.Namespace) -> None:
    """Evaluate a model on a data set in a new process, unless the result exists already."""
    if to.is_file():
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    # The file is renamed when it is complete, so that an interrupted evaluation is repeated.
    partial = to.with_suffix(".partial")
    program = "".join(f"import {name}; " for name in given.imports)
    program += "from clip_benchmark.cli import main; main()"
    command = [sys.executable, "-c", program, "eval", "--model", f"local-dir:{model}"]
    command += ["--dataset", f"wds/{folder.name}", "--dataset_root", str(folder)]
    command += ["--task", find_task(folder), "--output", str(partial)]
    command += ["--batch_size", str(given.batch_size), "--num_workers", str(given.workers)]
    if not given.amp:
        command.append("--no_amp")
    subprocess.run(command, check=True)
    os.replace(partial, to)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="exports in open_clip's format")
    parser.add_argument("--sets", type=Path, required=True, help="folder of data sets")
    parser.add_argument("--to", type=Path, required=True, help="folder for the results")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4, help="data workers of clip_benchmark")
    parser.add_argument("--amp", action="store_true", help="evaluate in mixed precision")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module first, as the README.md of an export may require",
    )
    given = parser.parse_args()
    sets = sorted(path.parents[1] for path in given.sets.glob("*/test/nshards.txt"))
    if not sets:
        raise SystemExit(f"{given.sets} has no folder with test/nshards.txt")
    if len({model.name for model in given.models}) < len(given.models):
        raise SystemExit("the exports must have different names")
    results = {model.name: evaluate_all(model, sets, given) for model in given.models}
    lines = [json.dumps({"model": name, "values": values}) for name, values in results.items()]
    (given.to / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    print(make_table(sets, results))


def evaluate_all(model: Path, sets: Sequence[Path], given: argparse.Namespace) -> dict[str, float]:
    """Return the model's metric on each data set."""
    values = {}
    for folder in sets:
        to = given.to / model.name / f"{folder.name}.json"
        evaluate(model, folder, to, given)
        values[folder.name] = json.loads(to.read_text())["metrics"][METRICS[find_task(folder)]]
    return values


def make_table(sets: Sequence[Path], results: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table with a row for each data set and a column for each model."""
    rows = [["data set", "metric", *results], ["---"] * (2 + len(results))]
    for folder in sets:
        values = [f"{values[folder.name]:.2%}" for values in results.values()]
        rows.append([folder.name, METRICS[find_task(folder)], *values])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
