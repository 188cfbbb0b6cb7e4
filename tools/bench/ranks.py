"""Start the ranks of a measurement on this machine: one process for each rank, on CPUs or GPUs."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import spawn

from disco_ds.distributed import comm


def run_ranks(work: Callable[..., None], ranks: int, *args: Any, timeout_s: float = 1800) -> None:
    """Call `work(*args)` in a process group of `ranks` new processes, and wait until all have returned."""
    spawn(_run_rank, (work, ranks, comm._free_port(), timeout_s, args), nprocs=ranks)


def _run_rank(
    rank: int, work: Callable[..., None], ranks: int, port: int, timeout_s: float, args: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "KINETO_LOG_LEVEL": "99"}
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    with comm.session(timeout_s):
        work(*args)
