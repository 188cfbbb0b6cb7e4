"""When and how a run saves: in the background, one save at a time, then old checkpoints are removed.

checkpoint.py defines the content of a checkpoint, background_save.py writes it, retention.py removes old
ones and upload.py copies new ones elsewhere. The training loop calls this file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine as Engine

from disco_ds.checkpoints import checkpoint, retention
from disco_ds.checkpoints.background_save import HostCopy, Save
from disco_ds.checkpoints.checkpoint import RunState
from disco_ds.checkpoints.upload import Uploads
from disco_ds.config import CheckpointSettings
from disco_ds.distributed import comm, jobs
from disco_ds.distributed.heartbeat import Heartbeat

logger = logging.getLogger(__name__)


@dataclass
class Saver:
    """Saves the checkpoints of a run."""

    folder: Path
    """The run folder."""
    settings: CheckpointSettings
    """How often to save and what to keep."""
    engine: Engine
    """The engine whose state is saved."""
    read_state: Callable[[int], RunState]
    """Returns the rest of the state after a step."""
    heartbeat: Heartbeat
    """Is informed that this rank waits for a save, which is not a hang."""
    add_wait: Callable[[float], None]
    """Called with the seconds that training has waited for a save."""
    uploads: Uploads | None
    """Runs the user's command on every checkpoint; None if there is no command."""
    host_copy: HostCopy | None = None
    """Host memory for a copy of the state, so that training continues while it is written."""
    in_flight: Save | None = None
    """The save in progress, the same on every rank."""
    saved_step: int = 0
    """Step of the last checkpoint that this run has completed."""
    num_failed: int = 0
    """Failed saves in a row."""

    def __post_init__(self) -> None:
        if self.settings.asynchronous:
            self.host_copy = HostCopy()

    @property
    def is_writing(self) -> bool:
        """Whether a thread of this rank works on a save."""
        return self.in_flight is not None and self.in_flight.working

    def save(self, step: int, last: bool) -> None:
        """Save a checkpoint in the background; the last one of the run is waited for. Collective.

        If a save fails (for example because the disk is full), training continues and the next due
        save tries again.

        Raises:
            comm.AgreedError: If the last save of the run fails, or too many in a row.
        """
        with self._waiting(step):
            if before := self.in_flight:
                start = time.monotonic()
                self._finish()
                if comm.rank() == 0:
                    logger.warning(
                        "step %d waited %.1f s for the save of step %d: save less often, or to a "
                        "faster disk",
                        step,
                        time.monotonic() - start,
                        before.step,
                    )
            try:
                self.in_flight = self._begin(step)
            except comm.AgreedError as error:
                self._note_failure(step, last, error)
            if last or self.host_copy is None:
                self._finish(last)

    def poll(self, step: int, all_written: bool) -> None:
        """Advance the save in progress. Collective.

        Args:
            step: The current step.
            all_written: Whether the ranks have agreed that no rank's thread works on it.

        Raises:
            comm.AgreedError: If too many saves have failed in a row.
        """
        if self.uploads:
            self.uploads.poll()
        if self.in_flight and all_written:
            with self._waiting(step):
                self._advance()

    def save_before_error(self, step: int, first_step: int) -> str:
        """Save the progress made before a failed step, unless it is saved already. Collective.

        Args:
            step: Number of completed steps.
            first_step: Number of steps that were completed when this run was started or resumed.

        Returns:
            What happened, for the error message.
        """
        try:
            with self._waiting(step):
                self._finish(last=True)
            if step > max(self.saved_step, first_step):
                self.save(step, last=True)
        except comm.AgreedError as error:
            return f"step {step:,} could not be saved: {error}"
        if step == 0:
            return "no step was completed"
        return f"saved after step {step:,}; --resume latest resumes from there"

    def end(self, step: int) -> None:
        """Complete the save in progress and wait for the uploads, with a time limit. Collective.

        Failures are logged: the run ends anyway.
        """
        try:
            with self._waiting(step):
                self._finish()
        except comm.AgreedError as error:
            if comm.rank() == 0:
                logger.warning("the save in progress failed: %s", error)
        self.wait_for_uploads(step)

    def wait_for_uploads(self, step: int) -> None:
        """Wait until all checkpoints are uploaded, at most checkpoint.copy_timeout_s. Collective."""
        if not self.settings.copy_command:
            return
        self.heartbeat.mark(step, "waiting for uploads")
        end = time.monotonic() + self.settings.copy_timeout_s
        is_waiting = True
        while is_waiting:
            # In short turns, because a collective that one rank reaches late times out.
            turn_end = min(end, time.monotonic() + jobs.TURN_S)
            is_pending = self.uploads is not None and self.uploads.wait_until(turn_end)
            is_waiting = comm.broadcast(is_pending and turn_end < end)

    def close(self) -> None:
        """Free the host memory; if the run ended in the middle of a save, wait briefly for it."""
        if self.in_flight is not None:
            self.in_flight.wait(10.0)
        if self.host_copy is not None and not self.is_writing:
            self.host_copy.close()

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """Count the time of the block as waiting for a save, and not as a hang."""
        start = time.monotonic()
        self.heartbeat.mark(step, "saving")
        yield
        self.add_wait(time.monotonic() - start)

    def _begin(self, step: int) -> Save:
        """Begin a save. If the disk is full, remove the oldest checkpoint and try again."""
        prepared = None
        while prepared is None:
            try:
                prepared = checkpoint.prepare(self.folder, step, self.engine)
            except comm.AgreedError:
                if not self._make_room():
                    raise
        return checkpoint.start_save(prepared, self.engine, self.read_state(step), self.host_copy)

    def _finish(self, last: bool = False) -> None:
        """Wait until the save in progress is complete, or has failed."""
        while self.in_flight:
            self.in_flight.wait_for_all()
            self._advance(last)

    def _advance(self, last: bool = False) -> None:
        """Take the save in progress one step further: exchange the checksums, or complete it.

        If it has failed, remove the oldest checkpoint, which it replaces, and write the same state
        again.
        """
        save = self.in_flight
        assert save is not None
        try:
            is_complete = save.advance(tidy=self._removal(self.settings.keep_last))
        except comm.AgreedError as error:
            if self._make_room():
                # The host still has the state of that step, although training has continued.
                save.start()
                return
            self.in_flight = None
            self._note_failure(save.step, last, error)
            return
        if not is_complete:
            return
        self.in_flight = None
        self.num_failed = 0
        self.saved_step = save.step
        if self.uploads:
            self.uploads.add(save.final)

    def _note_failure(self, step: int, last: bool, error: comm.AgreedError) -> None:
        """Count a failed save and remove its files. Raises `error` if the run cannot continue."""
        self.num_failed += 1
        self._remove_old(self.settings.keep_last)
        if last or self.num_failed > self.settings.max_failed_saves:
            raise error
        if comm.rank() == 0:
            logger.warning(
                "step %d is not saved: %s; training continues and the next save tries again",
                step,
                error,
            )

    def _make_room(self) -> bool:
        """Remove the oldest checkpoint, unless it is the only one. Return whether one was removed."""
        keep_last = self.settings.keep_last
        return self._remove_old(None if keep_last is None else max(keep_last - 1, 1)) > 0

    def _remove_old(self, keep_last: int | None) -> int:
        """Remove all but the last checkpoints and the files of failed saves; log failures.

        Returns:
            Number of removed checkpoints.
        """
        remove = self._removal(keep_last) if comm.rank() == 0 else lambda: 0
        return comm.broadcast(jobs.run("removing old checkpoints", remove))

    def _removal(self, keep_last: int | None) -> Callable[[], int]:
        """Return a function that removes old checkpoints but those being written or uploaded."""
        busy = list(self.uploads.busy) if self.uploads else []
        if self.in_flight:
            busy.append(self.in_flight.partial)
        keep_every = self.settings.keep_every_steps
        return partial(retention.remove_checkpoints, self.folder, keep_last, keep_every, busy)
