"""The work of one decoding process, and the processes themselves.

A worker owns some of its rank's slots and makes, for every micro-batch of the rank, the part that falls to them. The
parts of all workers make up the micro-batch whatever their number. With 0 workers the same generator runs in the
trainer's process.

Why not torch's DataLoader: it installs a SIGCHLD handler that raises wherever the trainer's main thread happens to be
when a worker dies, so also between two collectives. Here a dead, silent or failing worker is something that
`Worker.receive` raises.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from disco_ds.data.mixture import Mixture
from disco_ds.data.source import Decode, Source
from disco_ds.data.tar import BrokenSample, DataError

SPARE_BROKEN = 16
"""Broken samples that a worker tolerates beyond its fraction: the first one read must not stop a run."""
NUM_NAMED = 5
"""Broken samples that a message names."""


@dataclass(frozen=True)
class Part:
    """What one worker contributes to a micro-batch."""

    image: Tensor
    """[n, 3, H, W] uint8."""
    text: Tensor
    """[n, L] int64."""
    ids: Tensor
    """[n, 3] int64: place in the micro-batch, sample id, epoch."""
    cursor: dict[int, tuple[int, int]]
    """(epoch, offset) that follows, of the streams that moved."""
    broken: list[str]
    """Samples skipped on the way, `shard/key: reason`."""


@dataclass(frozen=True)
class Job:
    """One worker's share of a rank's stream; it pickles.

    The rank's sample number q (from the run's start) belongs to slots[q % len(slots)], as its number q // len(slots).
    """

    source: Source
    order: Mixture
    max_broken: float
    slots: tuple[int, ...]
    """The rank's slots, in order."""
    cursor: dict[int, tuple[int, int]]
    """(epoch, offset) of each of their streams."""
    first: int
    """The rank's first sample number."""
    micro_batch: int
    num_micro_batches: int
    """Of a step."""
    decode_twice: bool
    """After a step's parts make all but the last once more, from the compressed images."""
    image_size: tuple[int, int]
    context_length: int
    worker: int = 0
    """It owns slots[worker::num_workers]."""
    num_workers: int = 1


class _Reader:
    """Reads the next good sample of a stream, and counts the broken ones."""

    def __init__(self, job: Job) -> None:
        self._source = job.source
        self._order = job.order
        self._max_broken = job.max_broken
        self._read = 0
        self._broken = 0
        self._last: list[str] = []

    def next(
        self, stream: int, epoch: int, offset: int, broken: list[str]
    ) -> tuple[Tensor, Decode, Tensor, int, int, int]:
        """(image, what decodes it, text, id, epoch, offset) of the stream's next good sample from (epoch, offset) on.

        Raises:  DataError when too many were broken, or all that the stream has in two epochs.
        """
        skipped = 0
        while True:
            epoch, offset = self._order.settle(stream, epoch, offset)
            shard, entry = self._order.locate(stream, epoch, offset)
            index = self._order.index(shard, entry)
            self._read += 1
            try:
                decode, text = self._source.read(shard, entry, epoch, index)
                return decode(), decode, text, index, epoch, offset
            except BrokenSample as error:
                broken.append(f"{self._source.name(shard, entry)}: {error}")
            skipped += 1
            offset += 1
            self._count(broken[-1])
            # Also with data.max_broken=1 a stream that finds nothing ends; each epoch gives it other samples.
            if skipped >= SPARE_BROKEN + 2 * self._order.length(stream, epoch):
                raise DataError(
                    f"stream {stream} found no readable sample in {skipped}; the last: {'; '.join(self._last)}"
                )

    def _count(self, text: str) -> None:
        self._broken += 1
        self._last = [*self._last, text][-NUM_NAMED:]
        if self._broken > SPARE_BROKEN + self._max_broken * self._read:
            raise DataError(
                f"{self._broken} of {self._read} samples are broken, more than {SPARE_BROKEN} and data.max_broken="
                f"{self._max_broken:g} of them; the last: {'; '.join(self._last)}. Check data.image_key and "
                "data.captions against the members seen, repair the shards, or raise data.max_broken"
            )


def produce_parts(job: Job) -> Iterator[Part]:
    """The parts of one worker for all micro-batches of its rank, step by step, without end.

    Raises:  DataError, OSError naming a shard that cannot be read.
    """
    reader, cursor = _Reader(job), dict(job.cursor)
    start = job.first
    while True:
        first_pass = []
        for _ in range(job.num_micro_batches):
            part, decoders = _produce(job, reader, cursor, start)
            yield part
            if job.decode_twice:
                first_pass.append((part.text, part.ids, decoders))
            start += job.micro_batch
        for text, ids, decoders in first_pass[:-1]:
            image = _empty_images(job, len(decoders))
            for row, decode in enumerate(decoders):
                image[row] = decode()
            yield Part(image, text, ids, cursor={}, broken=[])


def _produce(job: Job, reader: _Reader, cursor: dict[int, tuple[int, int]], start: int) -> tuple[Part, list[Decode]]:
    """The part of the micro-batch from the rank's sample number `start` on, and its images' decoders."""
    numbers = [(q - start, *divmod(q, len(job.slots))) for q in range(start, start + job.micro_batch)]
    mine = [
        (place, job.order.stream(job.slots[i], number))
        for place, number, i in numbers
        if i % job.num_workers == job.worker
    ]
    image = _empty_images(job, len(mine))
    text = torch.empty(len(mine), job.context_length, dtype=torch.int64)
    ids = torch.empty(len(mine), 3, dtype=torch.int64)
    broken: list[str] = []
    decoders = []
    for row, (place, stream) in enumerate(mine):
        image[row], decode, text[row], index, epoch, offset = reader.next(stream, *cursor[stream], broken)
        ids[row] = torch.tensor((place, index, epoch))
        cursor[stream] = epoch, offset + 1
        decoders.append(decode)
    return Part(image, text, ids, {stream: cursor[stream] for _, stream in mine}, broken), decoders


def _empty_images(job: Job, num: int) -> Tensor:
    return torch.empty(num, 3, *job.image_size, dtype=torch.uint8)


class Worker:
    """A decoding process that prepares up to `prefetch` parts ahead.

    Started by a fork server: a fork of the trainer would copy the locks of its threads, and spawning imports torch and
    the tokenizer's package (5 s of a core) for every worker instead of once per rank. A worker may prepare a part for
    each credit it receives, and ends when the trainer is gone.
    """

    def __init__(self, job: Job, prefetch: int, timeout_s: float, preload: str) -> None:
        self._name = f"data worker {job.worker} of {job.num_workers}"
        self._timeout_s = timeout_s
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, preload])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(job, theirs), daemon=True)
        with _hold_signals(), _hide_main():
            self._process.start()
        theirs.close()
        # At exit multiprocessing asks daemons to terminate, a signal the workers hold back: end them before that.
        self.close = Finalize(self, _end, (self._process, self._connection), exitpriority=10)
        for _ in range(prefetch):
            self._connection.send(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self) -> Part:
        """The next part.

        Raises:  DataError when the worker failed, died, or was silent for timeout_s.
        """
        try:
            if not self._connection.poll(self._timeout_s):
                raise DataError(
                    f"{self._name} (pid {self.pid}) was silent for data.timeout_s={self._timeout_s:g} s: "
                    "look for a stalled file system, or raise it"
                )
            answer = self._connection.recv()
            self._connection.send(None)
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise DataError(
                f"{self._name} (pid {self.pid}) died, exit code {self._process.exitcode} ({type(error).__name__}); "
                "killed by 9: out of memory; by 7: /dev/shm is full"
            ) from None
        if isinstance(answer, str):
            raise DataError(f"{self._name}: {answer}")
        return answer


def _end(process: mp.process.BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join(5)


@contextmanager
def _hold_signals() -> Iterator[None]:
    """Start a process with these signals blocked: they go to process groups, and the trainer ends its workers."""
    # Starting the tracker later on would unblock them.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _hide_main() -> Iterator[None]:
    """Start a process that does not import the trainer's main module again: it would bring DeepSpeed into each."""
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
    torch.set_num_threads(1)
    # PIL reports oddities of images it reads anyway.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with suppress(EOFError, ConnectionError):
        _serve(produce_parts(job), connection)


def _serve(parts: Iterator[Part], connection: Connection) -> None:
    """Send a part for every credit; after an error its text, once."""
    while True:
        connection.recv()
        try:
            part = next(parts)
        except (DataError, OSError) as error:
            connection.send(str(error))
            break
        except Exception:
            connection.send(traceback.format_exc())
            break
        connection.send(part)
    # Parts that wait in the pipe get their memory from this process: it stays until the trainer hangs up.
    while True:
        connection.recv()


def _follow_parent() -> None:
    """End with the trainer, also when it is killed and this process hangs in a read."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
