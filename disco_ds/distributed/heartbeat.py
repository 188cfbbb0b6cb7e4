"""Detect lost and hung ranks through heartbeats in the rendezvous store, name them, and stop the run.

A collective that waits for a dead rank times out without saying which rank is missing. So each rank runs a
background thread. At intervals, it writes this rank's heartbeat, which includes its progress in the training, into the
store, and reads the verdict: the reason for stopping the run, empty until some rank writes one. Rank 0 also reads the
heartbeats of all ranks, and looks for lost and hung ones. The others read that of rank 0.

A call to the store blocks forever if the store's host is frozen. Therefore it runs in a thread of its own (jobs.py),
and the process ends if it takes too long.

A rank's progress is that of its Python process. If a GPU hangs, all processes wait at the same mark, so
the error names no hung rank. NCCL's flight records (below) help to find this rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent import futures
from contextlib import suppress
from functools import partial

# `wait` uses poll(). select.select() would fail in a process with more than 1,024 open files.
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from disco_ds.distributed import comm, jobs

INTERVAL_S = 2.0
"""Maximum time between two heartbeats. If lost_after_s is short, the time is lost_after_s / 10."""
HURRY_S = 10.0
"""After a failed collective or a signal on any rank, a rank counts as lost if it has sent no heartbeat for this long.

This is shorter than lost_after_s usually is, because the launcher sends SIGTERM one second after it
has lost a rank, and SIGKILL half a minute later. The limit returns to lost_after_s once all ranks
have agreed to stop because of the signal, which shows that no rank is lost.
"""
KEY = "disco_ds/heartbeat"
VERDICT = f"{KEY}/verdict"
DIAGNOSTICS = "diagnostics"
"""Name of the diagnostics folder inside the run folder."""
STACKS = "stacks_rank_{}.txt"
"""Name of the file with the stacks of a rank's Python threads."""
TRACE = "nccl_trace_rank_"
"""Prefix of a file name that ends with the rank, as torchfrtrace expects."""
LIMIT_S = 20.0
"""Maximum time for writing the diagnostics."""
STDERR = 2


class Progress(NamedTuple):
    """How far a rank has got, as recorded by Heartbeat.mark."""

    number: int
    """Sequence number of the mark (see Heartbeat.mark).

    It starts at 1 and is the same on all ranks; 0 means that no mark has been passed yet.
    """
    step: int
    """Number of completed steps."""
    doing: str
    """The phase that begins at the mark, such as "forward"."""
    timed: bool = False
    """True if the run must stop when no rank leaves this phase within timeout_s. Heartbeat explains the limits."""

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}"


class Beat(NamedTuple):
    """The heartbeat that a rank writes into the store."""

    sent_at: float
    """Time in seconds, on the clock of the rank's host, at which the rank sent this heartbeat.

    Every heartbeat of a rank has a different time.
    """
    progress: Progress
    is_hurried: bool
    """Whether the rank has had a communication error or a signal, so that HURRY_S applies to all ranks."""
    is_running: bool
    """False only in the last heartbeat of a rank, which it sends when it leaves the run."""


class Heartbeat:
    """Context manager that watches the other ranks and ends this process if a rank is lost or hangs.

    A rank that fails publishes its error before it leaves, so the other ranks stop immediately.

    During training, each rank calls `mark` at the start of each phase. There are three time limits:

    - lost_after_s, which always applies: a rank whose heartbeat has not changed for this long is lost.
    - 0.9 x timeout_s, which always applies: if no rank has passed a new mark for this long, and some
      ranks have passed fewer marks than others, the run ends with an error that names those ranks. The
      others are probably waiting for them in a collective, which the backend would end after timeout_s
      without naming any rank.
    - timeout_s, which applies after marks with timed=True: if all ranks have waited at the same mark
      for this long, the run ends with an error that reports the mark. Building, the first step (which
      compiles), evaluation and saving are not timed, because they may take hours. The backend's timeout
      still applies to collectives in these phases.

    Args:
        lost_after_s: First time limit.
        timeout_s: Second and third time limit; also the timeout of collectives.
    """

    def __init__(self, lost_after_s: float, timeout_s: float):
        self.lost_after_s = lost_after_s
        self.timeout_s = timeout_s
        self.folder: Path | None = None
        """Folder for the diagnostics that this rank writes before its process is ended; None: write to stderr only."""
        self.progress = Progress(0, 0, "building")
        """What the last call of `mark` recorded."""
        self._furthest = self.progress
        """For rank 0, the latest progress of any rank."""
        self._interval_s = min(INTERVAL_S, lost_after_s / 10)
        self._is_hurried = self._is_stop_agreed = self._is_leaving = False

    def mark(self, step: int, doing: str, timed: bool = False) -> None:
        """Record how far training has got. All ranks make the same calls in the same order.

        Args:
            step: Number of completed steps.
            doing: Name of the phase that begins here.
            timed: Whether timeout_s limits the time from this mark to the next one.
        """
        self.progress = Progress(self.progress.number + 1, step, doing, timed)

    def stop_agreed(self) -> None:
        """Replace the short limit HURRY_S with lost_after_s again.

        Call this after all ranks have agreed to stop and save, which shows that they are alive.
        """
        self._is_stop_agreed = True
        self._is_hurried = False

    def __enter__(self) -> Heartbeat:
        """Start the thread. Collective."""
        if comm.size() == 1:
            return self
        self._rank = comm.rank()
        self._hosts = comm.gather_objects(socket.gethostname())
        self._store = comm.open_store(self.lost_after_s)
        self._watched = [0] if self._rank else [*range(1, comm.size())]
        self._beats = dict.fromkeys(self._watched, Beat(0.0, self.progress, False, True))
        """The last heartbeat of this rank and of each watched rank."""
        if self._rank == 0:
            self._store.set(VERDICT, "")
        self._send_beat()
        comm.barrier()  # wait for the first heartbeat of every rank: reading a missing key would block
        self._restart_clocks()
        # Python runs signal handlers in the main thread, which may be blocked in a collective. But it
        # writes the signal's number to the wakeup socket at once, and the thread reads it there.
        self._signals, self._signal_sender = socket.socketpair()
        self._signal_sender.setblocking(False)
        # An evaluation may run in another thread, where Python does not allow this.
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            sender = self._signal_sender.fileno()
            self._wakeup_before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        self._exchange = jobs.start(self._exchange_beats)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Stop the thread. After a communication error, first wait until the rank that caused it is found."""
        if comm.size() == 1:
            return
        if isinstance(error, comm.AgreedError):  # this rank leaves together with all others
            error = None
        if error is not None and comm.is_communication_error(error):
            self._is_hurried = True
            # If a rank is lost, the thread reports it and ends this process during this wait.
            time.sleep(self._patience_s + 3 * self._interval_s)
        self._is_leaving = True
        self._signal_sender.send(b"!")
        self._thread.join()
        futures.wait([jobs.start(partial(self._leave, error))], self.lost_after_s)
        faulthandler.cancel_dump_traceback_later()
        if self._is_main:
            signal.set_wakeup_fd(self._wakeup_before)
        self._signals.close()
        self._signal_sender.close()

    def _leave(self, error: BaseException | None) -> None:
        """Send this rank's last heartbeat. If this rank fails, its error is the verdict."""
        futures.wait([self._exchange])  # two threads must not use the store at the same time
        self._send_beat(is_running=False)
        if error is not None:
            self._publish(f"{self._name(self._rank)} failed: {type(error).__name__}: {error}")
            self._keep_store_alive()

    @property
    def _patience_s(self) -> float:
        """How long a heartbeat may stay unchanged before its rank counts as lost.

        This is three intervals less than lost_after_s, because a change may be noticed up to three intervals late.
        After a failed collective or a signal, it is at most HURRY_S.
        """
        usual = self.lost_after_s - 3 * self._interval_s
        is_hurried = self._is_hurried or any(beat.is_hurried for beat in self._beats.values())
        return min(usual, HURRY_S) if is_hurried else usual

    def _watch(self) -> None:
        """Exchange heartbeats until this rank leaves, and end this process if a rank or the store is lost."""
        last = time.monotonic()
        while not self._is_leaving:
            # This timer restarts in every iteration, so it expires only if a call into the device driver
            # blocks all Python threads.
            end_process_after(self.timeout_s)
            if wait([self._signals], self._interval_s):
                self._signals.recv(64)
                self._is_hurried |= not (self._is_stop_agreed or self._is_leaving)
            now = time.monotonic()
            # If this process was frozen, all heartbeats seem old.
            if now - last > 3 * self._interval_s:
                self._restart_clocks()
            last = now
            if self._exchange.done():
                # After an error of the store, try again. It may be temporary.
                if self._exchange.exception() is None:
                    self._last_answer = now
                    if reason := self._exchange.result() or self._find_lost(now):
                        self._end(reason)
                self._exchange = jobs.start(self._exchange_beats)
            silent_s = now - self._last_answer
            if silent_s > self._patience_s:
                self._end(
                    f"no answer from the rendezvous store for {silent_s:.0f} s; it runs in {self._name(0)}, "
                    "or in torchrun's agent on that host"
                )

    def _exchange_beats(self) -> str:
        """Send this rank's heartbeat, read those of the watched ranks, and record when each one has changed.

        Returns:
            The verdict, or an empty string if there is none.

        Raises:
            RuntimeError: If the store does not answer.
        """
        self._send_beat()
        keys = [f"{KEY}/{rank}" for rank in self._watched]
        *texts, verdict = self._store.multi_get([*keys, VERDICT])
        now = time.monotonic()
        for rank, text in zip(self._watched, texts, strict=True):
            sent_at, progress, *flags = json.loads(text)
            if sent_at != self._beats[rank].sent_at:
                self._beats[rank] = Beat(sent_at, Progress(*progress), *flags)
                self._last_heard[rank] = now
        return verdict.decode()

    def _find_lost(self, now: float) -> str | None:
        """Return an error message that names lost or hung ranks, or None if there are none."""
        for rank in self._watched:
            silent_s = now - self._last_heard[rank]
            if self._beats[rank].is_running and silent_s > self._patience_s:
                return f"{self._name(rank)} has sent no heartbeat for {silent_s:.0f} s"
        if self._rank > 0:
            return None
        running = {rank: beat.progress for rank, beat in self._beats.items() if beat.is_running}
        furthest = max(running.values())
        if furthest > self._furthest:
            self._furthest, self._moved_at = furthest, now
        waited_s = now - self._moved_at
        behind = sorted(rank for rank, progress in running.items() if progress < furthest)
        if behind and waited_s > 0.9 * self.timeout_s:
            return (
                f"the others have waited {waited_s:.0f} s for {'; '.join(map(self._name, behind))}"
            )
        if not behind and furthest.timed and waited_s > self.timeout_s:
            return f"no rank has made progress for {waited_s:.0f} s: all ranks wait at {furthest}"
        return None

    def _end(self, reason: str) -> None:
        """Print the reason, write diagnostics, and end this process with exit code 1."""
        end_process_after(LIMIT_S)  # in case that a call into the store or the driver blocks
        if self._exchange.done():  # otherwise, the store is frozen
            with suppress(RuntimeError):
                self._publish(reason)
        print(
            f"error on {socket.gethostname()}: rank {self._rank} stops: {reason}",
            file=sys.stderr,
            flush=True,
        )
        write_diagnostics(self.folder, self._rank)
        self._keep_store_alive()
        os._exit(1)

    def _keep_store_alive(self) -> None:
        """On rank 0, whose process may serve the store, wait so that the other ranks can read the verdict."""
        if self._rank == 0:
            time.sleep(2 * self._interval_s)

    def _publish(self, reason: str) -> None:
        """Write this reason into the store as the verdict, unless another rank has already written a verdict.

        Raises:
            RuntimeError: If the store does not answer.
        """
        # The store refuses strings with surrogate characters, which file names may contain.
        text = reason.encode("utf-8", "backslashreplace").decode()
        self._store.compare_set(VERDICT, "", text)

    def _send_beat(self, is_running: bool = True) -> None:
        beat = Beat(time.monotonic(), self.progress, self._is_hurried, is_running)
        self._beats[self._rank] = beat
        self._store.set(f"{KEY}/{self._rank}", json.dumps(beat))

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]} (last {self._beats[rank].progress})"

    def _restart_clocks(self) -> None:
        """Count all ranks and the store as heard of just now, and rank 0's view of the progress as new."""
        now = self._last_answer = self._moved_at = time.monotonic()
        self._last_heard: dict[int, float] = dict.fromkeys(self._watched, now)
        self._furthest = self.progress


# Diagnostics that a rank writes before its process is ended

# torch's flight recorder keeps the last NCCL collectives of every group. torch's tool `torchfrtrace` compares the
# records of all ranks and names the first collective in which they differ. Nothing here may keep the process from
# ending. A timer in C ends it after LIMIT_S, even if a call into CUDA blocks all Python threads.


def dump_records_to(folder: Path) -> None:
    """Make torch write NCCL's flight record to this folder after a timeout, unless the user has set a path.

    torch reads the environment variable only when it first writes a record, so this works even after
    init_process_group. torch appends the rank to the path.
    """
    if comm.uses_nccl():
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((folder / TRACE).absolute()))


def write_diagnostics(folder: Path | None, rank: int) -> None:
    """Write this rank's diagnostics.

    Args:
        folder: The folder to write into. None writes only stacks, to stderr.
        rank: This rank.
    """
    if folder is None:
        faulthandler.dump_traceback(file=STDERR)
        return
    with suppress(Exception):  # the caller must end the process in any case
        folder.mkdir(exist_ok=True)
        with (folder / STACKS.format(rank)).open("w") as file:
            faulthandler.dump_traceback(file=file)
        if comm.uses_nccl():
            # This function exists only in builds of torch with NCCL.
            from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

            (folder / f"{TRACE}{rank}").write_bytes(_dump_nccl_trace())


def end_process_after(seconds: float) -> None:
    """End this process after this time, with exit code 1 and all stacks on stderr. A new call restarts the timer.

    The timer runs in C: torch.cuda.Event.query and the dump of NCCL's flight record hold the GIL,
    so if one of these calls blocks in the driver, no Python thread can run.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
