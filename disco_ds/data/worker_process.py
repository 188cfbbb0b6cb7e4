"""The data workers of a rank: separate processes or, if data.workers is 0, the trainer's own process.

Alternatives considered: torch's DataLoader. It installs a SIGCHLD handler. If a worker dies, the handler raises an
exception in the trainer's main thread at an arbitrary point, even between two collectives. Here, if a worker dies,
hangs or fails, only `Worker.receive` raises.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from queue import SimpleQueue

import torch
from torch.multiprocessing import get_context

from disco_ds.data.errors import DataError, printable
from disco_ds.data.remote.fetching import progress
from disco_ds.data.worker import RowReport, WorkerSpec, produce_reports

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are sent to whole process groups. Workers block these signals, because the trainer stops its workers."""


class InProcess:
    """A producer that decodes in the trainer's own process, when `receive` is called."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._buffers: deque[int] = deque()
        self._reports = produce_reports(spec, self._buffers.popleft)
        self.close = self._reports.close

    def grant(self, number: int) -> None:
        """Allow this producer to fill buffer `number`, after all buffers that were granted earlier."""
        self._buffers.append(number)

    def is_ready(self) -> bool:
        """Return False, because `receive` always has to decode."""
        return False

    def receive(self) -> RowReport:
        """Fill the rows of the next buffer."""
        return next(self._reports)


class Worker:
    """A producer that decodes in a separate process. The process ends when the trainer ends.

    A fork server starts the process. Forking the trainer itself would copy locks that the trainer's threads hold.
    Spawning would import torch and the tokenizer's package in every worker (5 s of CPU time) instead of once per rank.

    Args:
        spec: What the process reads and writes.
        timeout_s: The worker is considered hung if it reports neither a result nor progress for this many seconds.
    """

    def __init__(self, spec: WorkerSpec, timeout_s: float) -> None:
        self._name = f"data worker {spec.worker} of {spec.num_workers}"
        self._sources = spec.sources
        self._timeout_s = timeout_s
        context = get_context("forkserver")
        # The fork server imports the tokenizer's module before it starts workers.
        context.set_forkserver_preload([__name__, spec.inputs.tokenize.__module__])
        self._connection, theirs = context.Pipe()
        self._at = context.RawArray("q", [-1, -1, -1, 0])
        spec = replace(spec, at=self._at)
        self._process = context.Process(target=_main, args=(spec, theirs), daemon=True)
        with _block_signals(), _hide_main():
            self._process.start()
        theirs.close()
        # At exit, multiprocessing sends SIGTERM to daemon processes and waits for them, but workers block SIGTERM. So
        # kill them earlier.
        self.close = Finalize(self, _kill, (self._process, self._connection), exitpriority=10)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        assert self._process.pid is not None
        return self._process.pid

    def grant(self, number: int) -> None:
        """Allow the worker to fill buffer `number`, after all buffers that were granted earlier."""
        # If the worker has died, `receive` first returns everything that the worker sent, and then reports the failure.
        with suppress(OSError):
            self._connection.send(number)

    def is_ready(self) -> bool:
        """Return whether `receive` would return without waiting."""
        return self._connection.poll()

    def receive(self) -> RowReport:
        """Wait for the worker's report on the next buffer.

        Raises:
            DataError: If the worker failed, died, or reported neither a result nor progress for timeout_s.
        """
        try:
            progressed = self._at[-1]
            while not self._connection.poll(self._timeout_s):
                if progressed == (progressed := self._at[-1]):
                    raise DataError(
                        f"{self._name} (pid {self.pid}) was silent for {self._timeout_s:g} s (half of timeout_s)"
                        f"{self._where()}; look for a stalled file system, or raise timeout_s"
                    )
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise DataError(
                f"{self._name} (pid {self.pid}) died with exit code {self._process.exitcode}{self._where()}; "
                "if the exit code is -9 or -7, the host probably ran out of memory"
            ) from None
        if isinstance(answer, str):
            raise DataError(f"{self._name}: {answer}")
        return answer

    def _where(self) -> str:
        """Name the sample that the worker is reading, if any."""
        source, shard, entry, _ = self._at
        if source < 0:
            return ""
        return f" while reading {printable(self._sources[source].label(shard, entry))}"


def describe_error(error: Exception) -> str:
    """Return the message of a DataError or OSError, or the traceback of any other error.

    Must be called from the `except` block that catches the error.
    """
    return str(error) if isinstance(error, (DataError, OSError)) else traceback.format_exc()


def _kill(process: mp.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join(5)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block _GROUP_SIGNALS in this process while it starts another one, which inherits the signal mask."""
    # Start multiprocessing's resource tracker first, because starting it later would unblock the signals.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _hide_main() -> Iterator[None]:
    """Keep a new process from importing the trainer's main module, which would also import DeepSpeed."""
    main = vars(sys.modules["__main__"])
    names = ["__spec__", "__file__"]
    hidden = {name: main.pop(name) for name in names if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


def _main(spec: WorkerSpec, connection: Connection) -> None:
    """Run a worker: fill each granted buffer and report on it. After an error, send its description and return."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    threading.Thread(target=_follow_parent, daemon=True).start()
    # One thread per worker, so that the number of workers determines how many cores are used.
    torch.set_num_threads(1)
    # Ignore PIL's warnings, because they are about flaws in images that PIL can still read.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    progress.count = spec.at
    granted: SimpleQueue[int] = SimpleQueue()
    # A thread receives the grants. Otherwise, if both processes filled the connection, each would wait for the other.
    threading.Thread(target=_receive_grants, args=(connection, granted), daemon=True).start()
    # The trainer may close the connection at any time.
    with suppress(ConnectionError):
        try:
            for report in produce_reports(spec, granted.get):
                connection.send(report)
        except Exception as error:
            connection.send(describe_error(error))


def _receive_grants(connection: Connection, granted: SimpleQueue[int]) -> None:
    """Put the number of every granted buffer into a queue, until the trainer closes the connection."""
    with suppress(EOFError, OSError):
        while True:
            granted.put(connection.recv())


def _follow_parent() -> None:
    """End this process when the trainer ends, even if the trainer is killed while this process hangs in a read."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    # sys.exit would end only this thread.
    os._exit(1)
