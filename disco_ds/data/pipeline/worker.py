"""The work of one decoding process: it owns some of its rank's slots.

Of every micro-batch of the rank it writes the rows that belong to these slots into a buffer shared by all workers,
which together fill it, whatever their number.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from disco_ds.data.images.broken import (
    BrokenSample,
    DataError,
    breaks_sample,
    name_broken,
    read_patiently,
)
from disco_ds.data.order.mixture import Mixture
from disco_ds.data.pipeline.shared_batches import SharedBatches
from disco_ds.data.pipeline.step_data import MicroBatch
from disco_ds.data.remote.prefetch import FetchAhead
from disco_ds.data.sources.base import Decode, Samples

SPARE_BROKEN = 16
"""Broken samples that a worker tolerates beyond data.max_broken, lest the first sample stop a run."""
NUM_NAMED = 5
"""How many broken samples a message names."""


@dataclass(frozen=True)
class Part:
    """A worker's report on the rows that it has written into one buffer."""

    cursor: dict[int, tuple[int, int]]
    """The next (epoch, offset) of every stream that was read from."""
    broken: list[str]
    """`shard/key: reason` for each sample that was skipped."""


@dataclass(frozen=True)
class Row:
    """A sample and its place in the micro-batch."""

    place: int
    text: Tensor
    index: int
    epoch: int
    decode: Decode

    def write(self, batch: MicroBatch, image: Tensor) -> None:
        batch.image[self.place] = image
        batch.text[self.place] = self.text
        batch.index[self.place] = self.index
        batch.epoch[self.place] = self.epoch


@dataclass(frozen=True)
class Job:
    """One worker's share of a rank's stream; it is pickled to the worker.

    The rank's sample number q (from the run's start) belongs to slots[q % len(slots)], as its number q // len(slots).
    """

    samples: Samples
    order: Mixture
    max_broken: float
    patience_s: float
    slots: tuple[int, ...]
    """The rank's slots, in order."""
    cursor: dict[int, tuple[int, int]]
    """The (epoch, offset) at which each of their streams begins."""
    first: int
    """Number of the rank's first sample."""
    micro_batch: int
    num_micro_batches: int
    """Micro-batches per rank and step."""
    decode_twice: bool
    """After the micro-batches of a step, decode all but the last again from the compressed images."""
    batches: SharedBatches
    """The buffers to write into."""
    ahead: FetchAhead | None = None
    """Fetches the shards that its streams will need, if they are remote; None: they are local."""
    worker: int = 0
    """It owns slots[worker::num_workers]."""
    num_workers: int = 1
    at: Any = None
    """Integers that the trainer reads too: shard and entry of the sample at hand, or -1; and fetching.progress."""


class _Reader:
    """Reads the next good sample of a stream, and counts the broken ones."""

    def __init__(self, job: Job) -> None:
        self._samples = job.samples
        self._order = job.order
        self._max_broken, self._patience_s = job.max_broken, job.patience_s
        self._at = job.at if job.at is not None else [0, 0, 0]
        self._read = 0
        self._broken = 0
        self._last: list[str] = []
        self._cause: BaseException | None = None
        """What the last broken sample made our code, or the user's, raise."""

    def next(
        self, stream: int, epoch: int, offset: int, broken: list[str]
    ) -> tuple[Tensor, Decode, Tensor, int, int, int]:
        """(image, what decodes it, text, id, epoch, offset) of the stream's next good sample from (epoch, offset) on.

        Raises:  DataError if too many samples are broken, or all that the stream has in two epochs.
        """
        skipped = 0
        while True:
            epoch, offset = self._order.settle(stream, epoch, offset)
            shard, entry = self._order.locate(stream, epoch, offset)
            index = self._order.index(shard, entry)
            self._read += 1
            self._at[:2] = shard, entry
            try:
                with breaks_sample(OSError):
                    read = partial(self._samples.read, shard, entry, epoch, index)
                    decode, text = read_patiently(read, self._patience_s)
                    # Decoded at once, so that a broken image is skipped before its place in the batch is taken.
                    return decode(), decode, text, index, epoch, offset
            except BrokenSample as error:
                broken.append(name_broken(self._samples.name, shard, entry, error))
                self._cause = error.__cause__
            skipped += 1
            offset += 1
            self._count(broken[-1])
            # A stream without a readable sample ends even with data.max_broken=1. Its samples differ between epochs.
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
                + "".join(["\n", *traceback.format_exception(self._cause)] if self._cause else "")
            )


def produce_parts(job: Job, next_buffer: Callable[[], int]) -> Iterator[Part]:
    """Write one worker's rows of all micro-batches of its rank, step by step, endlessly.

    Args:    next_buffer: returns the number of the buffer for the next micro-batch; it may wait for one.
    Raises:  DataError, OSError naming a shard that cannot be read.
    """
    reader, cursor = _Reader(job), dict(job.cursor)
    mine = [
        stream
        for slot in job.slots[job.worker :: job.num_workers]
        for stream in job.order.streams(slot)
    ]
    if job.ahead is not None:
        job.ahead.start({stream: cursor[stream] for stream in mine})
    start = job.first
    while True:
        first_pass = []
        for _ in range(job.num_micro_batches):
            rows, part = _produce(job, reader, cursor, start, job.batches[next_buffer()])
            if job.at is not None:
                job.at[:2] = -1, -1
            if job.ahead is not None:
                job.ahead.move({stream: cursor[stream] for stream in mine})
            yield part
            if job.decode_twice:
                first_pass.append(rows)
            start += job.micro_batch
        # The second pass of GradAccum; it keeps the graph of the last micro-batch, which it does not request again.
        for rows in first_pass[:-1]:
            batch = job.batches[next_buffer()]
            for row in rows:
                row.write(batch, row.decode())
            yield Part({}, [])


def _produce(
    job: Job, reader: _Reader, cursor: dict[int, tuple[int, int]], start: int, batch: MicroBatch
) -> tuple[list[Row], Part]:
    """Write the worker's rows of the micro-batch from the rank's sample number `start` on."""
    rows: list[Row] = []
    moved: set[int] = set()
    broken: list[str] = []
    for q in range(start, start + job.micro_batch):
        number, i = divmod(q, len(job.slots))
        # Slots are dealt to the workers in turn; the samples of other workers' slots are not even located.
        if i % job.num_workers == job.worker:
            stream = job.order.stream(job.slots[i], number)
            image, decode, text, index, epoch, offset = reader.next(stream, *cursor[stream], broken)
            row = Row(q - start, text, index, epoch, decode)
            row.write(batch, image)
            cursor[stream] = epoch, offset + 1
            moved.add(stream)
            if job.decode_twice:
                rows.append(row)
    return rows, Part({stream: cursor[stream] for stream in moved}, broken)
