"""The decoding processes of a rank, and their replacement if data.workers is 0: the trainer's own process.

Alternatives considered: torch's DataLoader installs a SIGCHLD handler. If a worker dies, it raises in the trainer's
main thread, wherever that is, even between two collectives. Here, a worker that is dead, silent or failing makes only
`Worker.receive` raise.
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

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that reach whole process groups. Workers block them, because the trainer stops its workers."""


class InProcess:
    """A producer that decodes in the trainer's process, whenever the trainer wants to receive something."""

    def __init__(self, job: Job) -> None:
        self._buffers: deque[int] = deque()
        self._parts = produce_parts(job, self._buffers.popleft)

    def grant(self, number: int) -> None:
        """Allow it to fill this buffer, after those that were granted before."""
        self._buffers.append(number)

    def is_ready(self) -> bool:
        """Return whether `receive` would return at once: never."""
        return False

    def receive(self) -> Part:
        """Fill the rows of the next buffer."""
        return next(self._parts)


class Worker:
    """A producer that decodes in a separate process, which ends with the trainer.

    A fork server starts the process. Forking the trainer would copy locks that its threads hold. Spawning would import
    torch and the tokenizer's package (5 s of a core) in every worker instead of once per rank.

    Args:
        job: What the process does.
        timeout_s: Seconds without a sign of life after which the worker counts as hung.
        preload: Module that the fork server imports.
        label: Names a sample, given by shard and entry, without reading it.
    """

    def __init__(
        self, job: Job, timeout_s: float, preload: str, label: Callable[[int, int], str]
    ) -> None:
        self._name = f"data worker {job.worker} of {job.num_workers}"
        self._label = label
        self._timeout_s = timeout_s
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, preload])
        self._connection, theirs = context.Pipe()
        self._at = context.RawArray("q", [-1, -1, 0])
        job = replace(job, at=self._at)
        self._process = context.Process(target=_main, args=(job, theirs), daemon=True)
        with _block_signals(), _hide_main():
            self._process.start()
        theirs.close()
        # At exit, multiprocessing sends SIGTERM to daemons, but workers block it. Kill them before that.
        self.close = Finalize(self, _kill, (self._process, self._connection), exitpriority=10)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def grant(self, number: int) -> None:
        """Allow the worker to fill this buffer, after those that were granted before."""
        # If the worker has died, receive reports it, after the parts that the worker had sent.
        with suppress(OSError):
            self._connection.send(number)

    def is_ready(self) -> bool:
        """Return whether `receive` would return at once."""
        return self._connection.poll()

    def receive(self) -> Part:
        """Wait for the worker's report on the next buffer.

        Raises:
            DataError: If the worker failed, died, or gave no sign of life for timeout_s.
        """
        try:
            fetched = self._at[2]
            while not self._connection.poll(self._timeout_s):
                if fetched == (fetched := self._at[2]):
                    raise DataError(
                        f"{self._name} (pid {self.pid}) was silent for data.worker_timeout_s={self._timeout_s:g} s"
                        f"{self._where()}; look for a stalled file system, or raise data.worker_timeout_s"
                    )
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise DataError(
                f"{self._name} (pid {self.pid}) died, exit code {self._process.exitcode}{self._where()}; "
                "killed by signal 9 or 7 usually means that the host ran out of memory"
            ) from None
        if isinstance(answer, str):
            raise DataError(f"{self._name}: {answer}")
        return answer

    def _where(self) -> str:
        """Name the sample that the worker is reading, if any."""
        return f", reading {printable(self._label(*self._at[:2]))}" if self._at[0] >= 0 else ""


def describe_error(error: Exception) -> str:
    """Return the message of a data error, and the traceback of any other. Called where the error is caught."""
    return str(error) if isinstance(error, (DataError, OSError)) else traceback.format_exc()


def _kill(process: mp.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join(5)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block the group signals while a process starts, so that it inherits the mask."""
    # Starting the resource tracker later would unblock the signals.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _hide_main() -> Iterator[None]:
    """Keep a process that is started from importing the trainer's main module, and with it DeepSpeed."""
    main = vars(sys.modules["__main__"])
    names = ["__spec__", "__file__"]
    hidden = {name: main.pop(name) for name in names if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


def _main(job: Job, connection: Connection) -> None:
    """Fill the granted buffers and report on each. After an error, send its text and end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    threading.Thread(target=_follow_parent, daemon=True).start()
    # The number of workers determines how many cores are used.
    torch.set_num_threads(1)
    # PIL warns of flaws in images that it can still read.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    progress.count = job.at
    # The trainer may close the connection at any time.
    with suppress(EOFError, ConnectionError):
        try:
            for part in produce_parts(job, connection.recv):
                connection.send(part)
        except Exception as error:
            connection.send(describe_error(error))


def _follow_parent() -> None:
    """End with the trainer, even if it is killed while this process hangs in a read."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    # sys.exit would end only this thread.
    os._exit(1)
