"""The ranks of a host divide its cores among themselves, unless a launcher or user has set the number of threads."""

import os

import pytest
import torch

from disco_ds.distributed import comm
from disco_ds.distributed.hosts import share_host
from helpers.dist import run_ranks


def threads_of(setting: str | None, bound: bool) -> int:
    """Return the number of threads that share_host leaves a rank that had 8.

    Args:
        setting: Value of OMP_NUM_THREADS, or None.
        bound: Whether the rank is bound to one core.
    """
    os.environ.pop("OMP_NUM_THREADS", None)
    if setting:
        os.environ["OMP_NUM_THREADS"] = setting
    if bound:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank()]})
    torch.set_num_threads(8)
    share_host()
    share_host()  # a run calls it again at the start of each stage; this must change nothing
    return torch.get_num_threads()


def ways() -> list[int]:
    return [threads_of(None, False), threads_of("8", False), threads_of(None, True)]


def test_ranks_share_the_cores_of_their_host() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores to bind ranks to")
    assert run_ranks(ways, 2) == [[4, 8, 8]] * 2
    assert run_ranks(threads_of, 1, None, False) == [8]
