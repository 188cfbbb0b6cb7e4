"""A host's report on itself, as JSON: `python - REQUEST < probe.py`, as disco_ds may be another version there."""

from __future__ import annotations

import hashlib
import importlib
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
    """What this host has. Args: asked: `packages` to give versions of; the `folder` of runs; `token`, a file in it."""
    now, start = time.time(), time.monotonic()
    import torch  # this takes a while

    package, digest = Path(importlib.import_module("disco_ds").__file__ or "").parent, hashlib.sha256()
    # Every file that can change what a run does, by name and content.
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json", ".yaml")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    own = {"Python": f"{platform.python_version()} at {sys.executable}", "code": digest.hexdigest()[:12]}
    shared = os.path.exists(asked["token"]) and os.access(asked["folder"], os.W_OK)
    return {
        "time": now,
        "same": own | {name: installed(name) for name in asked["packages"]},
        "devices": torch.accelerator.device_count(),
        "driver": os.path.exists("/proc/driver/nvidia/version"),
        "memory": free_memory_bytes(),
        "disk": shutil.disk_usage(asked["folder"]).free if shared else None,
        "seconds": time.monotonic() - start,
    }


def free_memory_bytes() -> int:
    """Memory that is available without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(fields["MemAvailable"].split()[0])


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(probe(json.loads(sys.argv[1]))))
