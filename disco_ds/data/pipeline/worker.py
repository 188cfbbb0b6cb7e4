"""The work of one data worker, which owns some of its rank's slots (order/slots.py).

In every micro-batch of the rank, the worker writes the rows that belong to its slots. All workers of the rank share the
buffers, and together they fill all rows.
"""

from __future__ import annotations

import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.errors import (
    BrokenSample,
    DataError,
    DroppedSample,
    LostSample,
    breaks_sample,
    name_broken,
    read_patiently,
)
from disco_ds.data.order.mixture import Cursor, Mixture
from disco_ds.data.order.slots import Share
from disco_ds.data.order.whole_shards import WholeShards
from disco_ds.data.pipeline.shared_batches import SharedBatches
from disco_ds.data.pipeline.step_data import MicroBatch
from disco_ds.data.remote.fetching import progress
from disco_ds.data.remote.prefetch import FetchAhead
from disco_ds.data.sources.base import Decode, Samples

_SPARE_BROKEN = 16
"""Number of broken samples that a worker tolerates in addition to the fraction data.max_broken, so that a few broken
samples at the start cannot stop a run."""
_SPARE_DAMAGED = 3
"""Number of damaged shards that a worker tolerates in addition to the fraction data.max_broken of the shards."""
_MANY_SKIPPED = 10_000
"""After this many samples in a row without a usable one, a worker logs a warning."""
_NUM_NAMED = 5
"""Maximum number of broken samples that an error message lists."""


@dataclass
class Part:
    """A worker's report on the rows that it has written into one buffer."""

    cursor: Cursor = field(default_factory=dict)
    """The position from which to continue reading each stream whose samples are in these rows."""
    broken: list[str] = field(default_factory=list)
    """`shard/key: reason` of each broken sample that was skipped."""
    dropped: int = 0
    """Number of samples that were dropped (see DroppedSample), or lost with the rest of a damaged shard."""
    damaged: list[str] = field(default_factory=list)
    """`shard: reason` of each damaged shard that this worker has found."""


@dataclass(frozen=True)
class Row:
    """A sample and its row number in the micro-batch."""

    place: int
    text: Tensor
    index: int
    epoch: int
    group_id: int
    decode: Decode

    def write(self, batch: MicroBatch, image: Tensor) -> None:
        """Write the sample to its row of a buffer."""
        batch.image[self.place] = image
        batch.text[self.place] = self.text
        batch.index[self.place] = self.index
        batch.epoch[self.place] = self.epoch
        batch.group_id[self.place] = self.group_id


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to produce its share of a rank's samples. It is sent to the worker.

    The rank's samples are numbered from the start of training. Sample q of the rank is sample q // len(slots) of the
    slot slots[q % len(slots)].
    """

    samples: list[Samples]
    """The samples of each source."""
    order: Mixture
    settings: DataSettings
    share: Share
    slots: tuple[int, ...]
    """All slots of the rank, including those of its other workers, in order."""
    cursor: Cursor
    """The position from which to start reading each stream of `slots`."""
    first: int
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


class _Reader:
    """Reads the next usable sample of a stream, and counts the broken samples that it skips."""

    def __init__(self, job: Job) -> None:
        self._job = job
        for order in job.order.orders:
            if isinstance(order, WholeShards):
                # A lambda, because FetchAhead deep-copies the order. With a bound method, the copy would include the
                # samples and their open reader.
                order.count = lambda shard: job.samples[0].count(shard)
        mine = job.slots[job.worker :: job.num_workers]
        streams = [stream for slot in mine for stream in job.order.streams(slot)]
        self.cursor = {stream: job.cursor[stream] for stream in streams}
        self._num_read = 0
        self._num_broken = 0
        self._visited = set[tuple[int, int]]()
        """(source, shard) of all shards that were read."""
        self._damaged: dict[tuple[int, int], str] = {}
        """Maps (source, shard) of each damaged shard that was read to its description."""
        self._last: deque[str] = deque(maxlen=_NUM_NAMED)
        """Descriptions of the last few broken samples, for the error message."""

    def fill(self, start: int, batch: MicroBatch) -> tuple[list[Row], Part]:
        """Write the worker's rows of one micro-batch, whose first sample is the rank's sample number `start`.

        Returns:
            The rows, and the report on them.
        """
        job = self._job
        rows: list[Row] = []
        part = Part()
        for q in range(start, start + job.share.micro_batch):
            number, i = divmod(q, len(job.slots))
            # Slots are assigned to the workers in turn. Skip the samples of other workers' slots.
            if i % job.num_workers == job.worker:
                row, image = self.next(job.order.stream(job.slots[i], number), q - start, part)
                row.write(batch, image)
                rows.append(row)
        job.at[:3] = -1, -1, -1
        job.ahead.move(dict(self.cursor))
        return rows, part

    def next(self, stream: int, place: int, part: Part) -> tuple[Row, Tensor]:
        """Read the stream's next usable sample.

        Args:
            stream: Number of the stream.
            place: Row number of the sample in the micro-batch.
            part: The report, in which skipped samples are counted and the stream's position is updated.

        Returns:
            The row and its decoded image.

        Raises:
            DataError: If too many samples are broken, or if the stream has no usable sample in many epochs (see
                `searched_epochs` of the orders).
            OSError: If a shard cannot be read.
        """
        job = self._job
        patience_s = job.settings.retry_s
        source, slot = job.order.split(stream)
        order, samples = job.order.orders[source], job.samples[source]
        epoch, offset = self.cursor[stream]
        begin = epoch
        skipped = 0
        while True:
            epoch, offset = read_patiently(order.settle, patience_s, slot, epoch, offset)
            shard, entry = order.locate(slot, epoch, offset)
            index = job.order.sample_id(source, shard, entry)
            drawn = order.epoch(slot, epoch)  # determines the sample's random numbers
            offset += 1
            self._num_read += 1
            self._visited.add((source, shard))
            job.at[:3] = source, shard, entry
            progress.add()  # shows the trainer that this worker is alive
            try:
                with breaks_sample(OSError):
                    decode, text, group_id = read_patiently(
                        samples.read, patience_s, shard, entry, drawn, index
                    )
                    # Decode now, so that a broken image is skipped before it takes a row.
                    image = decode()
                self.cursor[stream] = part.cursor[stream] = epoch, offset
                return Row(place, text, index, drawn, group_id, decode), image
            except (DroppedSample, LostSample) as error:
                part.dropped += 1
                self._num_read -= 1
                if isinstance(error, LostSample) and (source, shard) not in self._damaged:
                    part.damaged.append(name_broken(samples.name, shard, entry, error))
                    self._damaged[source, shard] = part.damaged[-1]
                    self._check_damaged()
            except BrokenSample as error:
                part.broken.append(name_broken(samples.name, shard, entry, error))
                self._count(part.broken[-1], error.__cause__)
            skipped += 1
            if skipped == _MANY_SKIPPED:
                warnings.warn(
                    f"stream {stream} has no usable sample among its last {skipped:,} samples; check data.filter, "
                    "data.uids and data.transforms",
                    stacklevel=2,
                )
            # Even with data.max_broken=1, a stream without any readable sample must not be searched forever.
            fewest = max(_SPARE_BROKEN, order.searched_samples)
            if skipped >= fewest and epoch - begin > order.searched_epochs:
                raise DataError(
                    f"stream {stream} has no usable sample among its last {skipped} samples. While this "
                    f"micro-batch was read, data.filter, data.uids or data.transforms excluded {part.dropped} samples,"
                    " or the manifest counts more samples than their shards contain. The last broken samples: "
                    f"{'; '.join(self._last) or 'none'}"
                )

    def _check_damaged(self) -> None:
        """Raise DataError if too many shards are damaged."""
        most = self._job.settings.max_broken
        if len(self._damaged) > _SPARE_DAMAGED + most * len(self._visited):
            named = list(self._damaged.values())[-_NUM_NAMED:]
            raise DataError(
                f"{len(self._damaged)} of {len(self._visited)} shards are damaged; the limit is {_SPARE_DAMAGED} plus "
                f"the fraction data.max_broken={most:g} of the shards read. The last ones: {'; '.join(named)}. "
                "`disco-ds index SHARDS --check --full` lists all damaged shards"
            )

    def _count(self, text: str, cause: BaseException | None) -> None:
        """Count a broken sample.

        Args:
            text: Description of the sample, `shard/key: reason`.
            cause: The original exception from disco_ds or from the user's code, if any.

        Raises:
            DataError: If too many samples are broken.
        """
        self._num_broken += 1
        self._last.append(text)
        most = self._job.settings.max_broken
        if self._num_broken > _SPARE_BROKEN + most * self._num_read:
            trace = "".join(["\n", *traceback.format_exception(cause)]) if cause else ""
            raise DataError(
                f"{self._num_broken} of {self._num_read} samples are broken; the limit is {_SPARE_BROKEN} plus the "
                f"fraction data.max_broken={most:g} of the samples read. The last broken samples: "
                f"{'; '.join(self._last)}. "
                "Compare data.image_key and data.captions with the members of the samples, repair the shards, or "
                f"raise data.max_broken{trace}"
            )


def produce_parts(job: Job, next_buffer: Callable[[], int]) -> Iterator[Part]:
    """Write one worker's rows of every micro-batch of its rank, step by step, forever.

    Args:
        job: Which rows to write, and where to read their samples.
        next_buffer: Function that returns the number of the buffer for the next micro-batch. It may wait for a buffer.

    Yields:
        A report on each micro-batch, after the worker's rows have been written.

    Raises:
        DataError: If too many samples are broken, or if a shard cannot be fetched.
        OSError: If a shard cannot be read. The message names the shard.
    """
    reader = _Reader(job)
    job.ahead.move(dict(reader.cursor))
    job.ahead.start()
    start = job.first
    while True:
        first_pass = []
        for _ in range(job.share.num_micro_batches):
            rows, part = reader.fill(start, job.batches[next_buffer()])
            yield part
            if job.decode_twice:
                first_pass.append(rows)
            start += job.share.micro_batch
        # GradAccum's second pass does not request the last micro-batch, because its autograd graph is kept.
        for rows in first_pass[:-1]:
            batch = job.batches[next_buffer()]
            for row in rows:
                row.write(batch, row.decode())
                progress.add()
            yield Part()
