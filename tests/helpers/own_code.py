"""Run disco-ds commands with a user's package on PYTHONPATH."""

import os
import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT


def disco_ds(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disco_ds", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT))),
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
