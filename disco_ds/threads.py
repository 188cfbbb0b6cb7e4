"""How many of the host's cores a rank's torch computes with."""

from __future__ import annotations

import os
import socket

import torch

from disco_ds import comm


def share_cores() -> None:
    """Divide torch's threads by the ranks that share this one's cores. Collective.

    Torch's default is one thread per core in every rank, and `deepspeed` leaves it there; torchrun sets
    OMP_NUM_THREADS=1. OMP_NUM_THREADS stays what it is where it is set, and ranks that are bound to cores of their own,
    as by --bind_cores_to_rank or srun --cpus-per-task, keep all of those.
    """
    cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
    sharing = comm.gather_objects(cores).count(cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(torch.get_num_threads() // sharing, 1))
