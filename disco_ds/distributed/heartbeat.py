"""Detect lost and hung ranks through heartbeats in the rendezvous store, name them, and stop the run.

A collective that waits for a dead rank times out without saying which rank is missing, so each rank
runs two background threads:

- The heartbeat thread writes this rank's heartbeat, which includes its progress in the training, into
  the store. It also reads the heartbeats of the next WATCHED ranks, and the verdict. The verdict is
  the reason for stopping the run; it is empty until some rank writes one. The heartbeats of all other
  ranks are read only after this rank has made no progress for a long time.
- The clock thread ends the process if the store has not answered for too long. It also notices
  signals, even while the main thread is blocked. It never uses the store, because a call to TCPStore
  blocks forever if the store's host is frozen.

A rank's progress is that of its Python process. If a GPU hangs, all processes wait at the same mark, so
the error names no hung rank. NCCL's flight records (py) help to find this rank.
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
import traceback
from collections.abc import Sequence
from contextlib import suppress

# `wait` uses poll(). select.select() would fail in a process with more than 1,024 open files.
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from disco_ds.distributed import comm

INTERVAL_S = 2.0
"""Maximum time between two heartbeats. If lost_after_s is short, the time is lost_after_s / 10."""
HURRY_S = 10.0
"""After a failed collective or a signal, a rank counts as lost if it has sent no new heartbeat for this long.

This is shorter than lost_after_s usually is, because the launcher sends SIGTERM one second after it
has lost a rank, and SIGKILL half a minute later. The limit returns to lost_after_s once all ranks
have agreed to stop because of the signal, which shows that no rank is lost.
"""
WATCHED = 3
"""Number of ranks that each rank watches.

Watching one rank would be enough: if several ranks are lost, at least one of them is watched by a
surviving rank. With three, one slow watcher does not delay detection, and the store still serves
only a few values per rank and interval.
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

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}"


class Beat(NamedTuple):
    """The heartbeat that a rank writes into the store."""

    serial: int
    """Number of heartbeats that the rank has sent so far, so that no two of its heartbeats are equal."""
    progress: Progress
    running: bool
    """False only in the last heartbeat of a rank, which it sends when it leaves the run."""


class Heartbeat:
    """Context manager that watches the other ranks and ends this process if a rank is lost or hangs.

    A rank that fails publishes its error before it leaves, so the other ranks stop immediately.

    During training, each rank calls `mark` at the start of each phase. There are three time limits:

    - lost_after_s, which always applies: a rank whose heartbeat has not changed for this long is lost.
    - 0.9 x timeout_s, which always applies: if this rank has passed no mark for this long, and other
      ranks have passed fewer marks, the run ends with an error that names those ranks. This rank is
      probably waiting for them in a collective, which the backend would end after timeout_s without
      naming any rank.
    - timeout_s, which applies after marks with timed=True: if this rank has passed no mark for this
      long and no rank is behind it, the run ends with an error that reports this rank's last mark.
      Building, the first step (which compiles), evaluation and saving are not timed, because they may
      take hours. The backend's timeout still applies to collectives in these phases.

    Args:
        lost_after_s: First time limit.
        timeout_s: Second and third time limit; also the timeout of collectives.
    """

    def __init__(self, lost_after_s: float, timeout_s: float):
        self.lost_after_s = lost_after_s
        self.timeout_s = timeout_s
        self.folder: Path | None = None
        """Folder for the diagnostics that this rank writes before its process is ended; None: write to stderr only."""
        self._interval_s = min(INTERVAL_S, lost_after_s / 10)
        # If an iteration of a thread's loop takes longer than this, the process was frozen.
        self._frozen_s = 3 * self._interval_s
        self.progress = Progress(0, 0, "building")
        """What the last call of `mark` recorded."""
        self._marked_at = time.monotonic()
        self._timed = False
        self._last_answer = time.monotonic()
        self._compared_at = 0.0
        """When this rank last read all heartbeats. Such reads must be rare: all ranks may do it at the same time."""
        self._serial = 0
        self._exit_reason: str | None = None
        """None while this rank is running. Then the error with which it failed, or "" if it ended without an error."""
        self._error: BaseException | None = None
        self._hurry = False
        self._stop = False
        self._stop_agreed = False
        self._wake = threading.Event()

    def mark(self, step: int, doing: str, timed: bool = False) -> None:
        """Record how far training has got. All ranks make the same calls in the same order.

        Args:
            step: Number of completed steps.
            doing: Name of the phase that begins here.
            timed: Whether timeout_s limits the time from this mark to the next one.
        """
        self._timed = False  # cleared first, because _marked_at still belongs to the previous mark
        # The heartbeat thread reads the progress before the time, so it never sees new progress with an old time.
        self._marked_at = time.monotonic()
        self.progress = Progress(self.progress.number + 1, step, doing)
        self._timed = timed

    def stop_agreed(self) -> None:
        """Replace the short limit HURRY_S with lost_after_s again.

        Call this after all ranks have agreed to stop and save, which shows that they are alive.
        """
        self._stop_agreed = True
        self._hurry = False

    def __enter__(self) -> Heartbeat:
        """Start both threads. Collective."""
        self._active = comm.size() > 1
        if not self._active:
            return self
        self._rank, size = comm.rank(), comm.size()
        self._hosts = comm.gather_objects(socket.gethostname())
        self._store = comm.open_store(self.lost_after_s)
        self._watched = [(self._rank + i) % size for i in range(1, min(WATCHED + 1, size))]
        self._beats: dict[int, Beat] = {}
        """Maps a rank to the last heartbeat read from it. Ranks whose heartbeat was never read are missing."""
        if self._rank == 0:
            self._store.set(VERDICT, "")
        self._send_beat()
        comm.barrier()  # wait for the first heartbeat of every rank: reading a missing key would block
        self._restart_clocks()
        self._read(self._watched)
        # Python runs signal handlers in the main thread, which may be blocked in a collective. But it
        # writes the signal's number to the wakeup socket at once, and the clock thread reads it there.
        self._signals, self._signal_sender = socket.socketpair()
        self._signal_sender.setblocking(False)
        # An evaluation may run outside the main thread, where Python does not allow set_wakeup_fd.
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
        """Stop both threads. After a communication error, first wait until the rank that caused it is found."""
        if not self._active:
            return
        if isinstance(error, comm.AgreedError):  # this rank leaves together with all others
            error = None
        if isinstance(error, KeyboardInterrupt):
            time.sleep(self._interval_s)  # meanwhile, _watch_clock ends this process
        if error is not None and comm.is_communication_error(error):
            self._error = error
            self._hurry = True
            # If a rank is lost, _beat reports it and ends this process while this thread waits.
            time.sleep(self._patience_s + 3 * self._interval_s)
        reason = ""
        if error is not None:
            name = f"rank {self._rank} on {socket.gethostname()} (last {self.progress})"
            reason = f"{name} failed: {type(error).__name__}: {error}"
        # Assigned only when it is complete, because the heartbeat thread may read it at any time.
        self._exit_reason = reason
        self._wake.set()
        beat_thread, clock_thread = self._threads
        beat_thread.join(self.lost_after_s)
        if error is not None:
            self._keep_store_alive()
        self._stop = True
        self._signal_sender.send(b"!")
        clock_thread.join(2 * self._interval_s)
        cancel_end()
        if self._handles_signals:
            signal.set_wakeup_fd(self._previous_wakeup)
        self._signals.close()
        self._signal_sender.close()

    @property
    def _patience_s(self) -> float:
        """How long a heartbeat may stay unchanged before its rank counts as lost.

        This is three intervals less than lost_after_s, because a change may be noticed up to three intervals late.
        After a failed collective or a signal, it is at most HURRY_S.
        """
        usual = self.lost_after_s - 3 * self._interval_s
        return min(usual, HURRY_S) if self._hurry else usual

    def _beat(self) -> None:
        """Run the heartbeat thread, the only one of the two threads that uses the store."""
        last = time.monotonic()
        while not self._stop:
            self._wake.wait(self._interval_s)
            # Read before the heartbeat is sent. If it is already set here, that heartbeat is the last one.
            exit_reason = self._exit_reason
            try:
                if exit_reason:
                    self._publish(exit_reason)
                self._send_beat()
                if exit_reason is not None:
                    return
                verdict = self._read(self._watched)
                now = time.monotonic()
                if now - last > self._frozen_s:  # this rank was frozen, so all heartbeats seem old
                    self._restart_clocks()
                last = self._last_answer = now
                if reason := verdict or self._find_lost(now):
                    self._end(reason)
            except RuntimeError:
                # The store has failed. The clock thread ends this process if that lasts too long.
                time.sleep(self._interval_s)

    def _read(self, ranks: Sequence[int]) -> str:
        """Read the heartbeats of these ranks, and record the time for each one that has changed.

        Returns:
            The verdict, or an empty string if there is none.

        Raises:
            RuntimeError: If the store does not answer.
        """
        keys = [f"{KEY}/{rank}" for rank in ranks]
        *texts, verdict = self._store.multi_get([*keys, VERDICT])
        now = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            serial, progress, running = json.loads(text)
            beat = Beat(serial, Progress(*progress), running)
            if beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._last_heard[rank] = now
        return verdict.decode()

    def _watch_clock(self) -> None:
        """Run the clock thread, which never uses the store."""
        last = time.monotonic()
        while not self._stop:
            # This timer restarts in every iteration, so it expires only if a call into the device driver
            # blocks all Python threads.
            end_process_after(self.timeout_s)
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
        """Return an error message that names lost or hung ranks, or None if there are none.

        Raises:
            RuntimeError: If the store does not answer.
        """
        for rank in self._watched:
            silent_s = now - self._last_heard[rank]
            if self._beats[rank].running and silent_s > self._patience_s:
                return f"{self._name(rank)} has sent no heartbeat for {silent_s:.0f} s"
        progress = self.progress  # read before the time, see `mark`
        waited_s = now - self._marked_at
        pause_s = 0.1 * self.timeout_s
        if waited_s > 9 * pause_s and now - self._compared_at > pause_s:
            self._compared_at = now
            self._read(range(comm.size()))
            behind = [
                self._name(rank)
                for rank, beat in sorted(self._beats.items())
                if beat.running and beat.progress.number < progress.number
            ]
            if behind:
                return f"the others have waited {waited_s:.0f} s for {'; '.join(behind)}"
        if self._timed and now - self._marked_at > self.timeout_s:
            return (
                f"no rank has made progress for {waited_s:.0f} s: {self._name(self._rank)} waits, and no "
                "rank is behind it"
            )
        return None

    def _end(self, reason: str, publish: bool = True) -> None:
        """Print the reason, write diagnostics, and end this process with exit code 1.

        Args:
            reason: Why the process ends, for the error message.
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
        write_diagnostics(self.folder, self._rank)
        if publish:
            self._keep_store_alive()
        os._exit(1)

    def _end_interrupted(self) -> None:
        """End this process immediately after Ctrl-C. Only used while there is nothing to save.

        A KeyboardInterrupt would come too late: if the main thread is in a collective, Python raises it only
        after the collective has returned.
        """
        if self._rank == 0:
            with suppress(OSError):  # the terminal or a `tee` may be closed already
                print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)

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

    def _send_beat(self) -> None:
        self._serial += 1
        beat = Beat(self._serial, self.progress, self._exit_reason is None)
        self._store.set(f"{KEY}/{self._rank}", json.dumps(beat))

    def _name(self, rank: int) -> str:
        last = f" (last {self._beats[rank].progress})" if rank in self._beats else ""
        return f"rank {rank} on {self._hosts[rank]}{last}"

    def _restart_clocks(self) -> None:
        """Treat all ranks as if their heartbeats had just changed, and this rank as if it had just made progress."""
        now = time.monotonic()
        self._last_heard = dict.fromkeys(range(comm.size()), now)
        self._marked_at = now


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
    """Write this rank's diagnostics. The caller then ends the process; if writing hangs, a timer ends it after LIMIT_S.

    Args:
        folder: The folder to write into. None writes only stacks, to stderr.
        rank: This rank.
    """
    end_process_after(LIMIT_S)
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


def cancel_end() -> None:
    """Stop the timer of `end_process_after`."""
    faulthandler.cancel_dump_traceback_later()
