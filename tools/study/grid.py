"""Train the quickstart several times with different settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def train_all(runs: Mapping[str, list[str]], out: Path, jobs: int) -> dict[str, dict[str, float]]:
    """Train all runs that have not finished yet. Each run is one process with one thread.

    Args:
        runs: Name of a run -> its settings (key=value).
        out: Folder that contains the run folders.
        jobs: Number of runs that train at the same time.

    Returns:
        Name of a run -> content of its finished.json.

    Raises:
        subprocess.CalledProcessError: If a run fails. Its output is in <out>/<name>.log.
    """
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return dict(
            zip(runs, pool.map(lambda name: train(name, runs[name], out), runs), strict=True)
        )


def train(name: str, settings: list[str], out: Path) -> dict[str, float]:
    finished = out / name / "finished.json"
    if not finished.exists():
        shutil.rmtree(finished.parent, ignore_errors=True)
        arguments = ["train", "--config", "quickstart", f"name={name}", f"runs={out}", *settings]
        call(arguments, out / f"{name}.log")
    return json.loads(finished.read_text(encoding="utf-8"))


def call(arguments: list[str], log: Path) -> None:
    """Run a disco-ds command on the CPU, in a process with one thread, and write its output to `log`.

    Raises:
        subprocess.CalledProcessError: If the command fails.
    """
    with open(log, "w", encoding="utf-8") as file:
        subprocess.run(
            [sys.executable, "-m", "disco_ds", *arguments],
            env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | dict(os.environ),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
        )
