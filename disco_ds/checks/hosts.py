"""Checks of the hosts of a run: ssh reaches them as DeepSpeed does, they are alike, and they have room."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.checks import Line, probe
from disco_ds.checks.versions import PACKAGES
from disco_ds.config import Config
from disco_ds.data.staging import LEAST_AHEAD
from disco_ds.metrics.run_folder import make_token
from disco_ds.models.clip import read_architecture

_CONNECT_S, _ANSWER_S = 10, 120
"""Seconds for ssh to connect, and for the answer, which takes an import of torch."""
_CLOCK_S = 2.0
_DISK_BYTES = 20e9
"""Room for four checkpoints of 400 million parameters, of 12 bytes each with AdamW."""
Report = dict[str, Any]


def check_hosts(config: Config, slots: dict[str, int]) -> Iterator[Line]:
    """Check every host, over ssh if there are several.

    Args: slots: ranks by host; 0: as many as the host has devices.
    """
    runs = config.runs.absolute()
    # The runs folder may not exist yet.
    folder = next(path for path in (runs, *runs.parents) if path.is_dir())
    try:
        token = make_token(folder)  # a host that does not see this file has another folder
    except OSError as error:
        found = f"{folder} cannot be written to: {error.strerror}"
        yield Line("fail", "runs folder", found, "set runs=FOLDER to one that can")
        return
    try:
        asked = {"packages": PACKAGES, "folder": str(folder), "token": str(token)}
        mine = probe.probe(asked)
        reports = dict.fromkeys(slots, mine)
        if len(slots) > 1:
            with ThreadPoolExecutor(len(slots)) as pool:
                reports = dict(zip(slots, pool.map(partial(ask, asked), slots), strict=True))
            yield Line("ok", "ssh", f"{len(slots)} hosts answer")
            if shutil.which("pdsh") is None:
                yield Line("fail", "ssh", "pdsh is not installed on this host", "apt-get install pdsh")
            yield Line("ok", "alike", f"Python, packages, code ({mine['same']['code']})")
            yield Line("ok", "clocks", f"within {_CLOCK_S:g} s")
    finally:
        token.unlink(missing_ok=True)
    yield Line("ok", "runs folder", f"{folder}, {(mine['disk'] or 0) / 1e9:,.0f} GB free")
    yield Line("ok", "GPUs", f"{mine['devices']} on this host")
    # Images that a rank holds on its host: those of the step, if they wait there, and those read ahead.
    side = read_architecture(config.model).get("vision_cfg", {}).get("image_size") or 224  # unknown of a model.factory
    area = side**2 if isinstance(side, int) else side[0] * side[1]
    waiting = config.global_batch // max(sum(slots.values()), 1) if config.pixels == "host" else config.micro_batch
    need = (waiting + (config.data.prefetch or LEAST_AHEAD) * config.micro_batch) * 3 * area
    found = f"{mine['memory'] / 2**20:,.0f} MiB free on this host, a rank's images need {need / 2**20:,.0f}"
    yield Line("ok", "memory", found)
    for host, report in reports.items():
        yield from judge(host, report, mine, slots[host], need)


def ask(asked: dict[str, Any], host: str) -> Report:
    """The report of a host, with the `offset` of its clock; where there is none, the `error` instead."""
    folder = str(Path.cwd())
    # The same Python in the same folder there: only its packages and code are to be compared.
    path = ":".join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    command = shlex.join(["env", f"PYTHONPATH={path}", sys.executable, "-", json.dumps(asked)])
    own = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    ssh = ["ssh", *own, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", host]
    ssh.append(f"cd {shlex.quote(folder)} && {command}")
    text, sent = Path(probe.__file__).read_text(encoding="utf-8"), time.time()
    try:
        done = subprocess.run(ssh, input=text, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {_ANSWER_S} s"}
    received = time.time()
    if done.returncode:
        return {"error": f"{(done.stderr.strip().splitlines() or ['no message'])[-1]} (exit code {done.returncode})"}
    report = json.loads(done.stdout.splitlines()[-1])  # a login shell may print before it
    # Its clock was read between these two moments: take the least difference that explains the time it gave.
    late, early = report["time"] - (received - report["seconds"]), report["time"] - sent
    return {**report, "offset": max(late, 0.0) + min(early, 0.0)}


def judge(host: str, report: Report, mine: Report, slots: int, need: int) -> Iterator[Line]:
    """The problems of a host, compared with this one. Args: need: bytes of memory per rank."""
    if "error" in report:
        remedy = f"`ssh {host} true` must work without a password (options: PDSH_SSH_ARGS_APPEND), and then this Python"
        yield Line("fail", "ssh", f"{host}: {report['error']}", remedy)
        return
    pairs = [(key, value, mine["same"][key]) for key, value in report["same"].items()]
    if differ := "; ".join(f"{key} {there}, here {here}" for key, there, here in pairs if there != here):
        yield Line("fail", "alike", f"{host}: {differ}", "one environment and one code, at the same path on all hosts")
    if abs(offset := report.get("offset", 0.0)) > _CLOCK_S:
        found = f"{host} is at least {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
        yield Line("warn", "clocks", found, "logs and curves will not line up: run a time service there")
    if report["disk"] is None:
        found = f"{host} does not see this host's, or may not write there"
        yield Line("fail", "runs folder", found, "name a folder that all hosts share: runs=/shared/runs")
    elif report["disk"] < _DISK_BYTES:
        yield Line("warn", "runs folder", f"{host}: {report['disk'] / 1e9:.1f} GB free", "make room there")
    devices = report["devices"]
    # Hosts of CPUs are fine, unless this one has GPUs, or a driver there says that it should have some.
    if (devices < slots and mine["devices"]) or (report["driver"] and not devices):
        found = f"{host}: torch sees {devices}, slots are {slots}"
        yield Line("fail", "GPUs", found, "nvidia-smi, CUDA_VISIBLE_DEVICES, a torch for that driver; or fewer slots")
    elif not devices:
        yield Line("warn", "GPUs", f"{host} has none", "its ranks will run on the CPU")
    if report["memory"] < (slots or devices or 1) * need:
        found = f"{host}: {report['memory'] / 2**20:,.0f} MiB free, the images of a rank need {need / 2**20:,.0f}"
        yield Line("fail", "memory", found, "a smaller data.prefetch or micro_batch; pixels=device or compressed")
