"""Check the hosts of a run: runs folder, GPUs, and whether all hosts have the same code and share that folder."""

import shutil
from collections.abc import Iterator
from os import W_OK, access
from pathlib import Path

import torch

from disco_ds.checks.report import Line
from disco_ds.config import Config
from disco_ds.distributed.hosts import check_agreement, check_code
from disco_ds.runs.shared_folder import check_shared

_DISK_BYTES = 20e9
"""The check warns if less disk space is free. Four AdamW checkpoints of a model with 400 million parameters need about
this space, at 12 bytes per parameter."""


def check_host(runs: Path) -> Iterator[Line]:
    """Check the runs folder and the GPUs of this host.

    Args:
        runs: The folder for run folders. It does not have to exist yet.
    """
    folder = _find_existing(runs)
    free = shutil.disk_usage(folder).free
    found = f"{folder}, {free / 1e9:,.1f} GB free"
    if not access(folder, W_OK):
        found = f"{folder} cannot be written to"
        yield Line("fail", "runs folder", found, "set runs=FOLDER to a writable folder")
    else:
        is_short = free < _DISK_BYTES
        yield Line("warn" if is_short else "ok", "runs folder", found, "free some disk space")
    devices = torch.accelerator.device_count()
    if devices:
        yield Line("ok", "GPUs", f"{devices} on this host")
    elif Path("/proc/driver/nvidia/version").exists():
        found = "torch sees none, although this host has an NVIDIA driver"
        remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and that this torch supports the driver"
        yield Line("fail", "GPUs", found, remedy)
    else:
        yield Line("warn", "GPUs", "this host has none", "its ranks will run on the CPU")


def check_all_hosts(config: Config) -> Iterator[Line]:
    """Check that all ranks have the same settings and code, and share the runs folder. Collective.

    Raises:
        ValueError: On all ranks, if the settings or the code differ, or if a rank does not see the folder.
    """
    check_agreement(config.model_dump(mode="json"))
    check_code()
    folder = _find_existing(config.runs)
    check_shared(folder)
    yield Line("ok", "hosts", f"same settings and code; {folder} is shared")


def _find_existing(runs: Path) -> Path:
    runs = runs.absolute()
    return next(path for path in (runs, *runs.parents) if path.is_dir())
