"""Check the hosts of a run: ssh access, identical software, a shared runs folder, GPUs and disk space.

`python -m disco_ds.checks.hosts TOKEN` prints the report of one host as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.checks import Line
from disco_ds.checks.versions import PACKAGES, installed
from disco_ds.config import PACKAGE
from disco_ds.runs.run_folder import make_token

_CONNECT_S = 10
"""Seconds that ssh may take to connect."""
_ANSWER_S = 120
"""Seconds that a host may take to answer, including the time it takes to import torch."""
_DISK_BYTES = 20e9
"""Warn below this free disk space: four AdamW checkpoints of 400 million parameters, 12 bytes per parameter."""
Report = dict[str, Any]


def check_hosts(runs: Path, slots: dict[str, int]) -> Iterator[Line]:
    """Check every host, over ssh if there are several.

    Args:
        runs: The folder for run folders, which all hosts must share. It may not exist yet.
        slots: Number of ranks per host; 0 means one per device.
    """
    runs = runs.absolute()
    folder = next(path for path in (runs, *runs.parents) if path.is_dir())
    try:
        token = make_token(folder)  # hosts that share the folder see this file
    except OSError as error:
        found = f"{folder} cannot be written to: {error.strerror}"
        yield Line("fail", "runs folder", found, "set runs=FOLDER to a writable folder")
        return
    try:
        mine = probe(token)
        reports = dict.fromkeys(slots, mine)
        if len(slots) > 1:
            with ThreadPoolExecutor(len(slots)) as pool:
                reports = dict(zip(slots, pool.map(partial(ask, token), slots), strict=True))
    finally:
        token.unlink(missing_ok=True)
    if len(slots) > 1:
        yield Line("ok", "ssh", f"{len(slots)} hosts answer")
        if shutil.which("pdsh") is None:
            yield Line("fail", "ssh", "pdsh is not installed on this host", "install pdsh")
        yield Line("ok", "environment", f"same Python, packages, code ({mine['same']['code']})")
    yield Line("ok", "runs folder", f"{folder}, {(mine['disk'] or 0) / 1e9:,.0f} GB free")
    yield Line("ok", "GPUs", f"{mine['devices']} on this host")
    for host, report in reports.items():
        yield from judge(host, report, mine, slots[host])


def probe(token: Path) -> Report:
    """Return this host's software, devices and free disk space.

    Args:
        token: A file in the runs folder, which shows whether this host sees the same folder.
    """
    import torch

    same = {name: installed(name) for name in PACKAGES}
    same["Python"] = f"{platform.python_version()} at {sys.executable}"
    same["code"] = _hash_code()
    shared = token.exists() and os.access(token.parent, os.W_OK)
    return {
        "same": same,
        "devices": torch.accelerator.device_count(),
        "driver": Path("/proc/driver/nvidia/version").exists(),
        "disk": shutil.disk_usage(token.parent).free if shared else None,
    }


def _hash_code() -> str:
    """Hash the names and contents of all files of disco_ds that affect a run."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json", ".yaml"):
            digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def ask(token: Path, host: str) -> Report:
    """Run this file on a host.

    Returns:
        The report of the host, or {"error": ...} if the host has not sent a report.
    """
    folder = str(Path.cwd())
    # Use the same Python and folder as here, so that packages and code can be compared with this host's.
    path = ":".join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    command = ["env", f"PYTHONPATH={path}", sys.executable, "-m", "disco_ds.checks.hosts"]
    user_options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    ssh = ["ssh", *user_options, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", host]
    ssh.append(f"cd {shlex.quote(folder)} && {shlex.join([*command, str(token)])}")
    try:
        done = subprocess.run(
            ssh, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {_ANSWER_S} s"}
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"{message} (exit code {done.returncode})"}
    # A login shell may print other lines first.
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def judge(host: str, report: Report, mine: Report, slots: int) -> Iterator[Line]:
    """Yield the problems of a host.

    Args:
        host: Name of the host.
        report: Report of the host.
        mine: Report of the host that runs the doctor, for comparison.
        slots: Number of ranks on the host; 0 means one per device.
    """
    if "error" in report:
        remedy = (
            f"make `ssh {host} true` work without a password (PDSH_SSH_ARGS_APPEND sets options of "
            "ssh), and install the same Python environment there"
        )
        yield Line("fail", "ssh", f"{host}: {report['error']}", remedy)
        return
    differences = [
        f"{key} {value}, here {mine['same'][key]}"
        for key, value in report["same"].items()
        if value != mine["same"][key]
    ]
    if differences:
        found = f"{host}: {'; '.join(differences)}"
        remedy = "install the same environment and code at the same path on all hosts"
        yield Line("fail", "environment", found, remedy)
    if report["disk"] is None:
        found = f"{host} does not see this host's folder, or cannot write to it"
        remedy = "choose a folder that all hosts share, such as runs=/shared/runs"
        yield Line("fail", "runs folder", found, remedy)
    elif report["disk"] < _DISK_BYTES:
        found = f"{host}: {report['disk'] / 1e9:.1f} GB free"
        yield Line("warn", "runs folder", found, "free some disk space")
    devices = report["devices"]
    # Missing GPUs are a failure only if this host has GPUs, or if `host` has an NVIDIA driver.
    if (devices < slots and mine["devices"]) or (report["driver"] and not devices):
        found = f"{host}: torch sees {devices} GPUs, the hostfile has {slots} slots"
        remedy = (
            "check nvidia-smi, CUDA_VISIBLE_DEVICES, and that this torch supports the driver; or use "
            "fewer slots"
        )
        yield Line("fail", "GPUs", found, remedy)
    elif not devices:
        yield Line("warn", "GPUs", f"{host} has none", "its ranks will run on the CPU")


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]))))
