"""Run one recipe with several combinations of settings, for compare_losses.py and study_quickstart.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def train_all(
    runs: Mapping[str, list[str]], out: Path, jobs: int, recipe: str
) -> dict[str, dict[str, float]]:
    """Run all that have not finished yet, `jobs` at a time, each in one process with one thread.

    Args:
        runs: Name -> settings (key=value).
        out: Folder of the runs.
        jobs: Number of runs at a time.
        recipe: The recipe.

    Returns:
        Name -> content of finished.json.

    Raises:
        subprocess.CalledProcessError: If a run fails. Its output is in <out>/<name>.log.
    """
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(
            zip(
                runs, pool.map(lambda name: train(name, runs[name], out, recipe), runs), strict=True
            )
        )


def train(name: str, settings: list[str], out: Path, recipe: str) -> dict[str, float]:
    finished = out / name / "finished.json"
    if not finished.exists():
        shutil.rmtree(finished.parent, ignore_errors=True)
        arguments = ["train", "--config", recipe, f"name={name}", f"runs={out}", *settings]
        call(arguments, out / f"{name}.log")
    return json.loads(finished.read_text(encoding="utf-8"))


def call(arguments: list[str], log: Path) -> None:
    """Call disco-ds in a process with one thread on the CPU, and write its output to a file.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    with open(log, "w", encoding="utf-8") as file:
        subprocess.run(
            [sys.executable, "-m", "disco_ds", *arguments],
            env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | dict(os.environ),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
        )
