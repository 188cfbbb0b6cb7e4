"""A rank's share of the cores and the memory of its host, which it has in common with other ranks."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from disco_ds.distributed import comm

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit, of cgroups version 2 and 1."""


@dataclass(frozen=True)
class HostShare:
    cores: int
    memory_bytes: int
    """A share of the memory that was free when the run began."""


def share_host() -> HostShare:
    """This rank's share of its host. Sets torch's threads to the rank's share of the cores. Collective.

    By default torch uses a thread per core in every rank, which `deepspeed` does not change; torchrun sets
    OMP_NUM_THREADS=1. Where OMP_NUM_THREADS is set, it stays, and ranks that are bound to cores of their own, as by
    --bind_cores_to_rank or srun --cpus-per-task, keep all of those.
    """
    mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
    ranks = comm.gather_objects(mine)
    sharing = ranks.count(mine)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(torch.get_num_threads() // sharing, 1))
    on_host = [host for host, _ in ranks].count(mine[0])
    return HostShare(max(len(mine[1]) // sharing, 1), free_memory_bytes() // on_host)


def free_memory_bytes() -> int:
    """Free memory of this host, or of the container if that has less."""
    limits = [psutil.virtual_memory().available]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(path).read_text()))
    return min(limits)
