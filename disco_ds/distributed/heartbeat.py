"""Heartbeats of all ranks through a store, so that a lost or hanging rank is named and the others end.

A collective that waits for a lost rank names nobody. So each rank has two threads beside the training. One writes this
rank's heartbeat, with the place it has reached (marks.py), into the launcher's rendezvous store, and reads those of the
WATCHED ranks after it, and the verdict: why the run ends, once a rank has found that. The others' are read only when
this rank has waited for long. The other thread only watches the clock: the store blocks forever when the host that
keeps it is stopped.

The store answers whoever reaches its port, so what no rank can have written is ignored, and reported once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from deepspeed.accelerator import get_accelerator

from disco_ds.distributed import comm, diagnostics
from disco_ds.distributed.marks import Event, Marks, Place

INTERVAL_S = 2.0
"""Time between two heartbeats; less where lost_after_s is short."""
HURRY_S = 10.0
"""After a collective has failed or a signal was received, a rank is lost once it is silent for so long: the launcher
sends SIGTERM a second after it has lost a rank, and kills the others half a minute later."""
WATCHED = 3
"""Ranks that a rank watches. Of any lost ranks the first has a watcher, so one would do; with three the store is asked
for as many values a second as there are ranks, times two, and a watcher may itself be slow."""
KEY = "disco_ds/distributed/heartbeat"
MAX_TEXT = 100_000
"""Characters that a verdict may have."""


class Beat(NamedTuple):
    """What a rank writes into the store."""

    serial: int
    host: Place
    device: Place
    runs: bool
    """Whether the rank is still running."""


def parse_beat(text: bytes) -> Beat | None:
    """The heartbeat that was written as json.dumps(beat); None for anything else."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        serial, *places, runs = json.loads(text)
        host, device = (Place(*place) for place in places)
        types = [type(value) for value in (serial, *host[:2], *device[:2], runs)]
        texts = (host.doing, device.doing)
        if types == [*5 * [int], bool] and all(len(text) < 100 and text.isprintable() for text in texts):
            return Beat(serial, host, device, runs)
    return None


def parse_verdict(text: bytes) -> str | None:
    """The verdict that was written as json.dumps([verdict]), empty before there is one; None for anything else."""
    with suppress(ValueError, TypeError, RecursionError):
        match json.loads(text):
            case [str(verdict)] if len(verdict) <= MAX_TEXT:
                return verdict
    return None


class Heartbeat:
    """Watches the other ranks while it is entered, and ends this process when a rank is lost or none makes progress.

    A rank that fails writes its error into its last heartbeat, so that the others need not wait for its silence. There
    are three limits:

    - lost_after_s, always: a rank whose heartbeat stays the same for so long is lost.
    - 0.9 timeout_s, always: if neither this rank nor its device has passed a mark for so long, the ranks that are
      behind, by their host or their device, are named. This rank waits for them in a collective, which the backend
      would end after timeout_s without a name.
    - timeout_s, after marks that are `timed`: if no rank is behind, all end and name the place of every rank. Building,
      the first step (which compiles), evaluation and saving are not timed, because a rank may rightly work for hours
      there. A collective in which a rank waits meanwhile still ends by the backend's timeout.

    Args: make_event: makes an event of the accelerator, see marks.py; None: the accelerator's own, if there is one.
    """

    def __init__(self, lost_after_s: float, timeout_s: float, make_event: Callable[[], Event] | None = None):
        self.lost_after_s, self.timeout_s = lost_after_s, timeout_s
        self.interval_s = min(INTERVAL_S, lost_after_s / 10)
        self.folder: Path | None = None
        """Folder of the diagnostics that a rank writes before it is ended."""
        if make_event is None and comm.local_device().type != "cpu":
            make_event = get_accelerator().Event
        self._make_event = make_event
        self._marks, self._timed = Marks(), False
        self._answered = time.monotonic()
        self._count = 0
        self._verdict: str | None = None
        """Why this rank ends, for the others to read: empty without an error; None while it runs."""
        self._error: BaseException | None = None
        self._hurry = self._stop = False
        self._wake, self._written = threading.Event(), threading.Event()

    def mark(self, step: int, doing: str, timed: bool = False) -> None:
        """Mark the place that the training has reached: steps done, and what comes next. All ranks pass the same marks.

        Args: timed: timeout_s is a limit from here to the next mark.
        """
        self._timed = False  # first, because the clock still counts from the mark before
        self._marks.set(step, doing)
        self._timed = timed

    @property
    def place(self) -> Place:
        """The last mark."""
        return self._marks.host

    def __enter__(self) -> Heartbeat:
        """Start both threads. Collective."""
        self._watches = comm.size() > 1
        if not self._watches:
            return self
        self._marks = Marks(self._make_event)
        self._hosts = comm.gather_objects(socket.gethostname())
        self._store = comm.open_store(self.lost_after_s)
        self._me, size = comm.rank(), comm.size()
        self._watched = [(self._me + i) % size for i in range(1, min(WATCHED + 1, size))]
        self._texts: dict[int, bytes] = {}
        self._beats: dict[int, Beat] = {}
        """Of the watched ranks, and of all while this rank waits for one that is behind."""
        self._reported = False
        if self._me == 0:
            self._store.set(f"{KEY}/verdict", json.dumps([""]))
        self._write()
        comm.barrier()  # reading a beat that was never written would block
        self._fresh_window()
        self._read(self._watched)
        # A Python signal handler runs in the main thread, which may be blocked in a collective. The wakeup descriptor
        # is written at once, and the clock's thread reads it.
        self._signals, self._signalled = socket.socketpair()
        self._signalled.setblocking(False)
        self._wakes = threading.current_thread() is threading.main_thread()  # an evaluation may run in another
        if self._wakes:
            self._wakeup_before = signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._look_at_clock)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Stop; after a communication error give time to name the rank that caused it, which ends this process."""
        if not self._watches:
            return
        if error is not None and comm.is_communication_error(error):
            self._error, self._hurry = error, True
            time.sleep(self._patience_s + 3 * self.interval_s)  # for _beat to name the rank and end this one
        place = f"rank {self._me} on {socket.gethostname()} (last {self._marks.host})"
        self._verdict = "" if error is None else f"{place} failed: {type(error).__name__}: {error}"
        self._wake.set()
        self._written.wait(self.lost_after_s)
        if error is not None and self._me == 0:
            time.sleep(2 * self.interval_s)  # the others read it, in a store that may live in this process
        self._stop = True
        self._wake.set()
        self._signalled.send(b"!")
        for thread in self._threads:
            thread.join(2 * self.interval_s)
        if self._make_event:
            diagnostics.cancel_end()
        if self._wakes:
            signal.set_wakeup_fd(self._wakeup_before)
        self._signals.close()
        self._signalled.close()

    @property
    def _patience_s(self) -> float:
        """How long a heartbeat may stay the same. A change is noticed up to three intervals after it was due."""
        usual = self.lost_after_s - 3 * self.interval_s
        return min(usual, HURRY_S) if self._hurry else usual

    def _beat(self) -> None:
        """The thread that uses the store."""
        last = time.monotonic()
        while not self._stop:
            self._wake.wait(self.interval_s)
            self._wake.clear()
            leaves = self._verdict is not None  # read first: the heartbeat that is written next then says so too
            self._marks.look()
            try:
                if leaves:
                    self._publish(self._verdict or "")
                self._write()
                verdict = self._read(self._watched)
                now = time.monotonic()
                if now - last > 3 * self.interval_s:  # this process or the store was stopped: all heartbeats look old
                    self._fresh_window()
                last = self._answered = now
                reason = None if leaves else verdict or self._find_lost(now)
            except RuntimeError:
                time.sleep(self.interval_s)  # the clock's thread decides when the store is lost
                continue
            if leaves:
                self._written.set()
            elif reason:
                self._end(reason)

    def _read(self, ranks: Sequence[int]) -> str:
        """Read the heartbeats of these ranks, and note which have changed. Returns: the verdict; empty while all run.

        Raises: RuntimeError where the store does not answer.
        """
        *texts, text = self._store.multi_get([*(f"{KEY}/{rank}" for rank in ranks), f"{KEY}/verdict"])
        now = time.monotonic()
        for rank, beat_text in zip(ranks, texts, strict=True):
            if beat_text == self._texts.get(rank):
                continue
            self._texts[rank] = beat_text
            if (beat := parse_beat(beat_text)) is not None:
                self._beats[rank], self._since[rank] = beat, now
            elif rank == self._watched[0]:
                self._report_malformed(f"the heartbeat of rank {rank}")
        verdict = parse_verdict(text)
        if verdict is None and self._me == 0:
            self._report_malformed("the verdict")
        return verdict or ""

    def _report_malformed(self, what: str) -> None:
        """Say once what somebody else has written into the store; of the ranks that see it, one says so."""
        if not self._reported:
            self._reported = True
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            print(
                f"warning on {socket.gethostname()}: {what} in the rendezvous store at {place} was written by no rank, "
                "and is ignored: keep the network of the ranks private",
                file=sys.stderr,
                flush=True,
            )

    def _look_at_clock(self) -> None:
        """The thread that never waits for the store."""
        last = time.monotonic()
        while not self._stop:
            # Set anew in every turn, so that it fires only if a call into the driver blocks all of Python for so long.
            if self._make_event:
                diagnostics.end_process_after(self.timeout_s)
            if select.select([self._signals], [], [], self.interval_s / 2)[0]:
                self._signals.recv(64)
                self._hurry = True
            now = time.monotonic()
            if now - last > 3 * self.interval_s:  # this process was stopped for a while
                self._answered = now
            last = now
            if now - self._answered > self._patience_s:
                holder = self._name(0)
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    holder = f"torchrun's agent, {holder}"
                self._end(
                    f"no answer from the rendezvous store for {now - self._answered:.0f} s; it is held by {holder}",
                    publish=False,
                )

    def _find_lost(self, now: float) -> str | None:
        """Say which rank is lost, if one is. Raises: RuntimeError where the store does not answer."""
        others = [rank for rank in self._watched if rank not in self._beats or self._beats[rank].runs]
        silent = min(others, key=lambda rank: self._since[rank], default=self._me)
        if others and now - self._since[silent] > self._patience_s:
            return f"{self._name(silent)} has sent no heartbeat for {now - self._since[silent]:.0f} s"
        # A mark sets the time before the place, so reading the place first never pairs a new place with an old time.
        host, device = self._marks.host, self._marks.device
        waited_s = self._marks.still_s(now)
        if waited_s > 0.9 * self.timeout_s:
            self._read(range(comm.size()))
        if waited_s > 0.9 * self.timeout_s and (reason := self._find_behind(host, device, waited_s)):
            return reason
        if self._timed and self._marks.still_s(now) > self.timeout_s:
            return f"no rank has made progress for {waited_s:.0f} s: {self._describe_places()}"
        return None

    def _find_behind(self, mine: Place, my_device: Place, waited_s: float) -> str | None:
        """Say which ranks are behind this one, if any: by their hosts, else by their devices."""
        places = {rank: beat[1:3] for rank, beat in sorted(self._beats.items()) if beat.runs and rank != self._me}
        behind = [self._name(rank) for rank, (host, _) in places.items() if host.number < mine.number]
        if behind:
            return f"the others have waited {waited_s:.0f} s for {'; '.join(behind)}"
        behind = [
            f"the GPU of rank {rank} on {self._hosts[rank]} has not passed {device}"
            for rank, (_, device) in places.items()
            if device.number < my_device.number
        ]
        return f"{'; '.join(behind)}, for {waited_s:.0f} s" if behind else None

    def _describe_places(self) -> str:
        """The place of every rank; ranks at the same place are named together."""
        ranks: dict[str, list[int]] = {}
        for rank, (_, host, device, _) in sorted(self._beats.items()):
            text = f"at {host}" if device == host else f"at {host} (its GPU at {device})"
            ranks.setdefault(text, []).append(rank)
        return "; ".join(f"{join_ranks(numbers)} {text}" for text, numbers in ranks.items())

    def _end(self, reason: str, publish: bool = True) -> None:
        """End this process. Args: publish: write the reason into the store, for the other ranks."""
        if publish:
            with suppress(RuntimeError):
                self._publish(reason)
        if self._error is not None:
            traceback.print_exception(self._error)
        print(f"error on {socket.gethostname()}: rank {self._me} stops: {reason}", file=sys.stderr, flush=True)
        diagnostics.leave(self.folder, self._me)
        if publish and self._me == 0:
            time.sleep(2 * self.interval_s)  # the others read it, in a store that may live in this process
        os._exit(1)

    def _publish(self, reason: str) -> None:
        """Write why the run ends, unless another rank has. Raises: RuntimeError where the store does not answer."""
        if reason and not parse_verdict(self._store.get(f"{KEY}/verdict")):
            self._store.set(f"{KEY}/verdict", json.dumps([reason[:MAX_TEXT]]))

    def _write(self) -> None:
        self._count += 1
        beat = Beat(self._count, self._marks.host, self._marks.device, self._verdict is None)
        self._store.set(f"{KEY}/{self._me}", json.dumps(beat))

    def _name(self, rank: int) -> str:
        last = f" (last {self._beats[rank].host})" if rank in self._beats else ""
        return f"rank {rank} on {self._hosts[rank]}{last}"

    def _fresh_window(self) -> None:
        self._since = dict.fromkeys(range(comm.size()), time.monotonic())
        self._marks.forgive()


def join_ranks(ranks: Iterable[int]) -> str:
    """Name ranks briefly: "rank 3", "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return f"rank {names}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {names}"
