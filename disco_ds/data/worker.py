"""The data workers of a rank: separate processes or, if data.workers is 0, the trainer's own process.

A worker owns some of its rank's slots (order.py). In every micro-batch of the rank, it writes the rows that belong to
its slots. All workers of the rank share the buffers, and together they fill all rows.

Alternatives considered: torch's DataLoader. It installs a SIGCHLD handler. If a worker dies, the handler raises an
exception in the trainer's main thread at an arbitrary point, even between two collectives. Here, if a worker dies,
hangs or fails, only `Worker.receive` raises.
"""

import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing import get_context

from disco_ds.config.data import DataSettings
from disco_ds.data.batches import MicroBatch, Report, Share, SharedBatches
from disco_ds.data.errors import (
    NUM_NAMED,
    BrokenSample,
    DataError,
    DroppedSample,
    LostSample,
    name_broken,
    printable,
    read_patiently,
    refuse_broken,
)
from disco_ds.data.order import Cursor, Entry, Mixture
from disco_ds.data.samples import InputSpec, Sample, SampleKey, prepare
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.cache import FetchAhead
from disco_ds.data.sources.fetching import progress
from disco_ds.data.sources.selection import Selection

_SPARE_DAMAGED = 3
"""Number of damaged shards that a worker tolerates in addition to the fraction data.max_broken of the shards."""
_MANY_SKIPPED = 10_000
"""After this many samples in a row without a usable one, a worker logs a warning."""

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are sent to whole process groups. Workers block these signals, because the trainer stops its workers."""


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
    slots: range
    """All slots of the rank, including those of its other workers, in order."""
    cursor: Cursor
    """The position from which to start reading each stream of `slots`."""
    first_sample: int
    """Number of the first sample to read, among the rank's samples."""
    batches: SharedBatches
    """The shared buffers to write into."""
    num_workers: int
    """Number of workers of the rank. 0: the trainer's own process reads all slots."""
    worker: int = 0
    """This worker owns slots[worker::num_workers]."""
    at: Any = field(default_factory=lambda: [-1, -1, -1, 0])
    """Four integers that the trainer reads: the source, shard and entry of the sample that is being read (-1 between
    micro-batches), and the count of fetching.progress."""

    @property
    def own_slots(self) -> range:
        """The slots of this worker."""
        return self.slots[self.worker :: self.num_workers or 1]


class _OpenSource:
    """A source that is open for reading, with the settings of its samples."""

    def __init__(self, spec: WorkerSpec, number: int) -> None:
        source = spec.sources[number]
        self._inputs = spec.inputs
        self.settings = spec.settings.per_source[number]
        self._selection = Selection(self.settings)
        self.reader: Any = source.open(len(spec.own_slots), self.settings.window)

    def count(self, shard: int) -> int:
        """Return the number of samples in a shard that is not counted."""
        return read_patiently(self.reader.count, self.settings.retry_s, shard)

    def read(self, shard: int, entry: int, key: SampleKey) -> Sample:
        """Read and prepare a sample."""
        members = read_patiently(
            self._selection.read, self.settings.retry_s, self.reader, shard, entry
        )
        try:
            return prepare(members, key, self.settings, self._inputs)
        except DataError as error:
            raise DataError(f"{self.reader.name(shard, entry)}: {error}") from None


class _StreamReader:
    """Reads the next usable sample of each of a worker's streams, and counts the samples that it skips."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._sources = [_OpenSource(spec, number) for number in range(len(spec.sources))]
        self.cursor = {stream: spec.cursor[stream] for stream in spec.order.streams(spec.own_slots)}
        self._entries: dict[int, Iterator[Entry]] = {}
        for stream, start in self.cursor.items():
            number, slot = spec.order.split(stream)
            count_samples = self._sources[number].count
            self._entries[stream] = spec.order.orders[number].entries(slot, start, count_samples)
        self._num_read = 0
        """Number of samples that were read and not dropped."""
        self._visited = set[tuple[int, int]]()
        """(source, shard) of all shards that were read."""
        self._broken: dict[tuple[int, int, int], str] = {}
        """Describes each broken sample by (source, shard, entry). A later epoch reads it again."""
        self._damaged: dict[tuple[int, int], str] = {}
        """Describes each damaged shard by (source, shard)."""

    def close(self) -> None:
        """Close all files."""
        for source in self._sources:
            source.reader.close()

    def fill(self, start: int, batch: MicroBatch) -> Report:
        """Write the worker's rows of one micro-batch, whose first sample is the rank's sample number `start`."""
        spec = self._spec
        report = Report()
        for q in range(start, start + spec.share.micro_batch):
            number, i = divmod(q, len(spec.slots))
            # Skip the samples of other workers' slots.
            if (slot := spec.slots[i]) in spec.own_slots:
                sample = self.next(spec.order.stream(slot, number), report)
                for name, array in batch.items():
                    array[q - start] = sample[name]
        spec.at[:3] = -1, -1, -1
        return report

    def next(self, stream: int, report: Report) -> Sample:
        """Read the stream's next usable sample.

        Args:
            stream: Number of the stream.
            report: The report, in which skipped samples are counted and the stream's position is updated.

        Raises:
            DataError: If too many samples are broken, or if the stream has no usable sample in many epochs (see
                `searched_epochs` of the orders).
            OSError: If a shard cannot be read.
        """
        spec = self._spec
        number, _ = spec.order.split(stream)
        order, source = spec.order.orders[number], self._sources[number]
        first_epoch, _ = self.cursor[stream]
        most = spec.settings.max_broken
        skipped = 0
        while True:
            cursor, epoch, shard, entry = next(self._entries[stream])
            key = SampleKey(spec.seed, epoch, spec.order.sample_id(number, shard, entry))
            self._visited.add((number, shard))
            spec.at[:3] = number, shard, entry
            progress.add()  # shows the trainer that this worker is alive
            try:
                sample = source.read(shard, entry, key)
                self._num_read += 1
                self.cursor[stream] = report.cursor[stream] = cursor
                return sample
            except DroppedSample:
                report.dropped += 1
            except BrokenSample as error:
                name = name_broken(source.reader.name, shard, entry, error)
                if isinstance(error, LostSample):
                    report.dropped += 1
                    if (number, shard) not in self._damaged:
                        report.damaged.append(name)
                        self._damaged[number, shard] = name
                        damaged, num = self._damaged.values(), len(self._visited)
                        refuse_broken("shards are damaged", damaged, num, most, _SPARE_DAMAGED)
                else:
                    self._num_read += 1
                    # Another worker may read the sample in the next epoch, so report it in the first epoch only.
                    if epoch == 0:
                        report.broken.append(name)
                    self._broken[number, shard, entry] = name
                    broken, num = self._broken.values(), self._num_read
                    refuse_broken("samples are broken", broken, num, most, cause=error.__cause__)
            skipped += 1
            if skipped == _MANY_SKIPPED:
                warnings.warn(
                    f"stream {stream} has no usable sample among its last {skipped:,} samples; check data.filter, "
                    "data.uids and data.transforms",
                    stacklevel=2,
                )
            # Even with data.max_broken=1, a stream without any readable sample must not be searched forever.
            if cursor[0] - first_epoch > order.searched_epochs:
                last = "; ".join(list(self._broken.values())[-NUM_NAMED:])
                raise DataError(
                    f"stream {stream} has no usable sample among its last {skipped} samples; check data.filter, "
                    "data.uids, data.transforms, and the counts in the manifest. The last broken samples: "
                    f"{last or 'none'}"
                )


def produce_reports(spec: WorkerSpec, wait: Callable[[], object]) -> Generator[Report, None, None]:
    """Write one worker's rows of every micro-batch of its rank, until the iterator is closed.

    Args:
        spec: Which rows to write, and where to read their samples.
        wait: Function that returns when the next buffer may be filled.

    Yields:
        A report on each micro-batch, after the worker's rows have been written.

    Raises:
        DataError: If too many samples are broken, or if a shard cannot be fetched.
        OSError: If a shard cannot be read. The message names the shard.
    """
    with closing(_StreamReader(spec)) as reader:
        # The trainer's own process prefetches nothing.
        if spec.num_workers:
            least = spec.settings.remote.prefetch_shards
            FetchAhead(spec.sources, spec.order, least, reader.cursor).start()
        starts = count(spec.first_sample, spec.share.micro_batch)
        for start, batch in zip(starts, cycle(spec.batches.buffers)):
            wait()
            yield reader.fill(start, batch)


class InProcess:
    """A producer that decodes in the trainer's own process, when `receive` is called."""

    def __init__(self, spec: WorkerSpec) -> None:
        reports = produce_reports(spec, lambda: None)
        self.receive, self.close = reports.__next__, reports.close

    def grant(self) -> None:
        """Do nothing, because `receive` is called only if the next buffer may be filled."""

    def is_ready(self) -> bool:
        """Return False, because `receive` always has to decode."""
        return False


class Worker:
    """A producer that decodes in a separate process. The process ends when the trainer ends.

    A fork server starts the process. Forking the trainer itself would copy locks that the trainer's threads hold.
    Spawning would import torch and the tokenizer's package in every worker (5 s of CPU time) instead of once per rank.

    Args:
        spec: What the process reads and writes.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._name = f"data worker {spec.worker} of {spec.num_workers}"
        self._sources = spec.sources
        self._timeout_s = spec.settings.worker_timeout_s
        context = get_context("forkserver")
        # The fork server imports the tokenizer's module before it starts workers.
        context.set_forkserver_preload([__name__, spec.inputs.tokenize.__module__])
        self._reports, reports = context.Pipe(duplex=False)
        grants, self._grants = context.Pipe(duplex=False)
        self._at = context.RawArray("q", spec.at)
        spec = replace(spec, at=self._at)
        self._process = context.Process(target=_main, args=(spec, grants, reports), daemon=True)
        _start(self._process)
        self.pid = self._process.pid
        grants.close()
        reports.close()
        # At exit, multiprocessing sends SIGTERM to daemon processes and waits for them, but workers block SIGTERM. So
        # kill them earlier.
        self.close = Finalize(self, _kill, (self._process,), exitpriority=10)

    def grant(self) -> None:
        """Allow the worker to fill the next buffer."""
        # If the worker has died, `receive` first returns everything that the worker sent, and then reports the failure.
        with suppress(OSError):
            self._grants.send_bytes(b"")

    def is_ready(self) -> bool:
        """Return whether `receive` would return without waiting."""
        return self._reports.poll()

    def receive(self) -> Report:
        """Wait for the worker's report on the next buffer.

        Raises:
            DataError: If the worker failed, died, or reported neither a result nor progress for worker_timeout_s.
        """
        try:
            progressed = self._at[-1]
            while not self._reports.poll(self._timeout_s):
                if progressed == (progressed := self._at[-1]):
                    raise DataError(
                        f"{self._name} (pid {self.pid}) was silent for {self._timeout_s:g} s (half of timeout_s)"
                        f"{self._where()}; look for a stalled file system, or raise timeout_s"
                    )
            answer = self._reports.recv()
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


def _kill(process: mp.process.BaseProcess) -> None:
    process.kill()
    process.join(5)


def _start(process: mp.process.BaseProcess) -> None:
    """Start a process in which _GROUP_SIGNALS are blocked, and which does not import the trainer's main module."""
    # Start multiprocessing's resource tracker first, because starting it later would unblock the signals.
    resource_tracker.ensure_running()
    # The new process inherits the signal mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    # The main module would also import DeepSpeed.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _main(spec: WorkerSpec, grants: Connection, reports: Connection) -> None:
    """Run a worker: fill each granted buffer and report on it. After an error, send its description and return."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    threading.Thread(target=_follow_parent, daemon=True).start()
    # One thread per worker, so that the number of workers determines how many cores are used.
    torch.set_num_threads(1)
    # Ignore PIL's warnings, because they are about flaws in images that PIL can still read.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    progress.count = spec.at
    # The trainer may close the connections at any time.
    with suppress(ConnectionError):
        try:
            for report in produce_reports(spec, grants.recv_bytes):
                reports.send(report)
        except Exception as error:
            reports.send(describe_error(error))


def _follow_parent() -> None:
    """End this process when the trainer ends, even if the trainer is killed while this process hangs in a read."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    # sys.exit would end only this thread.
    os._exit(1)
