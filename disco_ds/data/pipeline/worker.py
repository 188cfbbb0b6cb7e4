"""The work of one decoding process, which owns some of its rank's slots.

Into every micro-batch of the rank it writes the rows that belong to its slots. The buffers are shared by all workers of
the rank, which fill them together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.images.broken import (
    BrokenSample,
    DataError,
    breaks_sample,
    name_broken,
    read_patiently,
)
from disco_ds.data.order.mixture import Mixture
from disco_ds.data.order.slots import Share
from disco_ds.data.pipeline.shared_batches import SharedBatches
from disco_ds.data.pipeline.step_data import MicroBatch
from disco_ds.data.remote.prefetch import FetchAhead
from disco_ds.data.sources.base import Decode, Samples

_SPARE_BROKEN = 16
"""Broken samples that a worker tolerates in addition to data.max_broken, so that the first sample cannot stop a run."""
_NUM_NAMED = 5
"""Number of broken samples that a message names."""


@dataclass(frozen=True)
class Part:
    """A worker's report on the rows that it has written into one buffer."""

    cursor: dict[int, tuple[int, int]]
    """The next (epoch, offset) of every stream that was read from."""
    broken: list[str]
    """`shard/key: reason` of each broken sample that was skipped."""


@dataclass(frozen=True)
class Row:
    """A sample and its place in the micro-batch."""

    place: int
    text: Tensor
    index: int
    epoch: int
    decode: Decode

    def write(self, batch: MicroBatch, image: Tensor) -> None:
        """Write the sample into a buffer."""
        batch.image[self.place] = image
        batch.text[self.place] = self.text
        batch.index[self.place] = self.index
        batch.epoch[self.place] = self.epoch


@dataclass(frozen=True)
class Job:
    """One worker's share of a rank's samples, pickled to the worker.

    The rank's sample number q, counted from the start of the run, is sample number q // len(slots) of slots[q %
    len(slots)].
    """

    samples: Samples
    order: Mixture
    settings: DataSettings
    share: Share
    slots: tuple[int, ...]
    """The rank's slots, in order."""
    cursor: dict[int, tuple[int, int]]
    """The (epoch, offset) at which each of their streams begins."""
    first: int
    """Number of the rank's first sample."""
    decode_twice: bool
    """After the micro-batches of a step, decode all but the last again from the compressed images."""
    batches: SharedBatches
    """The buffers to write into."""
    ahead: FetchAhead
    """Prefetches remote shards."""
    worker: int = 0
    """This worker owns slots[worker::num_workers]."""
    num_workers: int = 1
    at: Any = field(default_factory=lambda: [-1, -1, 0])
    """Integers that the trainer reads: shard and entry of the current sample, or -1, and the count of
    fetching.progress."""


class _Reader:
    """Reads the next good sample of each stream, and counts the broken ones."""

    def __init__(self, job: Job) -> None:
        self._job = job
        mine = job.slots[job.worker :: job.num_workers]
        streams = [stream for slot in mine for stream in job.order.streams(slot)]
        self.cursor = {stream: job.cursor[stream] for stream in streams}
        self._num_read = 0
        self._num_broken = 0
        self._last: list[str] = []
        """The last broken samples."""

    def next(self, stream: int, place: int, broken: list[str]) -> tuple[Row, Tensor]:
        """Read the stream's next good sample, for a place in the micro-batch, and add the broken ones to `broken`.

        Returns:
            The row and its image.

        Raises:
            DataError: If too many samples are broken, or all that the stream has in two epochs.
        """
        job = self._job
        # A worker that is silent for timeout_s counts as hung, so it must not wait that long for a file.
        patience_s = min(job.settings.retry_s, job.settings.worker_timeout_s / 2)
        epoch, offset = self.cursor[stream]
        skipped = 0
        while True:
            epoch, offset = job.order.settle(stream, epoch, offset)
            shard, entry = job.order.locate(stream, epoch, offset)
            index = job.order.index(shard, entry)
            offset += 1
            self._num_read += 1
            job.at[:2] = shard, entry
            try:
                with breaks_sample(OSError):
                    read = partial(job.samples.read, shard, entry, epoch, index)
                    decode, text = read_patiently(read, patience_s)
                    # Decode now, so that a broken image is skipped before it takes a row.
                    image = decode()
                self.cursor[stream] = epoch, offset
                return Row(place, text, index, epoch, decode), image
            except BrokenSample as error:
                broken.append(name_broken(job.samples.name, shard, entry, error))
                self._count(broken[-1], error.__cause__)
            skipped += 1
            # With data.max_broken=1, a stream without a readable sample must still end. Its samples differ by epoch.
            if skipped >= _SPARE_BROKEN + 2 * job.order.length(stream, epoch):
                raise DataError(
                    f"stream {stream} has no readable sample among {skipped}; the last ones: {'; '.join(self._last)}"
                )

    def _count(self, text: str, cause: BaseException | None) -> None:
        """Count a broken sample.

        Args:
            text: `shard/key: reason`.
            cause: What our code or the user's raised.

        Raises:
            DataError: If too many samples are broken.
        """
        self._num_broken += 1
        self._last = [*self._last, text][-_NUM_NAMED:]
        most = self._job.settings.max_broken
        if self._num_broken > _SPARE_BROKEN + most * self._num_read:
            trace = "".join(["\n", *traceback.format_exception(cause)]) if cause else ""
            raise DataError(
                f"{self._num_broken} of {self._num_read} samples are broken, more than {_SPARE_BROKEN} plus "
                f"data.max_broken={most:g} of them; the last ones: {'; '.join(self._last)}. Compare data.image_key "
                "and data.captions with the members of the samples, repair the shards, or raise data.max_broken"
                + trace
            )


def produce_parts(job: Job, next_buffer: Callable[[], int]) -> Iterator[Part]:
    """Write one worker's rows of all micro-batches of its rank, step by step, endlessly.

    Args:
        job: The worker's share.
        next_buffer: Returns the number of the buffer for the next micro-batch. It may wait for one.

    Raises:
        DataError: If too many samples are broken, or a shard cannot be fetched.
        OSError: If a shard cannot be read. The message names it.
    """
    reader = _Reader(job)
    job.ahead.move(dict(reader.cursor))
    job.ahead.start()
    start = job.first
    while True:
        first_pass = []
        for _ in range(job.share.num_micro_batches):
            rows, part = _fill(job, reader, start, job.batches[next_buffer()])
            job.at[:2] = -1, -1
            job.ahead.move(dict(reader.cursor))
            yield part
            if job.decode_twice:
                first_pass.append(rows)
            start += job.share.micro_batch
        # GradAccum's second pass does not request the last micro-batch, because its graph is kept.
        for rows in first_pass[:-1]:
            batch = job.batches[next_buffer()]
            for row in rows:
                row.write(batch, row.decode())
            yield Part({}, [])


def _fill(job: Job, reader: _Reader, start: int, batch: MicroBatch) -> tuple[list[Row], Part]:
    """Write the worker's rows of the micro-batch that begins with the rank's sample number `start`."""
    rows: list[Row] = []
    part = Part({}, [])
    for q in range(start, start + job.share.micro_batch):
        number, i = divmod(q, len(job.slots))
        # The workers own the slots in turn. Samples of other workers' slots are not even located.
        if i % job.num_workers == job.worker:
            stream = job.order.stream(job.slots[i], number)
            row, image = reader.next(stream, q - start, part.broken)
            row.write(batch, image)
            rows.append(row)
            part.cursor[stream] = reader.cursor[stream]
    return rows, part
