"""The micro-batches of one rank, step by step, and its position in the data order.

This is the trainer's interface to the data. GradAccum reads the micro-batches of a step twice. The first reading never
raises, because an exception on one rank would leave the other ranks waiting in a collective. Its errors are returned
with the step instead. The loader receives the rank and the number of ranks as integers, and never communicates with
other ranks.
"""

# Symbols in shapes: m samples in a micro-batch; L tokens per text.

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.batches import (
    MicroBatch,
    Share,
    SharedBatches,
    Staging,
    StepData,
    count_buffers,
    count_bytes,
    count_on_device,
)
from disco_ds.data.errors import DataError
from disco_ds.data.feed import DeviceCopy, Feed
from disco_ds.data.order import Cursor
from disco_ds.data.samples import InputSpec, declare_arrays
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.cache import FetchAhead
from disco_ds.data.sources.load import check_cache, count_epoch, count_slots, fingerprint, mix
from disco_ds.data.worker import InProcess, Worker, WorkerSpec, describe_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Position:
    """A rank's position in the data order. It advances by whole steps, because checkpoints fall between steps."""

    steps: int
    """Number of steps that have been read."""
    samples: int
    """Number of samples that all ranks together have read in these steps. It is not computed from the number of steps,
    because the global batch may have changed."""
    broken: int
    """Number of broken samples that were skipped."""
    dropped: int
    """Number of samples that were dropped or lost (see errors.DroppedSample and errors.LostSample)."""
    cursor: Cursor
    """The position from which to continue reading each of the rank's streams."""


class Loader:
    """Reads a rank's micro-batches, step by step, in the order that order.py defines.

    A micro-batch is read when it is first requested. GradAccum (training/grad_accum.py) passes over the micro-batches
    of a step twice; the second pass omits the last one. `staging.kept_on` selects where images are kept between the
    two passes:

    - "device": The device keeps all micro-batches of the step. A buffer on the host is refilled as soon as it is
      copied.
    - "host": The buffers on the host are kept until the end of the step, and are copied to the device a second time.
    - "compressed": The workers keep the compressed images, and decode them a second time into the next free buffers.

    Args:
        settings: Settings of the data.
        sources: The sources that load_sources returned.
        inputs: The image size and tokens that the model expects.
        share: This rank's share of every global batch.
        seed: Seed of the data order.
        state: Position to resume from, as merge_states returns it. The run that saved it may have had any number of
            ranks. None means the start of the data.
        staging: Resources of this rank.
        count_tokens: Function that returns how many tokens of each text the model needs, [m], for texts [m, L]. None:
            the model needs all of them.

    Raises:
        ValueError: If the number of slots does not suit the data or the number of ranks, if the cache is too small for
            the remote shards, or if the data order differs from that of `state`.
    """

    def __init__(
        self,
        settings: DataSettings,
        sources: Sequence[Source],
        inputs: InputSpec,
        share: Share,
        seed: int,
        state: dict[str, Any] | None = None,
        staging: Staging | None = None,
        count_tokens: Callable[[Tensor], np.ndarray] | None = None,
    ) -> None:
        staging = staging or Staging()
        self._count_tokens = count_tokens
        self._num_texts = self._num_tokens = 0
        self._mean_tokens = 0.0
        """Mean number of tokens of the latest micro-batch's texts."""
        self.num_samples = sum(source.num_samples for source in sources)
        self.epoch_samples = count_epoch(settings, sources)
        num_slots = count_slots(settings, sources, share.size, state["slots"] if state else None)
        check_cache(settings, sources, num_slots, share.size, staging.ranks_here or share.size)
        self._origin: dict[str, Any] = {
            "slots": num_slots,
            "sources": len(sources),
            "fingerprint": fingerprint(settings, sources),
            "window": settings.window,
        }
        """The values that determine the data order, except the seed. A saved state with other values is refused."""
        for key, expected in self._origin.items():
            if state is not None and state[key] != expected:
                raise ValueError(
                    f"the data order of the checkpoint has {key} {state[key]}, this run has {expected}; restore the "
                    "setting or the shards, or start a new run"
                )
        order = mix(settings, sources, num_slots, seed)
        # Global position p belongs to slot p % S and to rank p % N. N divides S, so these slots belong to this rank.
        slots = tuple(range(share.rank, num_slots, share.size))
        streams = [stream for slot in slots for stream in order.streams(slot)]
        if state is None:
            self._position = _Position(0, 0, 0, 0, dict.fromkeys(streams, (0, 0)))
        else:
            cursor = {stream: tuple(state["cursor"][stream]) for stream in streams}
            # Rank 0 continues from the total counts. The other ranks start at 0, so that the sums over ranks are right.
            broken, dropped = (state["broken"], state["dropped"]) if share.rank == 0 else (0, 0)
            self._position = _Position(state["steps"], state["samples"], broken, dropped, cursor)
        self._damaged: set[str] = set()
        """Descriptions of the damaged shards so far."""
        self._before = self._position
        """The position at the start of the current step."""
        self._error: str | None = None
        self._share = share
        self._num_parts = share.num_micro_batches
        self._kept_on, self._device = staging.kept_on, torch.device(staging.device)
        self._data = StepData()
        """The record of the current step's data."""
        self._num_unread = 0
        """Number of micro-batches of this step that the first pass has not read yet."""
        self._kept: list[MicroBatch] = []
        """If images are kept on the device: this step's micro-batches."""
        self._held: list[int] = []
        """If images are kept on the host: numbers of the buffers that contain the current step's micro-batches."""
        self._copies: dict[int, DeviceCopy] = {}
        """If images are kept on the host: copies that have been started for the second pass, by micro-batch number."""
        self._num_to_repeat = 0
        """If images are kept compressed: number of micro-batches of this step that must be decoded a second time."""
        self._resources = ExitStack()

        # By default, one core is reserved for the trainer.
        num_workers = max(staging.cores - 1, 1) if settings.workers is None else settings.workers
        num_workers = min(num_workers, len(slots))
        arrays = declare_arrays(settings, inputs)
        most = int(staging.most_bytes // (share.micro_batch * count_bytes(arrays)))
        num = count_buffers(settings.prefetch, self._num_parts, staging.kept_on, num_workers, most)
        # The buffers are allocated first, because the workers inherit them.
        self._batches = SharedBatches(num, share.micro_batch, arrays)
        self._resources.callback(self._batches.close)
        spec = WorkerSpec(
            sources=sources,
            order=order,
            settings=settings,
            inputs=inputs,
            seed=seed,
            share=share,
            slots=slots,
            cursor=self._position.cursor,
            # The number of positions p < samples with p % size == rank.
            first_sample=(self._position.samples + share.size - 1 - share.rank) // share.size,
            decode_twice=staging.kept_on == "compressed",
            batches=self._batches,
            # Without workers, nothing is prefetched, because the trainer's own process reads the samples.
            ahead=FetchAhead(sources, order, settings.remote.prefetch_shards if num_workers else 0),
        )
        workers = [
            Worker(replace(spec, worker=number, num_workers=num_workers), settings.worker_timeout_s)
            for number in range(num_workers)
        ]
        self.worker_pids = [worker.pid for worker in workers]
        producers: Sequence[Worker | InProcess] = workers or [InProcess(spec)]
        for producer in producers:
            self._resources.callback(producer.close)
        on_device = count_on_device(self._num_parts, staging.kept_on)
        self._feed = Feed(self._batches, producers, self._device, on_device)
        self._resources.callback(self._feed.close)

    @property
    def broken(self) -> int:
        """Number of broken samples that this rank has skipped since the run was started or resumed.

        Rank 0's number also includes what all ranks skipped before the run was resumed.
        """
        return self._position.broken

    @property
    def dropped(self) -> int:
        """Number of dropped or lost samples of this rank since the run was started or resumed.

        Rank 0's number also includes those of all ranks before the run was resumed. See errors.DroppedSample and
        errors.LostSample for what counts.
        """
        return self._position.dropped

    def start_step(self, keep_text: bool = False) -> StepData:
        """Begin the next step. The micro-batches that the previous step has left unread are read and discarded.

        Args:
            keep_text: Whether first_pass also fills StepData.text.

        Returns:
            The record of this step's data, which first_pass fills.
        """
        self._finish_step()
        self._before = self._position
        self._data = StepData(error=self._error, text=[] if keep_text else None)
        self._num_unread = self._num_parts
        # The workers decode every micro-batch twice, except the last one.
        self._num_to_repeat = self._num_parts - 1 if self._kept_on == "compressed" else 0
        return self._data

    def first_pass(self) -> Iterator[MicroBatch]:
        """Read this step's micro-batches. Each one is read when it is requested.

        A micro-batch is valid until the next one is requested or, if images are kept on the device, until the next step
        starts.

        This raises no error. After an error, the rest of this step and all later steps consist of placeholders, and
        StepData.error is set.
        """
        while self._num_unread:
            batch = self._read()
            self._num_unread -= 1
            if self._kept_on == "device":
                self._kept.append(batch)
            yield batch

    def second_pass(self) -> Iterator[MicroBatch]:
        """Return this step's micro-batches once more, in the same order, except the last one.

        A micro-batch is valid until the next one is requested.

        Raises:
            DataError: If a micro-batch cannot be decoded again. A placeholder would make the gradients wrong, because
                the loss of this step was computed from the real samples.
        """
        for k in range(self._num_parts - 1):
            if self._kept_on == "device":
                yield self._kept[k]
            elif self._kept_on == "host":
                yield self._copy_again(k)
            else:
                yield self._decode_again()

    def drop_step(self) -> None:
        """Reset the position to the start of this step, and read no more data.

        Call this if any rank could not read its part of the step.
        """
        self._error = self._error or "another rank could not read its data"
        self._position = self._before

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position after the last step without an error, as input for merge_states."""
        return self._origin | asdict(self._position)

    def close(self) -> None:
        """Stop the workers and close all files."""
        self._error = self._error or "the loader is closed"
        self._resources.close()

    def _read(self) -> MicroBatch:
        """Return the next micro-batch of the first pass or, after an error, a placeholder."""
        if self._error is None:
            try:
                return self._accept(self._take())
            except Exception as error:
                self._error = self._describe(error, self._position.steps + 1)
        self._data.error = self._error
        return self._placeholder

    def _take(self) -> DeviceCopy:
        """Wait for the next micro-batch, and record the waiting time."""
        start = time.perf_counter()
        try:
            return self._feed.take()
        finally:
            self._data.wait_s += time.perf_counter() - start

    def _accept(self, copy: DeviceCopy) -> MicroBatch:
        """Record a micro-batch of the first pass, and return it."""
        data, on_host = self._data, self._batches[copy.number]
        data.index.append(on_host["index"].clone())
        if data.text is not None:
            data.text.append(on_host["text"].clone())
        batch = self._arrive(copy)
        if "lengths" in batch:
            data.num_tokens += int(batch["lengths"].sum())
        for report in copy.reports:
            data.cursor.update(report.cursor)
            data.broken += report.broken
            data.dropped += report.dropped
            for damaged in report.damaged:
                # Several workers may read the same shard.
                if damaged not in self._damaged:
                    self._damaged.add(damaged)
                    data.damaged.append(damaged)
                    logger.warning("%s", damaged)
        is_last = self._num_unread == 1
        if is_last:
            position = self._position
            self._position = _Position(
                position.steps + 1,
                position.samples + self._share.global_batch,
                position.broken + len(data.broken),
                position.dropped + data.dropped,
                position.cursor | data.cursor,
            )
        if self._kept_on == "host":
            self._held.append(copy.number)
            # After the last micro-batch, start the second pass, which begins with micro-batch 0.
            self._copy_ahead(0 if is_last else None)
        else:
            self._recycle(copy.number)
        return batch

    def _arrive(self, copy: DeviceCopy) -> MicroBatch:
        """Return a copied micro-batch, with the number of tokens of each text if they are counted."""
        batch = self._feed.arrive(copy)
        if self._count_tokens is None:
            return batch
        lengths = self._count_tokens(self._batches[copy.number]["text"])
        self._num_texts += len(lengths)
        self._num_tokens += int(lengths.sum())
        self._mean_tokens = float(lengths.mean())
        return {**batch, "lengths": lengths}

    def describe_long_texts(self) -> str | None:
        """Describe the texts of the latest micro-batch, if they are longer than usual. Otherwise, return None."""
        usual = self._num_tokens / max(self._num_texts, 1)
        if self._mean_tokens <= 1.05 * usual:
            return None
        return (
            f"the texts of this micro-batch are longer than usual: {self._mean_tokens:.1f} tokens on average, compared "
            f"with {usual:.1f} so far; disco-ds plan --text-tokens {self._mean_tokens:.0f} plans for such a batch"
        )

    def _recycle(self, number: int) -> None:
        """Release a host buffer, and start copying the next micro-batch if it is decoded."""
        self._feed.release(number)
        self._feed.look_ahead()

    def _copy_again(self, k: int) -> MicroBatch:
        """Return micro-batch k a second time, from its buffer on the host."""
        if self._error is not None:
            return self._placeholder
        copy = self._copies.pop(k, None) or self._feed.start_copy(self._held[k])
        self._copy_ahead(k + 1)
        return self._arrive(copy)

    def _copy_ahead(self, k: int | None) -> None:
        """Start copying the micro-batch that will be requested next.

        Args:
            k: Micro-batch of this step to copy again. If it is None or the last one, copy the next new micro-batch.
        """
        # GradAccum keeps the autograd graph of the last micro-batch, so it does not request that micro-batch again.
        if k is not None and k < self._num_parts - 1:
            self._copies = {k: self._feed.start_copy(self._held[k])}
        else:
            self._feed.look_ahead()

    def _decode_again(self) -> MicroBatch:
        """Return the next micro-batch that the workers have decoded a second time. Raises DataError if that fails."""
        try:
            copy = self._take()
        except Exception as error:
            raise DataError(self._describe(error, self._position.steps)) from None
        self._num_to_repeat -= 1
        batch = self._arrive(copy)
        self._recycle(copy.number)
        return batch

    def _finish_step(self) -> None:
        """Read the micro-batches of the last step that were never requested, and release the step's buffers."""
        for _ in self.first_pass():
            pass
        for number in self._held:
            self._feed.release(number)
        # If the trainer skipped its second pass, read the results of the second decoding here.
        try:
            while self._error is None and self._num_to_repeat:
                self._decode_again()
        except DataError as error:
            self._error = str(error)
        self._held, self._kept, self._copies = [], [], {}

    def _describe(self, error: Exception, step: int) -> str:
        return f"data of rank {self._share.rank}, step {step}: {describe_error(error)}"

    @cached_property
    def _placeholder(self) -> MicroBatch:
        arrays = self._batches[0].items()
        return {name: torch.zeros_like(array, device=self._device) for name, array in arrays}


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the state_dicts of all ranks' loaders into one state, from which any number of ranks can resume.

    Raises:
        ValueError: If the state_dicts are not from the same step of the same run, or if a rank's state_dict is missing.
    """
    first = states[0]
    merged = {key: first[key] for key in first if key not in ("cursor", "broken", "dropped")}
    if differing := [key for key in merged if any(state[key] != first[key] for state in states)]:
        raise ValueError(
            f"the ranks' data positions differ in {', '.join(differing)}; they must be from the same step "
            "of the same run"
        )
    cursor = {stream: position for state in states for stream, position in state["cursor"].items()}
    num_streams = first["slots"] * first["sources"]
    if len(cursor) != num_streams:
        raise ValueError(
            f"the ranks' data positions contain only {len(cursor)} of {num_streams} streams, so those of some "
            "ranks are missing"
        )
    for key in ("broken", "dropped"):
        merged[key] = sum(state[key] for state in states)
    merged["cursor"] = dict(sorted(cursor.items()))
    return merged
