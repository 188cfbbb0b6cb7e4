"""Detect lost and hung ranks through heartbeats in the rendezvous store, name them, and stop the run.

A collective that waits for a dead rank times out without saying which rank is missing, so each rank
runs two background threads. The first publishes this rank's heartbeat with its progress
(progress.py) and reads the heartbeats of the next WATCHED ranks and the verdict, which is the
reason for the shutdown once any rank has found one. It reads all other heartbeats only after this
rank has been waiting for a long time. The second thread never touches the store, because TCPStore
blocks forever if its host is frozen; it only watches the clock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

# It uses poll(); select.select() fails if the process has more than 1,024 open files.
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from disco_ds.distributed import comm, diagnostics
from disco_ds.distributed.progress import Place, Progress

INTERVAL_S = 2.0
"""Time between two heartbeats; less if lost_after_s is short."""
HURRY_S = 10.0
"""Silence after which a rank counts as lost once a collective has failed or a signal has arrived.

The launcher sends SIGTERM one second after it has lost a rank, and SIGKILL half a minute later.
Once all ranks have agreed to stop because of a signal, the signal was not about a lost rank.
"""
WATCHED = 3
"""Number of ranks that each rank watches.

One would do, because at least one lost rank always has a surviving watcher. With three, a single
slow watcher does no harm, and the store still serves only a few values per rank and interval.
"""
KEY = "disco_ds/heartbeat"
VERDICT = f"{KEY}/verdict"


class Beat(NamedTuple):
    """A heartbeat, as a rank writes it into the store."""

    serial: int
    host: Place
    device: Place
    running: bool
    """False in the last heartbeat of a rank."""


def parse_beat(text: bytes) -> Beat:
    """Return the heartbeat that was written as json.dumps(beat)."""
    serial, host, device, running = json.loads(text)
    return Beat(serial, Place(*host), Place(*device), running)


class Heartbeat:
    """Context manager that watches the other ranks and ends this process if a rank is lost or hangs.

    A rank that fails publishes its error before it leaves, so the others stop at once. There are
    three time limits:

    - lost_after_s, always: a rank whose heartbeat has not changed for this long is lost.
    - 0.9 timeout_s, always: if neither this rank nor its device has passed a mark for this long,
      the run ends and names the ranks whose host or device is behind. This rank is waiting for
      them in a collective, which the backend would end after timeout_s without naming anyone.
    - timeout_s, after marks that are `timed`: if no rank is behind, the run ends and reports the
      place of every rank. Building, the first step (which compiles), evaluation and saving are not
      timed, because they may take hours. If one rank waits in a collective meanwhile, the
      backend's timeout still applies to it.

    Args:
        lost_after_s: See above.
        timeout_s: See above.
        make_event: Creates a device event. The default is the accelerator's event type.
    """

    def __init__(
        self, lost_after_s: float, timeout_s: float, make_event: Callable[[], Any] | None = None
    ):
        self.lost_after_s = lost_after_s
        self.timeout_s = timeout_s
        self.folder: Path | None = None
        """Folder of the diagnostics that a rank writes before it is ended."""
        self._interval_s = min(INTERVAL_S, lost_after_s / 10)
        # A longer pause between two turns of a thread shows that the process was frozen meanwhile.
        self._frozen_s = 3 * self._interval_s
        if make_event is None and comm.local_device().type != "cpu":
            make_event = get_accelerator().Event
        self._make_event = make_event
        self._progress = Progress()
        self._timed = False
        self._last_answer = time.monotonic()
        self._serial = 0
        self._exit_reason: str | None = None
        """Why this rank leaves; empty if it has not failed; None while it is running."""
        self._error: BaseException | None = None
        self._hurry = False
        self._stop = False
        self._stop_agreed = False
        self._wake = threading.Event()

    def mark(self, step: int, doing: str, timed: bool = False) -> None:
        """Mark the place that the training has reached. All ranks pass the same marks.

        Args:
            step: Steps done.
            doing: The phase that begins here.
            timed: Whether timeout_s limits the time from here to the next mark.
        """
        self._timed = False  # first, because the clock still counts from the previous mark
        self._progress.mark(step, doing)
        self._timed = timed

    def stop_agreed(self) -> None:
        """Allow the full lost_after_s again, because all ranks are alive and have agreed to stop and save."""
        self._stop_agreed = True
        self._hurry = False

    @property
    def place(self) -> Place:
        """The last mark."""
        return self._progress.host

    def __enter__(self) -> Heartbeat:
        """Start both threads. Collective."""
        self._active = comm.size() > 1
        if not self._active:
            return self
        self._rank, size = comm.rank(), comm.size()
        self._progress = Progress(self._make_event)
        self._hosts = comm.gather_objects(socket.gethostname())
        self._store = comm.open_store(self.lost_after_s)
        self._watched = [(self._rank + i) % size for i in range(1, min(WATCHED + 1, size))]
        self._beats: dict[int, Beat] = {}
        """Last heartbeats read: of the watched ranks, or of all ranks once this rank has waited for long."""
        if self._rank == 0:
            self._store.set(VERDICT, "")
        self._send_beat()
        comm.barrier()  # reading a heartbeat that was never written would block
        self._restart_clocks()
        self._read(self._watched)
        # A Python signal handler runs in the main thread, which may be blocked in a collective. The
        # wakeup descriptor is written at once, and the clock thread reads it.
        self._signals, self._signal_sender = socket.socketpair()
        self._signal_sender.setblocking(False)
        # An evaluation may run in another thread, where signals cannot be set up.
        self._handles_signals = threading.current_thread() is threading.main_thread()
        if self._handles_signals:
            self._previous_wakeup = signal.set_wakeup_fd(
                self._signal_sender.fileno(), warn_on_full_buffer=False
            )
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch_clock)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop; after a communication error, wait for the rank that caused it to be named."""
        if not self._active:
            return
        if isinstance(error, KeyboardInterrupt):
            time.sleep(self._interval_s)  # meanwhile _watch_clock ends this process
        if error is not None and comm.is_communication_error(error):
            self._error = error
            self._hurry = True
            # Meanwhile _beat names the lost rank and ends this process.
            time.sleep(self._patience_s + 3 * self._interval_s)
        reason = ""
        if error is not None:
            place = f"rank {self._rank} on {socket.gethostname()} (last {self.place})"
            reason = f"{place} failed: {type(error).__name__}: {error}"
        # Assigned once, because the beat thread may read it at any time.
        self._exit_reason = reason
        self._wake.set()
        beat_thread, clock_thread = self._threads
        beat_thread.join(self.lost_after_s)
        if error is not None:
            self._keep_store_alive()
        self._stop = True
        self._signal_sender.send(b"!")
        clock_thread.join(2 * self._interval_s)
        if self._make_event:
            diagnostics.cancel_end()
        if self._handles_signals:
            signal.set_wakeup_fd(self._previous_wakeup)
        self._signals.close()
        self._signal_sender.close()

    @property
    def _patience_s(self) -> float:
        """How long a heartbeat may stay the same. A change is seen up to three intervals late."""
        usual = self.lost_after_s - 3 * self._interval_s
        return min(usual, HURRY_S) if self._hurry else usual

    def _beat(self) -> None:
        """Run the thread that uses the store."""
        last = time.monotonic()
        while not self._stop:
            self._wake.wait(self._interval_s)
            exit_reason = self._exit_reason  # read first: the next heartbeat then agrees with it
            self._progress.poll_device()
            try:
                if exit_reason:
                    self._publish(exit_reason)
                self._send_beat()
                if exit_reason is not None:
                    return
                verdict = self._read(self._watched)
                now = time.monotonic()
                if now - last > self._frozen_s:  # this rank was frozen, so all heartbeats look old
                    self._restart_clocks()
                last = self._last_answer = now
                if reason := verdict or self._find_lost(now):
                    self._end(reason)
            except RuntimeError:
                # The clock thread decides when the store is lost.
                time.sleep(self._interval_s)

    def _read(self, ranks: Sequence[int]) -> str:
        """Read the heartbeats of these ranks and note which have changed.

        Returns:
            The verdict; empty if there is none.

        Raises:
            RuntimeError: If the store does not answer.
        """
        keys = [f"{KEY}/{rank}" for rank in ranks]
        *texts, verdict = self._store.multi_get([*keys, VERDICT])
        now = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            beat = parse_beat(text)
            if beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._last_heard[rank] = now
        return verdict.decode()

    def _watch_clock(self) -> None:
        """Run the thread that never waits for the store."""
        last = time.monotonic()
        while not self._stop:
            # Restarted in every turn, so it expires only if a call into the driver blocks all of Python.
            if self._make_event:
                diagnostics.end_process_after(self.timeout_s)
            if wait([self._signals], self._interval_s / 2):
                received = self._signals.recv(64)
                self._hurry |= not self._stop_agreed
                handler = signal.getsignal(signal.SIGINT)
                if signal.SIGINT in received and handler is signal.default_int_handler:
                    self._end_interrupted()
            now = time.monotonic()
            if now - last > self._frozen_s:
                self._last_answer = now
            last = now
            silent_s = now - self._last_answer
            if silent_s > self._patience_s:
                self._end(
                    f"no answer from the rendezvous store for {silent_s:.0f} s; it runs in {self._name(0)}, "
                    "or in torchrun's agent on that host",
                    publish=False,
                )

    def _find_lost(self, now: float) -> str | None:
        """Return a reason that names a lost or hung rank, or None.

        Raises:
            RuntimeError: If the store does not answer.
        """
        running = [rank for rank in self._watched if self._is_running(rank)]
        if running:
            quietest = min(running, key=lambda rank: self._last_heard[rank])
            silent_s = now - self._last_heard[quietest]
            if silent_s > self._patience_s:
                return f"{self._name(quietest)} has sent no heartbeat for {silent_s:.0f} s"
        # Read the places before the time, see Progress.mark.
        host, device = self._progress.host, self._progress.device
        waited_s = now - self._progress.last_change
        if waited_s > 0.9 * self.timeout_s:
            self._read(range(comm.size()))
            if reason := self._find_behind(host, device, waited_s):
                return reason
        if self._timed and now - self._progress.last_change > self.timeout_s:
            return f"no rank has made progress for {waited_s:.0f} s: {self._describe_places()}"
        return None

    def _is_running(self, rank: int) -> bool:
        return rank not in self._beats or self._beats[rank].running

    def _find_behind(self, host: Place, device: Place, waited_s: float) -> str | None:
        """Return a reason that names the ranks behind this one, by their hosts, else by their devices."""
        behind = []
        gpus_behind = []
        for rank, beat in sorted(self._beats.items()):
            if not beat.running:
                continue
            if beat.host.number < host.number:
                behind.append(self._name(rank))
            if beat.device.number < device.number:
                name = f"rank {rank} on {self._hosts[rank]}"
                gpus_behind.append(f"the GPU of {name} has not passed {beat.device}")
        if behind:
            return f"the others have waited {waited_s:.0f} s for {'; '.join(behind)}"
        if gpus_behind:
            return f"{'; '.join(gpus_behind)}, for {waited_s:.0f} s"
        return None

    def _describe_places(self) -> str:
        """Return the place of every rank; ranks at the same place are named together."""
        ranks: dict[str, list[int]] = {}
        for rank, beat in sorted(self._beats.items()):
            text = f"at {beat.host}"
            if beat.device != beat.host:
                text += f" (its GPU at {beat.device})"
            ranks.setdefault(text, []).append(rank)
        return "; ".join(f"{comm.join_ranks(numbers)} {text}" for text, numbers in ranks.items())

    def _end(self, reason: str, publish: bool = True) -> None:
        """End this process.

        Args:
            reason: Why, for the error message.
            publish: Whether to write the reason into the store for the other ranks.
        """
        if publish:
            with suppress(RuntimeError):
                self._publish(reason)
        if self._error is not None:
            traceback.print_exception(self._error)
        print(
            f"error on {socket.gethostname()}: rank {self._rank} stops: {reason}",
            file=sys.stderr,
            flush=True,
        )
        diagnostics.write_diagnostics(self.folder, self._rank)
        if publish:
            self._keep_store_alive()
        os._exit(1)

    def _end_interrupted(self) -> None:
        """End this process at once after Ctrl-C, when there is nothing to save.

        A KeyboardInterrupt would only be raised when the collective that this rank is in returns.
        """
        if self._rank == 0:
            with suppress(OSError):  # the terminal or a `tee` may have ended
                print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)

    def _keep_store_alive(self) -> None:
        """On rank 0, whose process may run the store, give the others time to read the verdict."""
        if self._rank == 0:
            time.sleep(2 * self._interval_s)

    def _publish(self, reason: str) -> None:
        """Write the verdict, unless another rank has written one.

        Raises:
            RuntimeError: If the store does not answer.
        """
        # The store refuses strings with surrogates, which names of files may contain.
        text = reason.encode("utf-8", "backslashreplace").decode()
        self._store.compare_set(VERDICT, "", text)

    def _send_beat(self) -> None:
        self._serial += 1
        progress = self._progress
        beat = Beat(self._serial, progress.host, progress.device, self._exit_reason is None)
        self._store.set(f"{KEY}/{self._rank}", json.dumps(beat))

    def _name(self, rank: int) -> str:
        last = f" (last {self._beats[rank].host})" if rank in self._beats else ""
        return f"rank {rank} on {self._hosts[rank]}{last}"

    def _restart_clocks(self) -> None:
        """Count all silences and this rank's waiting time from now."""
        now = time.monotonic()
        self._last_heard = dict.fromkeys(range(comm.size()), now)
        self._progress.last_change = now
