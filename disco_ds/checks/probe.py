"""Report a host's software, devices and disk space as JSON: `python - REQUEST < probe.py`.

This file is sent to each host as a program, because the host may have a different version of disco_ds.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Return this host's software, devices and free disk space.

    Args:
        request: `packages`: packages whose versions are reported. `folder`: the folder that should be shared.
            `token`: a file in that folder, which shows whether this host sees the same folder.
    """
    import torch

    same: dict[str, str | None] = {
        "Python": f"{platform.python_version()} at {sys.executable}",
        "code": _hash_code(),
    }
    for name in request["packages"]:
        same[name] = installed(name)
    folder = request["folder"]
    shared = os.path.exists(request["token"]) and os.access(folder, os.W_OK)
    return {
        "same": same,
        "devices": torch.accelerator.device_count(),
        "driver": os.path.exists("/proc/driver/nvidia/version"),
        "disk": shutil.disk_usage(folder).free if shared else None,
    }


def _hash_code() -> str:
    """Hash the names and contents of all files of disco_ds that affect a run."""
    package = Path(importlib.import_module("disco_ds").__file__ or "").parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".json", ".yaml"):
            digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(probe(json.loads(sys.argv[1]))))
