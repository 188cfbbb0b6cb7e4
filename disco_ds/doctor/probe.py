"""What a host says of itself, as JSON: `python - REQUEST < probe.py`.

Sent to the host's Python as text, for disco_ds may be missing there, or another: so the standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def probe(asked: dict[str, Any]) -> dict[str, Any]:
    """Args: asked: `packages`, whose versions to tell; `folder`, of runs; `paths`, to look for."""
    now, start = time.time(), time.monotonic()
    same = {"Python": f"{platform.python_version()} at {sys.executable}", "code": _digest()}
    report = {
        "time": now,
        "same": same | {name: installed(name) for name in asked["packages"]},
        "devices": _count_devices(),
        "driver": os.path.exists("/proc/driver/nvidia/version"),
        "shm": shutil.disk_usage("/dev/shm").free,
        "disk": shutil.disk_usage(asked["folder"]).free if os.access(asked["folder"], os.W_OK) else None,
        "unseen": [path for path in asked["paths"] if not os.path.exists(path)],
    }
    return {**report, "seconds": time.monotonic() - start}


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _digest() -> str | None:
    """Of the package's files, without importing it; None: it is not there."""
    spec = importlib.util.find_spec("disco_ds")
    if spec is None or spec.origin is None:
        return None
    folder, digest = Path(spec.origin).parent, hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json", ".yaml")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _count_devices() -> int:
    try:
        import torch
    except Exception:  # whatever a broken installation raises: the versions tell
        return 0
    return torch.accelerator.device_count()


if __name__ == "__main__":
    print(json.dumps(probe(json.loads(sys.argv[1]))))
