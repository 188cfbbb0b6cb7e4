"""Collectives. No other file uses deepspeed.comm or torch.distributed.

`gather` is differentiable: its backward sums gradients over the N ranks. If the global loss is the mean of
the ranks' losses, this sum is N times the gradient of the global loss. The engine then averages the
gradients of the parameters over ranks, which removes the factor N.

Every function also works on one rank and without a process group.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from disco_ds.distributed.deepspeed_quirks import disable_custom_ops

Group = Any
"""A process group of deepspeed.comm; None means all ranks."""
Result = TypeVar("Result")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Maps the name of a dtype in the settings to the dtype."""
SHARE_GPUS = "DISCO_DS_SHARE_GPUS"
"""Environment variable for tests: "1" lets several ranks share a GPU (docs/gpu.md)."""


_next_port: int | None = None
"""Port of the next session in this process; None if that session uses the port in MASTER_PORT."""


def init(timeout_s: float) -> None:
    """Join the process group that the launcher's environment variables (distributed/launcher.py) describe.

    Without a launcher, create a group of one rank. Collective: every rank must call this.

    Args:
        timeout_s: Timeout of collectives, for all groups created from now on, including ZeRO's groups.

    Raises:
        ValueError: If a variable shows that there are several processes, but RANK is not set. Also if this rank has no
            GPU of its own.
        RendezvousError: If the ranks cannot meet.
    """
    from torch.distributed import distributed_c10d

    disable_custom_ops()
    timeout = timedelta(seconds=timeout_s)
    # new_group, which DeepSpeed also calls, uses these default timeouts.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    if "RANK" not in os.environ:
        for variable in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
            if int(os.environ.get(variable, "1")) > 1:
                raise ValueError(
                    f"{variable} is {os.environ[variable]} but RANK is not set, so every process would train alone. "
                    "Start with deepspeed, torchrun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
                    "MASTER_PORT."
                )
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    # DeepSpeed 0.19 takes LOCAL_RANK as the number of the device, in the engine, in ZeRO 3 and for NCCL.
    os.environ["LOCAL_RANK"] = str(_device_number())
    get_accelerator().set_device(_device_number())
    if uses_nccl():
        # Keep a record of the last collectives (heartbeat.py). Variables that the user has set are not changed.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    backend = get_accelerator().communication_backend_name()
    if os.environ["WORLD_SIZE"] == "1" and not torch.distributed.is_initialized():
        # A single rank needs no port. torch's TCPStore would listen on all interfaces and let anyone change its keys.
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    try:
        dist.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            timeout=timeout,
            verbose=False,
        )
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RendezvousError(
            f"rank {os.environ['RANK']} cannot meet the others at {address}: {error}; if another process uses that "
            "port, choose another one: --master_port 29501, or disco-ds launch --deepspeed '--master_port 29501'"
        ) from None


class RendezvousError(ConnectionError):
    """The ranks cannot meet: the port is taken or not reachable, or a rank did not arrive in time."""


@contextmanager
def session(timeout_s: float) -> Iterator[None]:
    """Join the process group for a `with` block. Collective.

    All ranks leave the block together, because a rank that exits early makes the others abort. If the
    block raises an AgreedError, all ranks do so and leave normally. After any other error, this rank does
    not wait for the others: the launcher then sees it exit and stops the others.

    Args:
        timeout_s: Timeout of collectives.

    Raises:
        ValueError: If this process has joined a process group already.
        RendezvousError: If the ranks cannot meet.
    """
    if torch.distributed.is_initialized():
        raise ValueError(
            "this process has joined a process group already, but a run creates one itself: start the run in a script "
            "that does not call torch.distributed.init_process_group()"
        )
    global _next_port
    if _next_port is not None:
        os.environ.update(MASTER_PORT=str(_next_port), TORCHELASTIC_USE_AGENT_STORE="False")
    init(timeout_s)
    leaves_alone = False
    try:
        yield
    except BaseException as error:
        # With one rank, no other rank is waiting, and this process may start another session.
        leaves_alone = size() > 1 and not isinstance(error, AgreedError)
        raise
    finally:
        if not leaves_alone:
            # The next session of these ranks needs another port, because this session's store may still be open on
            # rank 0, with old keys.
            _next_port = broadcast(_free_port()) if size() > 1 else None
            barrier()
            dist.destroy_process_group()


def _joined() -> bool:
    """Return whether there is a process group. If only torch has created one, make deepspeed.comm use it.

    A DDP or FSDP loop initializes torch.distributed only. If deepspeed.comm were not initialized too,
    each rank would see a world of one rank and treat its part of the batch as the whole batch.
    """
    if not dist.is_initialized() and torch.distributed.is_initialized():
        disable_custom_ops()
        logger = logging.getLogger("DeepSpeed")
        level = logger.level
        logger.setLevel(logging.WARNING)
        dist.init_distributed(
            torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        logger.setLevel(level)
    return bool(dist.is_initialized())


def rank(group: Group = None) -> int:
    """Return the rank of this process in the group."""
    return dist.get_rank(group) if _joined() else 0


def size(group: Group = None) -> int:
    """Return the number of ranks in the group."""
    return dist.get_world_size(group) if _joined() else 1


def local_device() -> torch.device:
    """Return the accelerator device that this process uses, or the CPU if there is no accelerator."""
    accelerator = get_accelerator()
    if "LOCAL_RANK" not in os.environ:
        return torch.device(accelerator.current_device_name())
    return torch.device(accelerator.device_name(_device_number()))


def _device_number() -> int:
    """Return the number of this rank's device on its host: LOCAL_RANK, or less if ranks share devices.

    Raises:
        ValueError: If the host has too few devices, and SHARE_GPUS does not allow sharing.
    """
    accelerator, local = get_accelerator(), int(os.environ["LOCAL_RANK"])
    count = max(accelerator.device_count(), 1)
    if accelerator.device_name() == "cpu" or local < count:
        return local
    number = local % count
    if os.environ.get(SHARE_GPUS) != "1":
        rank = int(os.environ.get("RANK", local))
        raise ValueError(
            f"rank {rank} has LOCAL_RANK {local}, but this host has only {count} GPU(s), so it would share GPU "
            f"{number} with rank {rank - local + number}: start one rank per GPU, or set {SHARE_GPUS}=1 for a test"
        )
    return number


def uses_nccl() -> bool:
    """Return whether NCCL runs the collectives of this process."""
    return bool(get_accelerator().communication_backend_name() == "nccl")


def barrier() -> None:
    """Wait for all ranks. Collective."""
    if size() > 1:  # with one rank, NCCL would only warn that it guesses the device
        dist.barrier()


def open_store(timeout_s: float) -> Any:
    """Open a new connection to the rendezvous store (torch's TCPStore). Only one thread may use a connection."""
    return torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


# Errors


class AgreedError(ValueError):
    """An error that all ranks raise together, so that they can shut down cleanly.

    Its subclasses say why the ranks stop:
    - RefusedError: there is a mistake in the settings, data or weights.
    - AskedToStopError: a signal requested it.
    """

    exit_code = 1
    """Exit code of a command that ends with this error."""


class RefusedError(AgreedError):
    """A mistake in the settings, data or weights. It is raised before the first training step."""

    exit_code = 2


class AskedToStopError(AgreedError):
    """A signal requested the run to stop. The message says whether a checkpoint was saved."""

    exit_code = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that torch, cuBLAS, cuDNN or NCCL could not allocate accelerator memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    texts = (
        "cuda out of memory",
        "cuda error: out of memory",
        "_status_alloc_failed",
        "failure 2 'out of memory'",
    )
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def is_communication_error(error: BaseException) -> bool:
    """Return whether an error looks like one of a collective, in which case another rank may have caused it."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    # gloo raises plain RuntimeErrors.
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text)


# Tensors


def gather(x: Tensor, group: Group = None) -> Tensor:
    """Gather the rows of every rank, in rank order. The backward sums the gradient of each row over ranks.

    Collective, in forward and in backward: every rank must call this.

    Args:
        x: [b, ...], the same shape on every rank.
        group: The ranks that take part.

    Returns:
        [N b, ...], where N is the number of ranks.
    """
    return _Gather.apply(x, group)


def reduce_scatter_in_place(x: Tensor, group: Group = None) -> Tensor:
    """Sum `x` over ranks and return this rank's rows of the sum. Collective; not differentiable.

    Args:
        x: [N b, ...], contiguous: b rows for each of N ranks. It serves as a buffer, so its content is undefined
            afterwards.
        group: The ranks that take part.

    Returns:
        [b, ...]; x itself if there is one rank.
    """
    if size(group) == 1:
        return x
    out = x.new_empty(x.shape[0] // size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def all_reduce_sum(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of `x` over ranks as a new tensor. Collective; not differentiable."""
    return _all_reduce(x, group, dist.ReduceOp.SUM)


def all_reduce_max(x: Tensor, group: Group = None) -> Tensor:
    """Return the elementwise maximum of `x` over ranks as a new tensor. Collective; not differentiable."""
    return _all_reduce(x, group, dist.ReduceOp.MAX)


def largest_of(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return the maximum over ranks of each value. Collective: one all_reduce, and one wait for the device.

    Args:
        values: Numbers, and 0-d tensors on any device.
    """
    # This does not make the host wait for the device: CUDA copies a few bytes asynchronously.
    numbers = [
        torch.as_tensor(value, dtype=torch.float64).to(local_device(), non_blocking=True)
        for value in values.values()
    ]
    return dict(zip(values, all_reduce_max(torch.stack(numbers)).tolist(), strict=True))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        if not _joined():
            return x.clone()
        out = x.new_empty(size(group) * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # `grad` must not be modified, because autograd may pass the same tensor to another node.
        copy = grad.clone(memory_format=torch.contiguous_format)
        return reduce_scatter_in_place(copy, ctx.group), None


def _all_reduce(x: Tensor, group: Group, op: Any) -> Tensor:
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if _joined():
        dist.all_reduce(out, op=op, group=group)
    return out


# A ring of ranks


def circulate(
    block: Sequence[Tensor],
    visit: Callable[[int, list[Tensor]], list[Tensor]],
    join: Callable[[list[Tensor], list[Tensor]], None],
    group: Group = None,
) -> list[Tensor]:
    """Send every rank's block around the ring, and sum what the ranks compute for each block.

    Each rank calls `visit` on its own block first. Every block has running sums, to which each rank
    adds its result; the sums travel around the ring one hop behind the block. In each hop, a
    rank sends and receives while `visit` runs. In addition to its own block, a rank needs memory for two
    blocks and three sets of sums. Collective: every rank must call this.

    Args:
        block: This rank's tensors. Their shapes are the same on every rank, and they must not change
            during the call.
        visit: visit(owner, block) returns the tensors that this rank adds to the sums of the block of
            rank `owner`. Their shapes are the same in every call, or the list is always empty.
        join: join(mine, theirs) adds each tensor of `theirs` to the tensor of `mine` at the same
            position, in place.
        group: The process group; None means all ranks.

    Returns:
        The sums for this rank's block, over the results of all ranks.
    """
    N, n = size(group), rank(group)
    current = [x.contiguous() for x in block]
    sums: list[Tensor] = []
    for hop in range(N):
        # `sums` are for the block of the previous hop, which the next rank has now.
        outgoing = sums if hop == N - 1 else sums + current
        incoming, requests = _exchange(outgoing, group)
        mine = visit((n - hop) % N, current)
        for request in requests:
            request.wait()
        if sums:  # the earlier ranks have computed sums for the current block
            join(mine, incoming[: len(sums)])
        current = incoming[len(sums) :]
        sums = mine
    if N == 1:
        return sums
    # The last block that a rank visits belongs to the next rank, so one more hop brings the sums of
    # every block back to the owner of the block.
    result, requests = _exchange(sums, group)
    for request in requests:
        request.wait()
    return result


def _exchange(outgoing: Sequence[Tensor], group: Group) -> tuple[list[Tensor], list[Any]]:
    """Start sending tensors to the next rank and receiving tensors of the same shapes from the previous rank.

    Returns:
        The tensors that are being received, and the requests to wait for.
    """
    if not outgoing:
        return [], []
    incoming = [torch.empty_like(x) for x in outgoing]
    N, n = size(group), rank(group)
    following = (n + 1) % N
    previous = (n - 1) % N
    if group is not None:
        following = dist.get_global_rank(group, following)
        previous = dist.get_global_rank(group, previous)
    sends = [dist.P2POp(dist.isend, x, following, group) for x in outgoing]
    receives = [dist.P2POp(dist.irecv, x, previous, group) for x in incoming]
    return incoming, dist.batch_isend_irecv(sends + receives)


# Python objects


def gather_objects(item: Any) -> list[Any]:
    """Gather a picklable object from every rank; return the objects in rank order. Collective."""
    if not _joined():
        return [item]
    items: list[Any] = [None] * size()
    dist.all_gather_object(items, item)
    return items


def ranks_where(condition: bool) -> list[int]:
    """Return the ranks on which a condition is true. Collective."""
    return [number for number, is_true in enumerate(gather_objects(condition)) if is_true]


def broadcast(item: Any) -> Any:
    """Return the picklable object that rank 0 passed, on every rank. Collective."""
    items = [item]
    if _joined():
        dist.broadcast_object_list(items, src=0)
    return items[0]


@contextmanager
def all_or_none(what: str, agreed: type[Exception] = AgreedError) -> Iterator[None]:
    """Make a `with` block fail on all ranks if it fails on any rank. The block must not communicate.

    Collective: every rank must enter the block.

    Args:
        what: What the block does. The error message starts with it.
        agreed: Type of the error that all ranks raise.

    Raises:
        AgreedError: On every rank, if the block failed on any rank. If `agreed` is given, it replaces this type. The
            message contains the first error. If some ranks or hosts did not fail, it names those that did.
    """
    problem: str | None = None
    try:
        yield
    except Exception as error:
        problem = str(error)
        # The messages of ValueError and OSError are clear on their own.
        if not isinstance(error, ValueError | OSError):
            problem = f"{type(error).__name__}: {error}"
    reports = gather_objects((problem, socket.gethostname()))
    if failed := [number for number, (text, _) in enumerate(reports) if text is not None]:
        where = "" if len(failed) == size() else f" ({join_ranks(failed)})"
        hosts = dict.fromkeys(reports[number][1] for number in failed)
        if len(hosts) < len({host for _, host in reports}):
            where += f" on {', '.join(hosts)}"
        raise agreed(f"{what}{where}: {reports[failed[0]][0]}")


def from_rank_0(
    what: str, work: Callable[[], Result], agreed: type[Exception] = AgreedError
) -> Result:
    """Call `work` on rank 0 only and return its picklable result on every rank. Collective.

    Args:
        what: What `work` does. The error message starts with it.
        work: The function to call.
        agreed: Type of the error that all ranks raise.

    Raises:
        AgreedError: On every rank, if `work` fails. If `agreed` is given, it replaces this type.
    """
    result: Any = None
    with all_or_none(what, agreed):
        if rank() == 0:
            result = work()
    return broadcast(result)


def warn(text: str) -> None:
    """Log a warning on rank 0 only."""
    if rank() == 0:
        logging.getLogger("disco_ds").warning(text)


def join_ranks(ranks: Iterable[int]) -> str:
    """Return a short text that lists the ranks, such as "rank 3" or "ranks 0-6, 9"."""
    # In a run of consecutive numbers, the difference between number and position is constant.
    numbered = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in numbered]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    word = "rank" if sum(map(len, runs)) == 1 else "ranks"
    return f"{word} {', '.join(names)}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
