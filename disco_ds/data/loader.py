"""The micro-batches of one rank, step by step, and where they stand.

The trainer's view of the data: it asks for a step, gets the rank's micro-batches and never an exception, because an
exception on one rank would leave the others in a collective. It knows (rank, size) as integers and communicates with
nobody.
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

from disco_ds.data.decode import ImageSpec
from disco_ds.data.manifest import Manifest
from disco_ds.data.order import choose_slots, divide
from disco_ds.data.source import Tokenize, fingerprint, mix, open_sources
from disco_ds.data.step_data import DecodedTwice, MicroBatch, StepData
from disco_ds.data.table import Table
from disco_ds.data.tar import DataError
from disco_ds.data.worker import Job, Part, Worker, produce_parts
from disco_ds.data_settings import DataSettings


class Loader:
    """A rank's micro-batches in the data order; see order.py for which samples they hold.

    Args:    sources: what load_sources found; tokenize: captions -> [n, L] int64, sent to the workers by pickle; state:
             None, or merge_states of every rank's state_dict, at any number of ranks; decode_twice: hold a step's
             images compressed, in the workers, and decode them at each of GradAccum's passes.
    Raises:  ValueError when ranks, batch, slots or state do not fit, or the data differ from the state's.
    """

    def __init__(
        self,
        settings: DataSettings,
        sources: Sequence[Manifest | Table],
        image: ImageSpec,
        tokenize: Tokenize,
        context_length: int,
        vocab_size: int,
        rank: int,
        size: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        state: dict[str, Any] | None = None,
        decode_twice: bool = False,
    ) -> None:
        if global_batch % (size * micro_batch):
            raise ValueError(
                f"global_batch {global_batch} is not a multiple of ranks x micro_batch ({size} x {micro_batch})"
            )
        sizes = [data.sizes for data in sources] or [divide(settings.num_samples)]
        self.num_samples = sum(map(sum, sizes))
        self.num_slots = choose_slots(sum(map(len, sizes)), self.num_samples, settings.slots, size)
        slots = tuple(range(rank, self.num_slots, size))
        num_workers = min(settings.workers, len(slots))
        order = mix(settings, sources, self.num_slots, seed)
        self._origin: dict[str, Any] = {
            "slots": self.num_slots,
            "sources": len(sizes),
            "fingerprint": fingerprint(settings, sources) if sources else f"synthetic-{settings.num_samples}",
            "global_batch": global_batch,
        }
        state = self._check(state)
        self._rank = rank
        self._num_parts = global_batch // size // micro_batch
        self._steps: int = state["steps"]
        streams = [stream for slot in slots for stream in order.streams(slot)]
        self._cursor: dict[int, tuple[int, int]] = {stream: tuple(state["cursor"][stream]) for stream in streams}
        # The count so far goes on at one rank, so that the sum over ranks does.
        self.broken: int = state["broken"] if rank == 0 else 0
        self.worker_pids: list[int] = []
        self._error: str | None = None
        self._decode_twice = decode_twice
        self._skip_rest: Callable[[], None] = lambda: None
        self._shape = (micro_batch, 3, *image.size)
        self._context_length = context_length
        self._resources = ExitStack()
        per_worker = -(-len(slots) // max(1, num_workers))
        job = Job(
            source=open_sources(settings, sources, image, tokenize, context_length, vocab_size, seed, per_worker),
            order=order,
            max_broken=settings.max_broken,
            slots=slots,
            cursor=self._cursor,
            first=self._steps * global_batch // size,
            micro_batch=micro_batch,
            num_micro_batches=self._num_parts,
            decode_twice=decode_twice,
            image_size=image.size,
            context_length=context_length,
        )
        self._receive = self._start(job, settings, num_workers, tokenize.__module__)

    def read_step(self) -> StepData:
        """The next step's micro-batches; after an error placeholders and its text, at every call. Never raises."""
        if self._error is None:
            try:
                self._skip_rest()
            except DataError as error:
                self._error = str(error)
        data = StepData()
        if self._decode_twice:
            data.micro_batches = DecodedTwice(self._num_parts, partial(self._read, data), partial(self._again, data))
            self._skip_rest = data.micro_batches.skip
        else:
            data.micro_batches = [self._read(data) for _ in range(self._num_parts)]
        return data

    def _read(self, data: StepData) -> MicroBatch:
        """A step's next micro-batch; after an error a placeholder."""
        start, batch = time.perf_counter(), self._placeholder
        if self._error is None:
            try:
                # Joined at once: the parts of a whole step would be its images once more.
                parts = [receive() for receive in self._receive]
                batch = self._join(parts)
            except Exception as error:
                self._error = self._describe(error, self._steps + 1)
            else:
                data.index.append(batch.index)
                for part in parts:
                    data.cursor.update(part.cursor)
                    data.broken += part.broken
                if len(data.index) == self._num_parts:
                    self._steps += 1
                    self._cursor.update(data.cursor)
                    self.broken += len(data.broken)
        data.error = self._error
        data.wait_s += time.perf_counter() - start
        return batch

    def _again(self, data: StepData) -> MicroBatch:
        """A micro-batch decoded once more. Raises: DataError, since the step must not go on without it."""
        start = time.perf_counter()
        try:
            batch = self._join([receive() for receive in self._receive])
        except Exception as error:
            raise DataError(self._describe(error, self._steps)) from None
        data.wait_s += time.perf_counter() - start
        return batch

    def _describe(self, error: Exception, step: int) -> str:
        """Within the `except` that has caught it."""
        known = isinstance(error, (DataError, OSError))
        text = str(error) if known else traceback.format_exc()
        return f"data of rank {self._rank}, step {step}: {text}"

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands after the last step read without an error; merge_states joins those of all ranks."""
        return {**self._origin, "steps": self._steps, "broken": self.broken, "cursor": dict(self._cursor)}

    def close(self) -> None:
        """End the workers, close the files."""
        self._error = self._error or "the loader is closed"
        self._resources.close()

    def _check(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """The state to begin from, once it is known to be of this order."""
        num_streams = self.num_slots * self._origin["sources"]
        if state is None:
            return {**self._origin, "steps": 0, "broken": 0, "cursor": dict.fromkeys(range(num_streams), (0, 0))}
        state = {"sources": 1, **state}  # checkpoints of before there could be several
        for key, expected in self._origin.items():
            if state[key] != expected:
                raise ValueError(
                    f"the checkpoint's data have {key} {state[key]}, this run has {expected}; the order of the samples "
                    "would be another one: restore the setting or the shards, or start a new run"
                )
        if len(state["cursor"]) != num_streams:
            raise ValueError(
                f"the data state has {len(state['cursor'])} of {num_streams} slots: merge_states of every rank first"
            )
        return state

    def _start(self, job: Job, settings: DataSettings, num_workers: int, preload: str) -> list[Callable[[], Part]]:
        """What gives the next part of each worker."""
        if num_workers == 0:
            self._resources.callback(job.source.close)
            return [produce_parts(job).__next__]
        receive = []
        for number in range(num_workers):
            worker = Worker(
                replace(job, worker=number, num_workers=num_workers), settings.prefetch, settings.timeout_s, preload
            )
            self._resources.callback(worker.close)
            self.worker_pids.append(worker.pid)
            receive.append(worker.receive)
        return receive

    def _join(self, parts: Sequence[Part]) -> MicroBatch:
        """The micro-batch of which each worker made a part."""
        if len(parts) == 1:
            image, text, ids = parts[0].image, parts[0].text, parts[0].ids
        else:
            num = self._shape[0]
            image = torch.empty(self._shape, dtype=torch.uint8)
            text, ids = (torch.empty(num, width, dtype=torch.int64) for width in (self._context_length, 3))
            for part in parts:
                place = part.ids[:, 0]
                image[place], text[place], ids[place] = part.image, part.text, part.ids
        return MicroBatch(image, text, ids[:, 1].contiguous(), ids[:, 2].contiguous())

    @cached_property
    def _placeholder(self) -> MicroBatch:
        zeros = torch.zeros(self._shape[0], dtype=torch.int64)
        text = torch.zeros(self._shape[0], self._context_length, dtype=torch.int64)
        return MicroBatch(torch.zeros(self._shape, dtype=torch.uint8), text, zeros, zeros)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of the data from every rank's state_dict; a Loader at any number of ranks resumes from it.

    Raises:  ValueError when the states are not of one step of one run.
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
        raise ValueError(f"{missing} of {num_streams} slots are missing from the ranks' data states")
    merged = {key: first[key] for key in shared}
    return {**merged, "broken": sum(state["broken"] for state in states), "cursor": dict(sorted(cursor.items()))}
