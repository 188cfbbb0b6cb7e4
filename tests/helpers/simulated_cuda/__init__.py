"""The training path on a GPU that is simulated: a process whose torch finds one, which has no memory.

cuda_stub.c answers for CUDA's runtime and driver; host.py does so for what torch would compute, and notes for what the
host waits; cases.py has what is run. Devices, dtypes and shapes are those of the real code, and nothing is computed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from helpers.paths import TESTS

HERE = Path(__file__).parent
HEADER = "cuda_runtime_api.h"
CUDA = 13
"""Version whose functions cuda_stub.c has."""


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    error: str | None
    """The traceback, None for a case that has passed."""
    waits: Counter[tuple[str, str]]
    """(what the host waits for, where) -> how often, in the part of the case that is counted."""


def find_problem() -> str | None:
    """Why no GPU can be simulated here, or None."""
    if not sys.platform.startswith("linux"):
        return "the stub is preloaded as on Linux"
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    if (torch.version.cuda or "").split(".")[0] != str(CUDA):
        return f"the stub is of CUDA {CUDA}'s runtime, torch is built for {torch.version.cuda or 'the CPU alone'}"
    headers = find_headers()
    if not any((folder / "crt").is_dir() for folder in headers):
        return "Triton, which comes with torch, has brought no CUDA headers"
    version = re.search(r"define CUDART_VERSION +(\d+)", (headers[0] / HEADER).read_text())
    if version is None or int(version[1]) // 1000 != CUDA:
        return f"the CUDA headers that torch and Triton have brought are not of CUDA {CUDA}"
    return None


def find_headers() -> list[Path]:
    """Folders of CUDA's headers: torch's, and Triton's, which may be of CUDA 12 but has what torch's include."""
    found = []
    for package, *parts in (
        ("nvidia", f"cu{CUDA}", "include"),
        ("triton", "backends", "nvidia", "include"),
    ):
        spec = find_spec(package)
        folders = [
            Path(x, *parts) for x in (spec.submodule_search_locations if spec else None) or ()
        ]
        found += [folder for folder in folders if (folder / HEADER).is_file()]
    return found


def build(folder: Path) -> Path:
    """Compile the stub. Raises: CalledProcessError."""
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Werror", f"-Wl,-soname,{library.name}"]
    include = [f"-I{folder}" for folder in find_headers()]
    command = ["gcc", *flags, *include, "-o", str(library), str(HERE / "cuda_stub.c")]
    subprocess.run(command, check=True, timeout=60)
    return library


def run(
    groups: dict[tuple[str, int, int], list[str]], folder: Path, timeout_s: float
) -> dict[str, Outcome]:
    """Cases by name, each group in a process of its own and all groups at once.

    Args:   groups: (any name, rank, number of ranks) -> the cases of that process; folder: to write to.
    Raises: RuntimeError with its last lines for a process that ends before its cases do; TimeoutExpired.
    """
    library = build(folder)
    started = []
    for (group, rank, size), names in groups.items():
        (folder / group).mkdir()
        out, log = folder / f"{group}.json", (folder / f"{group}.log").open("w+")
        environment = os.environ | {
            **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"},
            **{
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
                "DS_ACCELERATOR": "cuda",
                "OMP_NUM_THREADS": "1",
            },
            **{"LD_PRELOAD": str(library), "SIMULATED_CUDA": str(library)},
            "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))).rstrip(
                os.pathsep
            ),
        }
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "helpers.simulated_cuda.cases", str(out), *names]
        process = subprocess.Popen(
            command, env=environment, cwd=folder / group, stdout=log, stderr=subprocess.STDOUT
        )
        started.append((process, out, log))
    outcomes: dict[str, Outcome] = {}
    try:
        for process, out, log in started:
            if process.wait(timeout_s):
                log.seek(0)
                raise RuntimeError(f"exit code {process.returncode}:\n{log.read()[-4000:]}")
            outcomes |= {name: _read(value) for name, value in json.loads(out.read_text()).items()}
    finally:
        for process, _, log in started:
            process.kill()
            process.wait()
            log.close()
    return outcomes


def _read(value: dict[str, Any]) -> Outcome:
    return Outcome(
        value["error"], Counter({(kind, place): count for kind, place, count in value["waits"]})
    )
