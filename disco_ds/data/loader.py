"""The micro-batches of one rank, step by step, and its position in the data order.

`Loader` is the trainer's interface to the data. GradAccum reads the micro-batches of a step twice. The first reading
never raises, because an exception on one rank would leave the other ranks waiting in a collective. Its errors are
returned with the step instead. The loader receives the rank and the number of ranks as integers, and never communicates
with other ranks.

`Feed` delivers micro-batches from the workers' buffers on the host to the device. While a micro-batch is in use, the
next one is copied.
"""

# Symbols in shapes: m samples in a micro-batch; L tokens per text.

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.batches import (
    MicroBatch,
    Report,
    Share,
    SharedBatches,
    Staging,
    StepData,
    count_buffers,
    count_on_device,
)
from disco_ds.data.order import Cursor
from disco_ds.data.samples import InputSpec, declare_arrays
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.load import check_cache, count_epoch, count_slots, fingerprint, mix
from disco_ds.data.worker import InProcess, Worker, WorkerSpec, describe_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """A rank's position in the data order. It advances by whole steps, because checkpoints fall between steps."""

    steps: int
    """Number of steps that have been read."""
    samples: int
    """Number of samples that all ranks together have read in these steps. It is not computed from the number of steps,
    because the global batch may have changed."""
    broken: int
    """Number of broken samples that this rank has skipped since the run was started or resumed. Rank 0's number also
    includes what all ranks skipped before the run was resumed."""
    dropped: int
    """Number of samples that were dropped or lost (see errors.DroppedSample and errors.LostSample), counted like
    `broken`."""
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
        order = mix(settings, sources, num_slots, seed)
        # Global position p belongs to slot p % S and to rank p % N. N divides S, so these slots belong to this rank.
        slots = range(share.rank, num_slots, share.size)
        streams = order.streams(slots)
        self.position = Position(0, 0, 0, 0, dict.fromkeys(streams, (0, 0)))
        if state is not None:
            for key, expected in self._origin.items():
                if state[key] != expected:
                    raise ValueError(
                        f"the data order of the checkpoint has {key} {state[key]}, this run has {expected}; restore "
                        "the setting or the shards, or start a new run"
                    )
            cursor = {stream: tuple(state["cursor"][stream]) for stream in streams}
            # Rank 0 continues from the total counts. The other ranks start at 0, so that the sums over ranks are right.
            broken, dropped = (state["broken"], state["dropped"]) if share.rank == 0 else (0, 0)
            self.position = Position(state["steps"], state["samples"], broken, dropped, cursor)
        self._before = self.position
        """The position at the start of the current step."""
        self._error: str | None = None
        self._share = share
        # A single micro-batch is not read twice, so it need not be kept.
        self._kept_on = staging.kept_on if share.num_micro_batches > 1 else "device"
        self._first: Iterator[MicroBatch] = iter(())
        """Iterator over the micro-batches of the current step's first pass."""
        self._kept: list[MicroBatch] = []
        """The micro-batches of the current step, in the memory that `staging.kept_on` names."""
        self._damaged: set[str] = set()
        """Descriptions of the damaged shards so far."""
        self._resources = ExitStack()

        # By default, one core is reserved for the trainer.
        num_workers = max(staging.cores - 1, 1) if settings.workers is None else settings.workers
        num_workers = min(num_workers, len(slots))
        sample = declare_arrays(settings, inputs)
        most = int(staging.most_bytes // (share.micro_batch * sample.itemsize))
        num = count_buffers(
            settings.prefetch, share.num_micro_batches, self._kept_on, num_workers, most
        )
        # The buffers are allocated first, because the workers inherit them.
        batches = SharedBatches(num, share.micro_batch, sample)
        self._resources.callback(batches.close)
        spec = WorkerSpec(
            sources=sources,
            order=order,
            settings=settings,
            inputs=inputs,
            seed=seed,
            share=share,
            slots=slots,
            cursor=self.position.cursor,
            # The number of positions p < samples with p % size == rank.
            first_sample=(self.position.samples + share.size - 1 - share.rank) // share.size,
            batches=batches,
            num_workers=num_workers,
        )
        workers = [Worker(replace(spec, worker=number)) for number in range(num_workers)]
        self.worker_pids = [worker.pid for worker in workers]
        producers: Sequence[Worker | InProcess] = workers or [InProcess(spec)]
        for producer in producers:
            self._resources.callback(producer.close)
        device = torch.device(staging.device)
        on_device = count_on_device(share.num_micro_batches, self._kept_on)
        self._feed = Feed(batches, producers, device, on_device, count_tokens)
        self._resources.callback(self._feed.close)

    def start_step(self, keep_text: bool = False) -> StepData:
        """Begin the next step. The micro-batches that the previous step has left unread are read and discarded.

        Args:
            keep_text: Whether first_pass also fills StepData.text.

        Returns:
            The record of this step's data, which first_pass fills.
        """
        for _ in self._first:
            pass
        if self._kept_on == "host":
            for _ in self._kept:
                self._feed.release()
        self._before = self.position
        data = StepData(error=self._error, text=[] if keep_text else None)
        self._first, self._kept = self._read_first(data), []
        return data

    def first_pass(self) -> Iterator[MicroBatch]:
        """Read this step's micro-batches. Each one is read when it is requested.

        A micro-batch is valid until the next one is requested or, if images are kept on the device, until the next step
        starts.

        This raises no error. After an error, the rest of this step and all later steps consist of placeholders, and
        StepData.error is set.
        """
        return self._first

    def second_pass(self) -> Iterator[MicroBatch]:
        """Yield this step's micro-batches once more, in the same order, except the last one.

        A micro-batch is valid until the next one is requested.
        """
        repeated = self._kept[:-1]
        yield from repeated if self._kept_on == "device" else self._feed.repeat(repeated)

    def drop_step(self) -> None:
        """Reset the position to the start of this step, and read no more data.

        Call this if any rank could not read its part of the step.
        """
        self._error = self._error or "another rank could not read its data"
        self.position = self._before

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position after the last step without an error, as input for merge_states."""
        return self._origin | asdict(self.position)

    def close(self) -> None:
        """Stop the workers and close all files."""
        self._error = self._error or "the loader is closed"
        self._resources.close()

    def _read_first(self, data: StepData) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the first pass and, after an error, placeholders. Record them in `data`."""
        for left in reversed(range(self._share.num_micro_batches)):
            batch = None
            if self._error is None:
                try:
                    start = time.perf_counter()
                    try:
                        delivery = self._feed.take()
                    finally:
                        data.wait_s += time.perf_counter() - start
                    batch = self._accept(delivery, data, is_last=left == 0)
                except Exception as error:
                    step = self.position.steps + 1
                    self._error = (
                        f"data of rank {self._share.rank}, step {step}: {describe_error(error)}"
                    )
            data.error = self._error
            yield batch or self._feed.make_zeros()

    def _accept(self, delivery: Delivery, data: StepData, is_last: bool) -> MicroBatch:
        """Record a micro-batch of the first pass in `data`, and return it."""
        batch = delivery.batch
        data.index.append(delivery.host["index"].clone())
        if data.text is not None:
            data.text.append(delivery.host["text"].clone())
        if "lengths" in batch:
            data.num_tokens += int(batch["lengths"].sum())
        for report in delivery.reports:
            data.cursor.update(report.cursor)
            data.broken += report.broken
            data.dropped += report.dropped
            for damaged in report.damaged:
                # Several workers may read the same shard.
                if damaged not in self._damaged:
                    self._damaged.add(damaged)
                    data.damaged.append(damaged)
                    logger.warning("%s", damaged)
        if is_last:
            position = self.position
            self.position = Position(
                position.steps + 1,
                position.samples + self._share.global_batch,
                position.broken + len(data.broken),
                position.dropped + data.dropped,
                position.cursor | data.cursor,
            )
        if self._kept_on == "device":
            self._kept.append(batch)
            self._feed.release()
        else:
            self._kept.append(delivery.host)
        if self._kept_on == "device" or not is_last:
            # After the last micro-batch, the second pass needs the buffers on the device.
            self._feed.look_ahead()
        return batch


class Delivery(NamedTuple):
    """A micro-batch that is being copied to the device."""

    host: MicroBatch
    """The buffer on the host."""
    batch: MicroBatch
    """The copy on the device."""
    reports: Sequence[Report]
    """Each producer's report on the rows that it wrote into the buffer."""


class Feed:
    """Delivers micro-batches to the device in the order of the data.

    The buffers on the host are used in rotation. Each goes through this cycle. It is granted to all producers, which
    means that each producer may fill its rows of the buffer. Once all producers have reported, the buffer is received,
    and copied to the device. The loader releases it, and it is granted again once the copy is complete.

    Copies run on a separate CUDA stream, into device buffers that are also used in rotation. The streams wait for each
    other on the device, so the host waits only for samples that are not decoded yet. No thread is needed: every request
    for a micro-batch also starts the next copy, and with GradAccum the requests are spread over the whole step.

    Args:
        batches: Buffers on the host.
        producers: The worker processes or, without workers, the trainer's own process. Each fills some rows of every
            buffer.
        device: Device to which micro-batches are copied.
        on_device: Number of micro-batches that the device holds at a time, including the one being copied.
        count_tokens: As for Loader.
    """

    def __init__(
        self,
        batches: SharedBatches,
        producers: Sequence[Worker | InProcess],
        device: torch.device,
        on_device: int,
        count_tokens: Callable[[Tensor], np.ndarray] | None,
    ) -> None:
        self._producers, self._count_tokens = producers, count_tokens
        self._host = deque(batches.buffers)
        """Buffers on the host. The first one is received next."""
        # On a CPU, streams do nothing.
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._device = device
        self._on_device = deque(self.make_zeros() for _ in range(on_device))
        """Buffers on the device. The first one is overwritten next."""
        if device.type == "cuda":
            batches.pin()
        self._next: Delivery | Exception | None = None
        """The micro-batch or exception that look_ahead has received. The next call of `take` returns or raises it."""
        self._copied: Any = None
        """The event that marks the end of the latest copy."""
        self._released: deque[Any] = deque()
        """An event for each released buffer that has not been granted again. After it, the buffer is not read."""
        for _ in self._host:
            self._grant()

    def take(self) -> Delivery:
        """Wait until all producers have filled the next buffer, and deliver it to the device.

        The current stream waits for the copy; the host does not. The buffer on the host does not change until `release`
        is called.

        Raises:
            Exception: Any exception that the `receive` of a producer raises.
        """
        # An error that occurred in look_ahead is raised here, where the trainer expects it.
        received, self._next = self._next or self._receive(), None
        if isinstance(received, Exception):
            raise received
        self._streams.current_stream().wait_stream(self._stream)
        return received

    def make_zeros(self) -> MicroBatch:
        """Return a micro-batch on the device whose arrays are filled with zeros."""
        arrays = self._host[0].items()
        return {name: torch.zeros_like(array, device=self._device) for name, array in arrays}

    def look_ahead(self) -> None:
        """Grant released buffers whose copies are done, and start to copy the next decoded micro-batch. Never waits."""
        self._grant_copied()
        if self._next is None and self._is_ready():
            self._next = self._receive()

    def repeat(self, buffers: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Copy buffers on the host to the device once more. While one is in use, the next one is copied."""
        copies = map(self._start_copy, buffers)
        following = next(copies, None)
        while following is not None:
            self._streams.current_stream().wait_stream(self._stream)
            batch, following = following, next(copies, None)
            if following is None:
                self.look_ahead()
            yield batch

    def release(self) -> None:
        """Allow the oldest buffer that is not released to be filled again, once it has been copied."""
        self._released.append(self._copied)
        self._grant_copied()

    def close(self) -> None:
        """Wait until all copies are complete, so that the host buffers can be freed."""
        # A RuntimeError means that the device has failed, so there is nothing to wait for.
        with suppress(RuntimeError):
            self._streams.synchronize()

    def _start_copy(self, host: MicroBatch) -> MicroBatch:
        """Start copying a buffer to the device, where it overwrites the oldest micro-batch there."""
        batch = self._on_device[0]
        self._on_device.rotate(-1)
        # The current stream may still be reading the micro-batch that is overwritten.
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            for name, array in host.items():
                batch[name].copy_(array, non_blocking=True)
            self._copied = self._streams.Event()
            self._copied.record()
        if self._count_tokens is not None:
            batch["lengths"] = self._count_tokens(host["text"])
        return batch

    def _is_ready(self) -> bool:
        return all(producer.is_ready() for producer in self._producers)

    def _receive(self) -> Delivery | Exception:
        """Wait for the next buffer, and start to copy it. Return an exception that is raised meanwhile."""
        try:
            if not self._is_ready():
                # The producers may be waiting for a free buffer.
                self._grant_copied(wait=True)
            reports = [producer.receive() for producer in self._producers]
            host = self._host[0]
            self._host.rotate(-1)
            return Delivery(host, self._start_copy(host), reports)
        except Exception as error:
            return error

    def _grant_copied(self, wait: bool = False) -> None:
        """Grant the released buffers whose copies are complete. A buffer is still read while its copy is running.

        Args:
            wait: Wait for the copies of all released buffers.
        """
        while self._released and (wait or self._released[0].query()):
            self._released.popleft().synchronize()
            self._grant()

    def _grant(self) -> None:
        for producer in self._producers:
            producer.grant()


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the state_dicts of all ranks' loaders into one state, from which any number of ranks can resume.

    Raises:
        ValueError: If the state_dicts are not from the same step of the same run, or if a rank's state_dict is missing.
    """
    first = states[0]
    differing = [
        key
        for key in first
        if key not in ("cursor", "broken", "dropped")
        and any(state[key] != first[key] for state in states)
    ]
    if differing:
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
    sums = {key: sum(state[key] for state in states) for key in ("broken", "dropped")}
    return first | sums | {"cursor": dict(sorted(cursor.items()))}
