"""Collectives: the only user of deepspeed.comm.

The autograd-aware ones (`gather`) sum over ranks in backward, so that a loss whose mean over ranks is the global mean
returns N times the true feature gradient, which the engine's mean over ranks turns into the true parameter gradient.
At one rank, or without a process group at all, every function takes the same path and means the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

Group = Any
"""A process group of deepspeed.comm; None is the whole world."""
Reduction = Literal["reduce_scatter", "all_reduce"]


def init(timeout_s: float) -> None:
    """Join the process group that the launcher describes by environment; a lone process makes a group of one.

    Collective: every rank must call. The timeout holds for every group made afterwards, ZeRO's own included.
    """
    import deepspeed
    from torch.distributed import distributed_c10d

    # Not used in training; builds with a compiler, leaves shared memory behind and waits without a timeout.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    if "RANK" not in os.environ:
        for variable in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
            if int(os.environ.get(variable, "1")) > 1:
                raise ValueError(
                    f"{variable} is {os.environ[variable]} but RANK is not set: every process would train alone; start "
                    "with deepspeed or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
                )
        lone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        os.environ.update({key: str(value) for key, value in lone.items()})
    missing = [key for key in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not; a launcher sets them all")
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timeout,
        verbose=False,
    )


@contextmanager
def session(timeout_s: float) -> Iterator[None]:
    """The process group for a `with` block, which all ranks leave together: one that just exits makes others abort.

    A rank that raises leaves at once, so that the launcher sees it end, and ends the others.
    """
    init(timeout_s)
    yield
    dist.barrier()
    dist.destroy_process_group()


def rank(group: Group = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def size(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def local_device() -> torch.device:
    """The accelerator this process drives, else the CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    return torch.device(accelerator.device_name(int(os.environ.get("LOCAL_RANK", 0))))


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# Tensors


def gather(x: Tensor, reduction: Reduction = "reduce_scatter", group: Group = None) -> Tensor:
    """Rows of every rank, in rank order; its backward sums what all ranks say of this rank's rows.

    Collective, in forward and in backward: every rank must call.
    Args:    x [b, ...], the same shape on every rank; reduction: how backward sums: reduce_scatter receives B rows,
             all_reduce (DisCo-CLIP, Algorithm 1) the gradient of all rows, of which it keeps b.
    Returns: [N b, ...].
    """
    return _Gather.apply(x, reduction, group)


def reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Sum over ranks, of which each keeps its part; its backward gathers.

    Collective, in forward and in backward.
    Args:    x [N b, ...].
    Returns: [b, ...].
    """
    return _ReduceScatter.apply(x, group)


def all_reduce_sum(x: Tensor, group: Group = None) -> Tensor:
    """Sum over ranks as a new tensor, without gradient. Collective."""
    return _all_reduce(x.detach(), group, dist.ReduceOp.SUM)


def all_reduce_max(x: Tensor, group: Group = None) -> Tensor:
    """Maximum over ranks as a new tensor, without gradient. Collective."""
    return _all_reduce(x.detach(), group, dist.ReduceOp.MAX)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: Reduction, group: Group) -> Tensor:
        ctx.reduction, ctx.group = reduction, group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.reduction == "reduce_scatter":
            return _reduce_scatter(grad, ctx.group), None, None
        total = _all_reduce(grad, ctx.group, dist.ReduceOp.SUM)
        return total.chunk(size(ctx.group))[rank(ctx.group)], None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


# None of these writes to its input: autograd may hand the same grad_output to somebody else.


def _all_gather(x: Tensor, group: Group) -> Tensor:
    if not dist.is_initialized():
        return x.clone()
    out = x.new_empty(size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    if not dist.is_initialized():
        return x.clone()
    if x.shape[0] % size(group):
        raise ValueError(f"reduce_scatter of {x.shape[0]} rows over {size(group)} ranks: not a multiple")
    out = x.new_empty(x.shape[0] // size(group), *x.shape[1:])
    # A copy: gloo reduces in place.
    dist.reduce_scatter_tensor(out, x.clone(memory_format=torch.contiguous_format), group=group)
    return out


def _all_reduce(x: Tensor, group: Group, op: Any) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if dist.is_initialized():
        dist.all_reduce(out, op=op, group=group)
    return out


# Python objects


def gather_objects(item: Any) -> list[Any]:
    """Every rank's picklable object, in rank order. Collective."""
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * size()
    dist.all_gather_object(items, item)
    return items


def broadcast(item: Any) -> Any:
    """Rank 0's picklable object. Collective."""
    items = [item]
    if dist.is_initialized():
        dist.broadcast_object_list(items, src=0)
    return items[0]


class AgreedError(ValueError):
    """A mistake or a failure that every rank raises alike, so that all can end in order."""


@contextmanager
def together(what: str) -> Iterator[None]:
    """Do what may fail on some ranks only, and fail on all of them or none. Collective; the body must not communicate.

    Raises: AgreedError on every rank, naming the ranks that failed and why.
    """
    problem: str | None = None
    try:
        yield
    except Exception as error:
        told = isinstance(error, ValueError | OSError)
        problem = str(error) if told else f"{type(error).__name__}: {error}"
    problems = gather_objects(problem)
    failed = [number for number, text in enumerate(problems) if text is not None]
    if failed:
        where = "" if len(failed) == size() else f" (rank {', '.join(map(str, failed))})"
        raise AgreedError(f"{what}{where}: {problems[failed[0]]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
