"""The micro-batches of one rank, step by step, and the position in the data order.

This is the trainer's view of the data. Reading a step raises nothing, because an exception on one rank would leave the
others waiting in a collective: errors are returned with the step. (rank, size) are integers; nothing is communicated.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from disco_ds.config.data import DataSettings
from disco_ds.data.images.broken import DataError
from disco_ds.data.order.slots import Share
from disco_ds.data.pipeline.feed import Delivery, Feed, Producer, Upload
from disco_ds.data.pipeline.shared_batches import SharedBatches, batch_bytes
from disco_ds.data.pipeline.staging import Staging, count_buffers, count_on_device, count_workers
from disco_ds.data.pipeline.step_data import MicroBatch, MicroBatches, StepData
from disco_ds.data.pipeline.worker import Job
from disco_ds.data.pipeline.worker_process import InProcess, Worker
from disco_ds.data.remote.cache_size import fit_cache
from disco_ds.data.remote.prefetch import fetch_ahead
from disco_ds.data.sources.base import SampleForm, Source
from disco_ds.data.sources.load import (
    choose_windows,
    count_slots,
    fingerprint,
    label,
    mix,
    open_sources,
)


class Loader:
    """A rank's micro-batches in the data order; see order.py for which samples they hold.

    Args:    sources: as load_sources returns them; state: None, or merge_states of the state_dicts of all
             ranks, of which there may have been any number.
    Raises:  ValueError if ranks, slots or state do not fit, or the data differ from the state's.
    """

    def __init__(
        self,
        settings: DataSettings,
        sources: Sequence[Source],
        form: SampleForm,
        share: Share,
        seed: int,
        state: dict[str, Any] | None = None,
        staging: Staging | None = None,
    ) -> None:
        staging = staging or Staging()
        self.num_samples = sum(source.num_samples for source in sources)
        self.num_slots = count_slots(
            settings, sources, share.size, state["slots"] if state else None
        )
        sources = fit_cache(
            settings, sources, self.num_slots, share.size, staging.ranks_here or share.size
        )
        # Global position p belongs to slot p % S and to rank p % N; N divides S, so a rank owns these slots.
        slots = tuple(range(share.rank, self.num_slots, share.size))
        num_workers = min(count_workers(settings, staging.cores), len(slots))
        # What the order depends on; a state is accepted only if all of it is equal.
        parts = {
            "slots": self.num_slots,
            "sources": len(sources),
            "fingerprint": fingerprint(settings, sources),
        }
        parts["windows"] = windows = choose_windows(settings, sources, state)
        self._origin: dict[str, Any] = {**parts, "global_batch": share.global_batch}
        self._rank = share.rank
        self._num_parts = share.num_micro_batches
        state = self._check(state)
        order = mix(settings, sources, self.num_slots, seed, windows)
        self._go_to(state, [stream for slot in slots for stream in order.streams(slot)])
        self.worker_pids: list[int] = []
        self._error: str | None = None
        self._pixels, self._device = staging.pixels, torch.device(staging.device)
        self._before = self._steps, self.broken, self._cursor
        self._current: MicroBatches | None = None
        self._held: list[int] = []
        """The buffers of the current step."""
        self._uploads: dict[int, Upload] = {}  # started for the second pass, by micro-batch
        self._num_again = 0  # micro-batches that were decoded again
        self._resources = ExitStack()
        # The buffers are allocated before the workers, which inherit them.
        layout = share.micro_batch, form.image.size, form.context_length
        most = int(staging.most_bytes // batch_bytes(*layout))
        num = count_buffers(settings.prefetch, self._num_parts, staging.pixels, num_workers, most)
        self._batches = SharedBatches(num, *layout)
        self._resources.callback(self._batches.close)
        per_worker = -(-len(slots) // max(1, num_workers))
        job = Job(
            samples=open_sources(settings, sources, form, seed, per_worker),
            order=order,
            max_broken=settings.max_broken,
            patience_s=min(
                settings.patience_s, settings.timeout_s / 2
            ),  # a silent worker is taken to hang
            slots=slots,
            cursor=self._cursor,
            first=self._steps * share.global_batch // share.size,
            micro_batch=share.micro_batch,
            num_micro_batches=self._num_parts,
            decode_twice=staging.pixels == "compressed",
            batches=self._batches,
            # A trainer that reads its samples itself has no time left between them.
            ahead=fetch_ahead(sources, order, settings.remote.ahead) if num_workers else None,
        )
        producers = self._start(
            job, num_workers, settings.timeout_s, form.tokenize.__module__, partial(label, sources)
        )
        self._feed = Feed(
            self._batches, producers, self._device, count_on_device(self._num_parts, staging.pixels)
        )
        self._resources.callback(self._feed.close)

    def _go_to(self, state: dict[str, Any], streams: Sequence[int]) -> None:
        """Start from where a state left the run, in these streams."""
        self._steps: int = state["steps"]
        self._cursor: dict[int, tuple[int, int]] = {
            stream: tuple(state["cursor"][stream]) for stream in streams
        }
        # One rank continues the count of all ranks, so that the sum over ranks stays right.
        self.broken: int = state["broken"] if self._rank == 0 else 0

    def read_step(self) -> StepData:
        """The next step's micro-batches, read as they are requested and valid until the next call.

        Neither this nor reading them raises, except for one that is decoded again. After an error, this and all further
        steps consist of placeholders.
        """
        self._finish_step()
        self._before = self._steps, self.broken, dict(self._cursor)
        data = StepData(error=self._error)
        again = {
            "device": None,
            "host": self._upload_again,
            "compressed": partial(self._decode_again, data),
        }
        self._current = MicroBatches(
            self._num_parts, partial(self._read, data), again[self._pixels]
        )
        data.micro_batches = self._current
        return data

    def drop_step(self) -> None:
        """Take the position back to before this step, which a rank could not read; no further one can be read."""
        self._error = self._error or "the data of another rank have failed"
        self._steps, self.broken, self._cursor = self._before

    def _read(self, data: StepData) -> MicroBatch:
        """The next micro-batch of a step; after an error a placeholder."""
        if self._error is None:
            try:
                return self._accept(self._take(data), data)
            except Exception as error:
                self._error = self._describe(error, self._steps + 1)
        data.error = self._error
        return self._placeholder

    def _take(self, data: StepData) -> Delivery:
        """The next delivery; the time it takes is added to the step's. Raises: as the producers do."""
        start = time.perf_counter()
        try:
            return self._feed.take()
        finally:
            data.wait_s += time.perf_counter() - start

    def _accept(self, delivery: Delivery, data: StepData) -> MicroBatch:
        data.index.append(self._batches[delivery.number].index.clone())
        for part in delivery.parts:
            data.cursor.update(part.cursor)
            data.broken += part.broken
        # The position moves by whole steps: a state saved within a step would be between two global batches.
        if len(data.index) == self._num_parts:
            self._steps += 1
            self._cursor.update(data.cursor)
            self.broken += len(data.broken)
        self._held.append(delivery.number)
        # On the host, buffers are kept for the second pass, which begins by copying micro-batch 0 again.
        if self._pixels == "host":
            self._upload_ahead(0 if len(self._held) == self._num_parts else None)
        else:
            self._feed.release(delivery.number)
            self._feed.look_ahead()
        return self._feed.arrive(delivery.upload)

    def _upload_again(self, k: int) -> MicroBatch:
        """Micro-batch k once more, from its buffer on the host."""
        if self._error is not None:
            return self._placeholder
        upload = self._uploads.pop(k, None) or self._feed.upload(self._held[k])
        self._upload_ahead(k + 1)
        return self._feed.arrive(upload)

    def _upload_ahead(self, k: int | None) -> None:
        """Start copying micro-batch k again; or the next step's if k is None or the last one, which GradAccum keeps."""
        if k is not None and k < self._num_parts - 1:
            self._uploads = {k: self._feed.upload(self._held[k])}
        else:
            self._feed.look_ahead()

    def _decode_again(self, data: StepData, k: int) -> MicroBatch:
        """Micro-batch k, decoded once more. Raises: DataError, since the step must not go on without it."""
        if k != self._num_again:
            raise RuntimeError(f"micro-batch {k} is requested again, {self._num_again} is due")
        try:
            delivery = self._take(data)
        except Exception as error:
            raise DataError(self._describe(error, self._steps)) from None
        self._num_again += 1
        self._feed.release(delivery.number)
        self._feed.look_ahead()
        return self._feed.arrive(delivery.upload)

    def _finish_step(self) -> None:
        """Read what the last step has left unread, and release its buffers."""
        if self._current is not None:
            for k in range(self._current.num_read, self._num_parts):
                _ = self._current[k]
            self._current = None
        if self._pixels == "host":
            for number in self._held:
                self._feed.release(number)
        # The workers decode all but the last micro-batch twice, whether or not the second pass took place.
        if self._pixels == "compressed" and self._held and self._error is None:
            try:
                for k in range(self._num_again, self._num_parts - 1):
                    self._decode_again(StepData(), k)
            except DataError as error:
                self._error = str(error)
        self._held, self._uploads, self._num_again = [], {}, 0

    def _describe(self, error: Exception, step: int) -> str:
        """The message for an error, called inside the `except` block that has caught it."""
        known = isinstance(error, (DataError, OSError))
        text = str(error) if known else traceback.format_exc()
        return f"data of rank {self._rank}, step {step}: {text}"

    def state_dict(self) -> dict[str, Any]:
        """This rank's position after the last step read without an error; merge_states joins those of all ranks."""
        return {
            **self._origin,
            "steps": self._steps,
            "broken": self.broken,
            "cursor": dict(self._cursor),
        }

    def close(self) -> None:
        """End the workers and close all files."""
        self._error = self._error or "the loader is closed"
        self._resources.close()

    def _check(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """The state to begin from. Raises: ValueError if it belongs to another order."""
        num_streams = self.num_slots * self._origin["sources"]
        if state is None:
            return {
                **self._origin,
                "steps": 0,
                "broken": 0,
                "cursor": dict.fromkeys(range(num_streams), (0, 0)),
            }
        # Older checkpoints have one source and do not say so.
        state = {"sources": 1, "windows": self._origin["windows"], **state}
        for key, expected in self._origin.items():
            if state[key] != expected:
                raise ValueError(
                    f"the checkpoint's data have {key} {state[key]}, this run has {expected}; the samples would "
                    "come in another order: restore the setting or the shards, or start a new run"
                )
        if len(state["cursor"]) != num_streams:
            raise ValueError(
                f"the data state has {len(state['cursor'])} of {num_streams} slots: merge_states of every rank first"
            )
        return state

    def _start(
        self,
        job: Job,
        num_workers: int,
        timeout_s: float,
        preload: str,
        label: Callable[[int, int], str],
    ) -> list[Producer]:
        """Start the workers; with none, samples are decoded in this process."""
        producers: list[Producer] = []
        for number in range(num_workers):
            worker = Worker(
                replace(job, worker=number, num_workers=num_workers), timeout_s, preload, label
            )
            self._resources.callback(worker.close)
            self.worker_pids.append(worker.pid)
            producers.append(worker)
        if not producers:
            self._resources.callback(job.samples.close)
            producers.append(InProcess(job))
        return producers

    @cached_property
    def _placeholder(self) -> MicroBatch:
        return self._batches[0].map(
            lambda value: torch.zeros(value.shape, dtype=value.dtype, device=self._device)
        )


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the state_dict of every rank's Loader into one state, from which any number of ranks can resume.

    Raises:  ValueError if the states are not of the same step of the same run.
    """
    first = states[0]
    shared = [key for key in first if key not in ("cursor", "broken")]
    if differing := [key for key in shared if any(state[key] != first[key] for state in states)]:
        raise ValueError(
            f"the ranks' data states differ in {', '.join(differing)}: they are not of one step of one run"
        )
    cursor = {stream: place for state in states for stream, place in state["cursor"].items()}
    num_streams = first["slots"] * first.get("sources", 1)
    if missing := num_streams - len(cursor):
        raise ValueError(
            f"{missing} of {num_streams} slots are missing from the ranks' data states"
        )
    merged = {key: first[key] for key in shared}
    return {
        **merged,
        "broken": sum(state["broken"] for state in states),
        "cursor": dict(sorted(cursor.items())),
    }
