"""Real ranks for tests: gloo processes with a free port and a timeout. Starting them takes long, so share them."""

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 800.0,
    method: str = "forkserver",
    joined: bool = True,
) -> list[Any]:
    """Call function(*args) in `size` new processes, each a rank. No process outlives this call.

    If a rank raises, dies or is too slow, the test fails and shows that rank's traceback or exit code.

    Args:
        function: A function that can be pickled.
        size: Number of ranks.
        args: Its arguments.
        timeout_s: Time limit for all ranks together.
        method: "forkserver", or "spawn" for code that reads the environment when it is imported: spawned processes
            have not imported anything yet.
        joined: Whether to initialize comm in the ranks. If not, they only have a launcher's environment variables.

    Returns:
        What each rank returned, in the order of ranks.
    """
    context = multiprocessing.get_context(method)
    port = free_port()
    # A Connection can be sent to the ranks, but a file descriptor cannot.
    output = Connection(os.dup(1), readable=False)
    pipes, processes = [], []
    for rank in range(size):
        receive, send = context.Pipe(duplex=False)
        given = (dict(os.environ), output, function, rank, size, port, send, args, joined)
        process = context.Process(target=_enter, args=given)  # type: ignore[attr-defined]
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    try:
        return _collect(pipes, processes, time.monotonic() + timeout_s)
    finally:
        output.close()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextlib.contextmanager
def start_ranks(function: Callable[..., None], size: int, *args: Any) -> Iterator[list[Any]]:
    """Start `size` processes that call function(number, port, *args), and kill at the end those that are left.

    The function makes its process a rank (see become_rank). Unlike the ranks of run_ranks, it may end in any way.
    """
    start_server()
    context, port = multiprocessing.get_context("forkserver"), free_port()
    ranks = [context.Process(target=function, args=(number, port, *args)) for number in range(size)]
    for rank in ranks:
        rank.start()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def start_server() -> None:
    """Start the server from which ranks are forked, with all imports done, so that no rank repeats them (8 s).

    This includes modules that a run imports late: TensorBoard, matplotlib, and DeepSpeed's Muon, which imports the back
    end of torch.compile.
    """
    late = ["deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.tensorboard"]
    drawing = ["matplotlib.figure", "matplotlib.style", "matplotlib.backends.backend_agg"]
    multiprocessing.set_forkserver_preload(["disco_ds.cli.commands", *late, *drawing, "pytest"])
    multiprocessing.forkserver.ensure_running()


def free_port() -> int:
    """Return a free port below the ephemeral range, so that no connection of another test takes it."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            pytest.fail(
                f"ranks {[r for r in range(len(pipes)) if r not in results]} did not finish in time"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                fine, value = pipe.recv()
            except EOFError:
                processes[rank].join(10)
                pytest.fail(
                    f"rank {rank} ended without a result, exit code {processes[rank].exitcode}"
                )
            if not fine:
                pytest.fail(f"rank {rank} failed:\n{value}", pytrace=False)
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _enter(
    environment: dict[str, str],
    output: Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    send: Connection,
    args: tuple[Any, ...],
    joined: bool,
) -> None:
    gc.freeze()  # the garbage collector need not scan the modules of the fork server
    # The fork server was started with an older environment than the test has now.
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        import torch

        from disco_ds.distributed import comm

        torch.set_num_threads(1)
        with comm.session(timeout_s=600) if joined else nullcontext():
            value = function(*args)
        send.send((True, value))
    except BaseException:
        send.send((False, traceback.format_exc()))
        raise


def become_rank(number: int, port: int, log: Path) -> None:
    """Make this process one of two ranks, and redirect its output to `log`. For processes of start_ranks."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch  # not at the top, because importing this module must not import torch

    torch.set_num_threads(1)
