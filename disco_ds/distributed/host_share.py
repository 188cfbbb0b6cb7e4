"""Divide the cores and the memory of a host among the ranks that run on it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

from disco_ds.distributed import comm

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files that contain the memory limit of a container, under cgroups v2 and v1."""


@dataclass(frozen=True)
class HostShare:
    """The cores and memory of a host that one of its ranks may use."""

    ranks: int
    """Number of ranks on this host."""
    cores: int
    memory_bytes: int
    """This rank's share of the memory that was free when the run began."""


def share_host() -> HostShare:
    """Return this rank's share of its host, and set torch's number of threads accordingly. Collective.

    If OMP_NUM_THREADS is set, the number of threads is not changed. torchrun sets it to 1. `deepspeed`
    does not set it, so torch would start one thread per core in every rank. Ranks that are bound to
    different cores, for example by --bind_cores_to_rank or srun --cpus-per-task, keep all of their cores.
    """
    host = socket.gethostname()
    cores = sorted(os.sched_getaffinity(0))
    ranks = comm.gather_objects((host, cores))
    num_sharing = ranks.count((host, cores))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(_original_threads() // num_sharing, 1))
    num_on_host = [other for other, _ in ranks].count(host)
    num_cores = max(len(cores) // num_sharing, 1)
    return HostShare(num_on_host, num_cores, free_memory_bytes() // num_on_host)


@cache
def _original_threads() -> int:
    """Return the number of threads that torch used when share_host was first called in this process."""
    return torch.get_num_threads()


def free_memory_bytes() -> int:
    """Return the free memory of this host, or the limit of its container if that is less."""
    limits = [psutil.virtual_memory().available]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            limits.append(int(Path(path).read_text()))
    return min(limits)
