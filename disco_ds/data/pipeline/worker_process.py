"""The decoding processes of a rank, and what stands in for one where data.workers is 0: the trainer's own process.

Why not torch's DataLoader: it installs a SIGCHLD handler that raises wherever the trainer's main thread happens to be
when a worker dies, even between two collectives. Here, only `Worker.receive` raises for a dead, silent or failing
worker.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize

import torch
from torch.multiprocessing import get_context

from disco_ds.data.images.broken import DataError, printable
from disco_ds.data.pipeline.worker import Job, Part, produce_parts
from disco_ds.data.remote.fetching import progress


class InProcess:
    """The producer that runs in the trainer's process, when something is to be received."""

    def __init__(self, job: Job) -> None:
        self._buffers: deque[int] = deque()
        self._parts = produce_parts(job, self._buffers.popleft)

    def grant(self, number: int) -> None:
        self._buffers.append(number)

    def is_ready(self) -> bool:
        return False

    def receive(self) -> Part:
        return next(self._parts)


class Worker:
    """A decoding process that fills the buffers granted to it, and ends with the trainer.

    It is started by a fork server: forking the trainer would copy the locks of its threads, and spawning would import
    torch and the tokenizer's package (5 s of a core) in every worker instead of once per rank.
    """

    def __init__(
        self, job: Job, timeout_s: float, preload: str, label: Callable[[int, int], str]
    ) -> None:
        """Args: label: names a sample by (shard, entry) without reading it."""
        self._name = f"data worker {job.worker} of {job.num_workers}"
        self._label = label
        self._timeout_s = timeout_s
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, preload])
        self._connection, theirs = context.Pipe()
        self._at = context.RawArray("q", [-1, -1, 0])
        job = replace(job, at=self._at)
        self._process = context.Process(target=_main, args=(job, theirs), daemon=True)
        with _hold_signals(), _hide_main():
            self._process.start()
        theirs.close()
        # At exit multiprocessing sends SIGTERM to daemons, which workers block: end them before that.
        self.close = Finalize(self, _end, (self._process, self._connection), exitpriority=10)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it has been started
        return self._process.pid

    def grant(self, number: int) -> None:
        with suppress(OSError):  # it has died, which receive reports after what it had sent
            self._connection.send(number)

    def is_ready(self) -> bool:
        return self._connection.poll()

    def receive(self) -> Part:
        """Its report on the next buffer. Raises: DataError if it failed, died, or gave no sign for timeout_s."""
        try:
            fetched = self._at[2]
            while not self._connection.poll(self._timeout_s):
                if fetched == (fetched := self._at[2]):
                    raise DataError(
                        f"{self._name} (pid {self.pid}) was silent for data.timeout_s={self._timeout_s:g} s"
                        f"{self._where()}: look for a stalled file system, or raise it"
                    )
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise DataError(
                f"{self._name} (pid {self.pid}) died, exit code {self._process.exitcode} ({type(error).__name__})"
                f"{self._where()}; killed by 9 or 7: out of memory"
            ) from None
        if isinstance(answer, str):
            raise DataError(f"{self._name}: {answer}")
        return answer

    def _where(self) -> str:
        """The sample that it was reading, if any."""
        return f", reading {printable(self._label(*self._at[:2]))}" if self._at[0] >= 0 else ""


def _end(process: mp.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join(5)


@contextmanager
def _hold_signals() -> Iterator[None]:
    """Start a process with those signals blocked that reach whole process groups: the trainer ends its workers."""
    # If the tracker were started later, that would unblock them.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _hide_main() -> Iterator[None]:
    """Start a process that does not import the trainer's main module, which would import DeepSpeed in every worker."""
    main = sys.modules["__main__"]
    names = [name for name in ("__spec__", "__file__") if hasattr(main, name)]
    hidden = {name: getattr(main, name) for name in names}
    for name in names:
        delattr(main, name)
    main.__spec__ = None
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _main(job: Job, connection: Connection) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)  # parallelism comes from the number of workers
    # PIL warns of oddities in images that it reads nevertheless.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    progress.count = job.at
    with suppress(EOFError, ConnectionError):
        _serve(job, connection)


def _serve(job: Job, connection: Connection) -> None:
    """Fill the buffers granted and report on each; after an error, send its text and end."""
    try:
        for part in produce_parts(job, connection.recv):
            connection.send(part)
    except (DataError, OSError) as error:
        connection.send(str(error))
    except Exception:
        connection.send(traceback.format_exc())


def _follow_parent() -> None:
    """End with the trainer, even if it is killed while this process hangs in a read."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    # Not sys.exit, which would only end this thread.
    os._exit(1)
