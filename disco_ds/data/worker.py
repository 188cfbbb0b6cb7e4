"""The data workers of a rank: separate processes or, if data.workers is 0, the trainer's own process.

A worker owns some of its rank's slots (order.py). In every micro-batch of the rank, it writes the rows that belong to
its slots. All workers of the rank share the buffers, and together they fill all rows.

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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any

import torch
from torch.multiprocessing import get_context

from disco_ds.config.data import DataSettings
from disco_ds.data.batches import MicroBatch, Share, SharedBatches
from disco_ds.data.errors import (
    SPARE_BROKEN,
    BrokenSample,
    DataError,
    DroppedSample,
    LostSample,
    breaks_sample,
    name_broken,
    printable,
    read_patiently,
    refuse_broken,
)
from disco_ds.data.order import Cursor, Entry, Mixture
from disco_ds.data.samples import InputSpec, Sample, SampleKey, find_prepare
from disco_ds.data.sources.base import Reader, Source
from disco_ds.data.sources.cache import FetchAhead
from disco_ds.data.sources.fetching import progress
from disco_ds.data.sources.selection import Selection

_SPARE_DAMAGED = 3
"""Number of damaged shards that a worker tolerates in addition to the fraction data.max_broken of the shards."""
_MANY_SKIPPED = 10_000
"""After this many samples in a row without a usable one, a worker logs a warning."""
_NUM_NAMED = 5
"""Maximum number of broken samples or damaged shards that an error message lists."""

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are sent to whole process groups. Workers block these signals, because the trainer stops its workers."""


@dataclass
class RowReport:
    """A worker's report on the rows that it has written into one buffer."""

    cursor: Cursor = field(default_factory=dict)
    """The position from which to continue reading each stream whose samples are in these rows."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of each broken sample that was skipped in the first epoch of its source."""
    dropped: int = 0
    """Number of samples that were dropped (see DroppedSample), or lost with the rest of a damaged shard."""
    damaged: list[str] = field(default_factory=list)
    """`shard: reason` of each shard that turned out to be damaged while these rows were read."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker needs to produce its share of a rank's samples. It is sent to the worker.

    The rank's samples are numbered from the start of training. Sample q of the rank is sample q // len(slots) of the
    slot slots[q % len(slots)].
    """

    sources: Sequence[Source]
    order: Mixture
    settings: DataSettings
    inputs: InputSpec
    seed: int
    share: Share
    slots: tuple[int, ...]
    """All slots of the rank, including those of its other workers, in order."""
    cursor: Cursor
    """The position from which to start reading each stream of `slots`."""
    first_sample: int
    """Number of the first sample to read, among the rank's samples."""
    decode_twice: bool
    """True if the workers decode the images of a step twice: once for each of GradAccum's passes. The last micro-batch
    of a step is decoded only once."""
    batches: SharedBatches
    """The shared buffers to write into."""
    ahead: FetchAhead
    """Prefetches remote shards."""
    worker: int = 0
    """This worker owns slots[worker::num_workers]."""
    num_workers: int = 1
    at: Any = field(default_factory=lambda: [-1, -1, -1, 0])
    """Four integers that the trainer reads: the source, shard and entry of the sample that is being read (-1 between
    micro-batches), and the count of fetching.progress."""

    @property
    def own_slots(self) -> tuple[int, ...]:
        """The slots of this worker."""
        return self.slots[self.worker :: self.num_workers]


class _OpenSource:
    """A source that is open for reading, with the settings of its samples."""

    def __init__(self, spec: WorkerSpec, number: int) -> None:
        source = spec.sources[number]
        self._inputs = spec.inputs
        self._settings = spec.settings.per_source[number]
        self._prepare = find_prepare(source)
        self._selection = Selection.load(self._settings)
        self.reader: Reader = source.open(len(spec.own_slots), self._settings.window)

    def read(self, shard: int, entry: int, key: SampleKey) -> tuple[Sample, Callable[[], Sample]]:
        """Read and prepare a sample.

        Returns:
            The sample, and a function that prepares it once more. The function holds the compressed image, so that a
            worker can keep all samples of a step.
        """
        patience_s = self._settings.retry_s
        with breaks_sample(OSError):
            read = self._selection.read
            members = read_patiently(read, patience_s, self.reader, shard, entry)
        again = partial(self._prepare, members, key, self._settings, self._inputs)
        try:
            return again(), again
        except DataError as error:
            raise DataError(f"{self.reader.name(shard, entry)}: {error}") from None

    def count(self, shard: int) -> int:
        """Return the number of samples in a tar shard."""
        reader: Any = self.reader
        count: int = read_patiently(reader.count, self._settings.retry_s, shard)
        return count


class _StreamReader:
    """Reads the next usable sample of each of a worker's streams, and counts the samples that it skips."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._sources = [_OpenSource(spec, number) for number in range(len(spec.sources))]
        self.cursor = {
            stream: spec.cursor[stream]
            for slot in spec.own_slots
            for stream in spec.order.streams(slot)
        }
        self._entries = {stream: self._list_entries(stream) for stream in self.cursor}
        self._num_read = 0
        self._broken = set[tuple[int, int, int]]()
        """(source, shard, entry) of all broken samples that were read. A later epoch reads them again."""
        self._visited = set[tuple[int, int]]()
        """(source, shard) of all shards that were read."""
        self._damaged: dict[tuple[int, int], str] = {}
        """Describes each damaged shard, keyed by (source, shard)."""
        self._last: deque[str] = deque(maxlen=_NUM_NAMED)
        """Descriptions of the last few broken samples, for the error message."""

    def _list_entries(self, stream: int) -> Iterator[Entry]:
        source, slot = self._spec.order.split(stream)
        order = self._spec.order.orders[source]
        return order.entries(slot, self.cursor[stream], self._sources[source].count)

    def close(self) -> None:
        """Close all files."""
        for source in self._sources:
            source.reader.close()

    def fill(
        self, start: int, batch: MicroBatch
    ) -> tuple[list[tuple[int, Callable[[], Sample]]], RowReport]:
        """Write the worker's rows of one micro-batch, whose first sample is the rank's sample number `start`.

        Returns:
            For each row, its number and a function that prepares its sample once more; and the report on the rows.
        """
        spec = self._spec
        rows = []
        report = RowReport()
        for q in range(start, start + spec.share.micro_batch):
            number, i = divmod(q, len(spec.slots))
            # Slots are assigned to the workers in turn. Skip the samples of other workers' slots.
            if i % spec.num_workers == spec.worker:
                sample, again = self.next(spec.order.stream(spec.slots[i], number), report)
                write_row(batch, q - start, sample)
                rows.append((q - start, again))
        spec.at[:3] = -1, -1, -1
        spec.ahead.move(dict(self.cursor))
        return rows, report

    def next(self, stream: int, report: RowReport) -> tuple[Sample, Callable[[], Sample]]:
        """Read the stream's next usable sample.

        Args:
            stream: Number of the stream.
            report: The report, in which skipped samples are counted and the stream's position is updated.

        Returns:
            The sample, and a function that prepares it once more.

        Raises:
            DataError: If too many samples are broken, or if the stream has no usable sample in many epochs (see
                `searched_epochs` of the orders).
            OSError: If a shard cannot be read.
        """
        spec = self._spec
        number, _ = spec.order.split(stream)
        order, source = spec.order.orders[number], self._sources[number]
        first_epoch, _ = self.cursor[stream]
        skipped = 0
        while True:
            cursor, epoch, shard, entry = next(self._entries[stream])
            key = SampleKey(spec.seed, epoch, spec.order.sample_id(number, shard, entry))
            self._num_read += 1
            self._visited.add((number, shard))
            spec.at[:3] = number, shard, entry
            progress.add()  # shows the trainer that this worker is alive
            try:
                read = source.read(shard, entry, key)
                self.cursor[stream] = report.cursor[stream] = cursor
                return read
            except (DroppedSample, LostSample) as error:
                report.dropped += 1
                self._num_read -= 1
                if isinstance(error, LostSample) and (number, shard) not in self._damaged:
                    report.damaged.append(name_broken(source.reader.name, shard, entry, error))
                    self._damaged[number, shard] = report.damaged[-1]
                    self._check_damaged()
            except BrokenSample as error:
                name = name_broken(source.reader.name, shard, entry, error)
                # Which worker reads a sample changes from epoch to epoch, so only the epoch tells what was reported.
                if epoch == 0:
                    report.broken.append(name)
                if (number, shard, entry) not in self._broken:
                    self._broken.add((number, shard, entry))
                    self._last.append(name)
                    num, most = len(self._broken), spec.settings.max_broken
                    refuse_broken(num, self._num_read, most, self._last, error.__cause__)
            skipped += 1
            if skipped == _MANY_SKIPPED:
                warnings.warn(
                    f"stream {stream} has no usable sample among its last {skipped:,} samples; check data.filter, "
                    "data.uids and data.transforms",
                    stacklevel=2,
                )
            # Even with data.max_broken=1, a stream without any readable sample must not be searched forever.
            least = max(SPARE_BROKEN, order.searched_samples)
            if skipped >= least and cursor[0] - first_epoch > order.searched_epochs:
                raise DataError(
                    f"stream {stream} has no usable sample among its last {skipped} samples. While this "
                    "micro-batch was read, data.filter, data.uids or data.transforms excluded "
                    f"{report.dropped} samples, or the manifest counts more samples than their shards contain. "
                    f"The last broken samples: {'; '.join(self._last) or 'none'}"
                )

    def _check_damaged(self) -> None:
        """Raise DataError if too many shards are damaged."""
        most = self._spec.settings.max_broken
        if len(self._damaged) > _SPARE_DAMAGED + most * len(self._visited):
            named = list(self._damaged.values())[-_NUM_NAMED:]
            raise DataError(
                f"{len(self._damaged)} of {len(self._visited)} shards are damaged; the limit is {_SPARE_DAMAGED} plus "
                f"the fraction data.max_broken={most:g} of the shards read. The last ones: {'; '.join(named)}. "
                "`disco-ds index SHARDS --check --full` lists all damaged shards"
            )


def write_row(batch: MicroBatch, row: int, sample: Sample) -> None:
    """Write a sample to a row of a micro-batch."""
    for name, array in batch.items():
        array[row] = sample[name]


def produce_reports(
    spec: WorkerSpec, next_buffer: Callable[[], int]
) -> Generator[RowReport, None, None]:
    """Write one worker's rows of every micro-batch of its rank, step by step, until the iterator is closed.

    Args:
        spec: Which rows to write, and where to read their samples.
        next_buffer: Function that returns the number of the buffer for the next micro-batch. It may wait for a buffer.

    Yields:
        A report on each micro-batch, after the worker's rows have been written.

    Raises:
        DataError: If too many samples are broken, or if a shard cannot be fetched.
        OSError: If a shard cannot be read. The message names the shard.
    """
    reader = _StreamReader(spec)
    with ExitStack() as stack:
        stack.callback(reader.close)
        spec.ahead.move(dict(reader.cursor))
        spec.ahead.start()
        start = spec.first_sample
        while True:
            first_pass = []
            for _ in range(spec.share.num_micro_batches):
                rows, report = reader.fill(start, spec.batches[next_buffer()])
                yield report
                if spec.decode_twice:
                    first_pass.append(rows)
                start += spec.share.micro_batch
            # GradAccum's second pass does not request the last micro-batch, because its autograd graph is kept.
            for rows in first_pass[:-1]:
                batch = spec.batches[next_buffer()]
                for row, again in rows:
                    write_row(batch, row, again())
                    progress.add()
                yield RowReport()


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
