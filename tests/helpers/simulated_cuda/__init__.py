"""Run the package on a simulated GPU, to find tensors on the wrong device and points at which the host waits.

The GPU has no memory and computes nothing. Tensors have only a device, a dtype and a shape. The parts:
  cuda_stub.c   replaces CUDA's runtime and driver
  host.py       replaces the parts of torch that need values of tensors, and records what the host waits for
  cases.py      the code that is run
"""

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
"""Major version of CUDA whose functions cuda_stub.c defines."""


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    error: str | None
    """The traceback; None if the case passed."""
    waits: Counter[tuple[str, str]]
    """(what the host waited for, file and function) -> how often, in the part of the case that counts waits."""


def find_problem() -> str | None:
    """Return why no GPU can be simulated on this machine; None if it can."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD needs Linux"
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    if (torch.version.cuda or "").split(".")[0] != str(CUDA):
        return (
            f"the stub is for CUDA {CUDA}, torch is built for {torch.version.cuda or 'CPUs only'}"
        )
    headers = find_headers()
    if not any((folder / "crt").is_dir() for folder in headers):
        return "Triton's package contains no CUDA headers"
    version = re.search(r"define CUDART_VERSION +(\d+)", (headers[0] / HEADER).read_text())
    if version is None or int(version[1]) // 1000 != CUDA:
        return f"the CUDA headers in the packages of torch and Triton are not those of CUDA {CUDA}"
    return None


def find_headers() -> list[Path]:
    """Return the folders of CUDA headers that torch and Triton have installed, torch's first.

    Triton's may be of CUDA 12, but they contain files that torch's headers include.
    """
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
    """Compile the stub into a folder, and return the library.

    Raises:
        subprocess.CalledProcessError: If gcc fails.
    """
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Werror", f"-Wl,-soname,{library.name}"]
    include = [f"-I{folder}" for folder in find_headers()]
    command = ["gcc", *flags, *include, "-o", str(library), str(HERE / "cuda_stub.c")]
    subprocess.run(command, check=True, timeout=300)
    return library


def run(
    groups: dict[tuple[str, int, int], list[str]], folder: Path, timeout_s: float
) -> dict[str, Outcome]:
    """Run groups of cases, each group in one process, all processes at the same time.

    Args:
        groups: (any name, rank, number of ranks) of a process -> names of the cases that it runs.
        folder: Folder for the stub, results and logs.
        timeout_s: Time limit for each process.

    Returns:
        The outcomes by the name of the case.

    Raises:
        RuntimeError: If a process fails outside of its cases. The message contains its last lines.
        subprocess.TimeoutExpired: If a process takes too long.
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
