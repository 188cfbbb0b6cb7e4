"""Collectives: the only user of deepspeed.comm and torch.distributed.

`gather`, which has a gradient, sums over ranks in backward, so that a loss whose mean over ranks is the global mean
gives N times the true gradient at the features, which the engine's mean over ranks turns into the true gradient at the
parameters. Every function also works on one rank, and without a process group.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from disco_ds.distributed import flight_recorder
from disco_ds.distributed.device_memory import is_out_of_memory

Group = Any
"""A process group of deepspeed.comm; None is the whole world."""
Reduction = Literal["reduce_scatter", "all_reduce"]
Result = TypeVar("Result")


_received = 0.0
_next_port: int | None = None
"""Where the ranks of a launcher meet for another session, once they have left one."""


def received_bytes() -> float:
    """Bytes that this rank has received so far in this file's tensor collectives, counted as ring algorithms send."""
    return _received


def _count(x: Tensor, times: float) -> None:
    """Add to received_bytes: `times` the size of x."""
    global _received
    _received += times * x.nbytes


def init(timeout_s: float) -> None:
    """Join the process group that the launcher describes by environment; a lone process makes a group of one.

    Collective: every rank must call. The timeout holds for every group made afterwards, ZeRO's own included.
    """
    from torch.distributed import distributed_c10d

    _probe_no_operations()
    timeout = timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    if "RANK" not in os.environ:
        for variable in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
            if int(os.environ.get(variable, "1")) > 1:
                raise ValueError(
                    f"{variable} is {os.environ[variable]} but RANK is not set: every process would train alone; start "
                    "with deepspeed, torchrun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
                )
        lone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        os.environ.update({key: str(value) for key, value in lone.items()})
    missing = [key for key in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not; a launcher sets them all")
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    flight_recorder.switch_on()
    try:
        dist.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            timeout=timeout,
            verbose=False,
        )
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        cause = "another process uses that port: choose one by --master_port" if "EADDRINUSE" in str(error) else error
        raise RendezvousError(f"rank {os.environ['RANK']} cannot meet the others at {address}: {cause}") from None


class RendezvousError(ConnectionError):
    """The ranks of a run cannot meet: the port is taken, or a rank cannot reach it or has not come in time."""


@contextmanager
def session(timeout_s: float) -> Iterator[None]:
    """The process group for a `with` block, which all ranks leave together: a rank that just exits makes others abort.

    A rank that raises leaves without waiting, so that the launcher notices its exit and ends the others.

    Raises: ValueError where the process has joined a group already; RendezvousError.
    """
    if torch.distributed.is_initialized():
        raise ValueError(
            "this process has joined a process group already, and a run makes its own: start the run first, or call "
            "torch.distributed.destroy_process_group() before it"
        )
    global _next_port
    if _next_port is not None:
        os.environ.update(MASTER_PORT=str(_next_port), TORCHELASTIC_USE_AGENT_STORE="False")
    init(timeout_s)
    try:
        yield
    except BaseException:
        if size() == 1:  # no other rank is left waiting, and the process may go on to another session
            dist.destroy_process_group()
        raise
    # Another session of these ranks meets elsewhere: this one's store may still be open on rank 0, and has its keys.
    _next_port = broadcast(_free_port()) if size() > 1 else None
    dist.barrier()
    dist.destroy_process_group()


def _joined() -> bool:
    """Return True if there is a process group; every function of this file asks here, and adopts one it did not make.

    A group of torch.distributed alone, such as a loop of DDP or FSDP has, is handed on to deepspeed.comm: else each
    rank would take its part of the batch for the whole.
    """
    if not dist.is_initialized() and torch.distributed.is_initialized():
        _probe_no_operations()
        logger = logging.getLogger("DeepSpeed")
        level = logger.level
        logger.setLevel(logging.WARNING)
        dist.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
        logger.setLevel(level)
    return bool(dist.is_initialized())


def _probe_no_operations() -> None:
    """Keep DeepSpeed from its own operations, of which none is used.

    Asking for one probes them all, with nvcc where there is a GPU; and its shared-memory collectives for CPUs would be
    built with a compiler, leave memory behind and wait without a timeout.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}


def rank(group: Group = None) -> int:
    return dist.get_rank(group) if _joined() else 0


def size(group: Group = None) -> int:
    return dist.get_world_size(group) if _joined() else 1


def local_device() -> torch.device:
    """The accelerator this process drives, else the CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    return torch.device(accelerator.device_name(int(os.environ.get("LOCAL_RANK", 0))))


def barrier() -> None:
    if _joined():
        dist.barrier()


def open_store(timeout_s: float) -> Any:
    """A new client of the rendezvous store (torch's TCPStore), which a thread can use beside the collectives."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


# Errors


def is_communication_error(error: BaseException) -> bool:
    """Return True for the error of a collective, whose cause may be another rank. gloo's errors have no own type."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("gloo", "nccl"))


# Tensors


def gather(x: Tensor, reduction: Reduction = "reduce_scatter", group: Group = None) -> Tensor:
    """Rows of every rank, in rank order; its backward sums the gradients that all ranks have at this rank's rows.

    Collective, in forward and in backward: every rank must call.
    Args:    x [b, ...], the same shape on every rank; reduction: the collective of the backward: reduce_scatter, or as
             in DisCo-CLIP's Algorithm 1 an all_reduce of all rows' gradients, of which b are kept.
    Returns: [N b, ...].
    """
    return _Gather.apply(x, reduction, group)


def reduce_scatter_in_place(x: Tensor, group: Group = None) -> Tensor:
    """Sum over ranks, of which each rank keeps its own rows, without gradient. Collective.

    Args:    x [N b, ...], contiguous; its content is undefined afterwards, because nothing is copied.
    Returns: [b, ...]; x itself at one rank.
    """
    if size(group) == 1:
        return x
    out = x.new_empty(x.shape[0] // size(group), *x.shape[1:])
    _count(x, 1 - 1 / size(group))
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def all_reduce_sum(x: Tensor, group: Group = None) -> Tensor:
    """Sum over ranks as a new tensor, without gradient. Collective."""
    return _all_reduce(x.detach(), group, dist.ReduceOp.SUM)


def all_reduce_max(x: Tensor, group: Group = None) -> Tensor:
    """Maximum over ranks as a new tensor, without gradient. Collective."""
    return _all_reduce(x.detach(), group, dist.ReduceOp.MAX)


def ring_exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: Group) -> list[Any]:
    """Start sending to the next rank and receiving from the one before, all at once. Returns: requests to wait for."""
    if not outgoing and not incoming:
        return []
    N, n = size(group), rank(group)
    next_rank, previous = (
        peer if group is None else dist.get_global_rank(group, peer) for peer in ((n + 1) % N, (n - 1) % N)
    )
    for x in incoming:
        _count(x, 1)
    sends = [dist.P2POp(dist.isend, x, next_rank, group) for x in outgoing]
    return dist.batch_isend_irecv([*sends, *(dist.P2POp(dist.irecv, x, previous, group) for x in incoming)])


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


# None of these writes to its input: autograd may pass the same grad_output to another node.


def _all_gather(x: Tensor, group: Group) -> Tensor:
    if not _joined():
        return x.clone()
    out = x.new_empty(size(group) * x.shape[0], *x.shape[1:])
    _count(x, size(group) - 1)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    if not _joined():
        return x.clone()
    out = x.new_empty(x.shape[0] // size(group), *x.shape[1:])
    _count(x, 1 - 1 / size(group))
    # On a copy, because gloo reduces in place.
    dist.reduce_scatter_tensor(out, x.clone(memory_format=torch.contiguous_format), group=group)
    return out


def _all_reduce(x: Tensor, group: Group, op: Any) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if _joined():
        _count(x, 2 - 2 / size(group))
        dist.all_reduce(out, op=op, group=group)
    return out


# Python objects


def gather_objects(item: Any) -> list[Any]:
    """Every rank's picklable object, in rank order. Collective."""
    if not _joined():
        return [item]
    items: list[Any] = [None] * size()
    dist.all_gather_object(items, item)
    return items


def broadcast(item: Any) -> Any:
    """Rank 0's picklable object. Collective."""
    items = [item]
    if _joined():
        dist.broadcast_object_list(items, src=0)
    return items[0]


class AgreedError(ValueError):
    """A failure that every rank raises alike, so that all can end in order."""


@contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """Run a block that may fail on some ranks so that it fails on all ranks or on none; it must not communicate.

    Collective: every rank must enter.
    Raises: AgreedError on every rank, naming the ranks and hosts that failed and why.
    """
    problem: str | None = None
    try:
        yield
    except Exception as error:
        # A ValueError or OSError is written for the user; any other needs its type to be understood.
        explains_itself = isinstance(error, ValueError | OSError)
        problem = str(error) if explains_itself else f"{type(error).__name__}: {error}"
    reports = gather_objects((problem, socket.gethostname()))
    failed = [number for number, (text, _) in enumerate(reports) if text is not None]
    if failed:
        where = "" if len(failed) == size() else f" (rank {', '.join(map(str, failed))})"
        hosts = dict.fromkeys(reports[number][1] for number in failed)
        if len(hosts) < len({host for _, host in reports}):
            where += f" on {', '.join(hosts)}"
        raise AgreedError(f"{what}{where}: {reports[failed[0]][0]}")


def from_rank_0(what: str, work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0 only, and return its picklable result on every rank. Collective.

    Raises: AgreedError on every rank if it fails; `what` says in the message what was done.
    """
    result: Any = None
    with all_or_none(what):
        if rank() == 0:
            result = work()
    return broadcast(result)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
