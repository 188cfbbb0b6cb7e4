"""Save a run's checkpoints in the background, one at a time, and remove old checkpoints after each save.

checkpoint.py defines the content of a checkpoint, background_save.py writes it, retention.py removes old
ones and upload.py uploads new ones. The training loop calls this module.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent import futures
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


MAX_FAILED_SAVES = 2
"""Number of consecutive saves that may fail. If one more save fails, the run stops."""


@dataclass
class Saver:
    """Saves a run's checkpoints, with retries, removal of old checkpoints and uploads. Every rank has one."""

    folder: Path
    """The run folder."""
    settings: CheckpointSettings
    """The run's settings for checkpoints."""
    engine: Engine
    """The engine whose state is saved."""
    read_state: Callable[[int], RunState]
    """Called with the number of completed steps. Returns the state to save in addition to the engine's."""
    heartbeat: Heartbeat
    """Notified when this rank waits for a save, so that the wait does not look like a hang."""
    add_wait: Callable[[float], None]
    """Called after each wait for a save, with the number of seconds that this wait took."""
    uploads: Uploads | None = None
    """Runs the user's upload command on each checkpoint. None on ranks other than 0 or if there is no command.

    In a run with stages, it also finishes the uploads that the previous stage left unfinished.
    """
    host_copy: HostCopy | None = None
    """Host memory for a copy of the state, so that training can continue while files are written.

    None if saves are synchronous.
    """
    in_flight: Save | None = None
    """The save in progress, if any. All ranks have the same save in progress."""
    saved_step: int = 0
    """Step of the newest complete checkpoint. Until the first save, this is the step that the run was resumed from, or
    at which the current stage began."""
    all_written: bool = True
    """True if all ranks had written their files at their last agreement (`agree` in training/step.py)."""
    num_failed: int = 0
    """Number of saves that have failed in a row."""

    def __post_init__(self) -> None:
        if self.settings.asynchronous:
            self.host_copy = HostCopy()
        if self.settings.copy_command and self.uploads is None and comm.rank() == 0:
            self.uploads = Uploads(self.settings.copy_command, self.folder)
        # A killed run may have left an incomplete checkpoint of a step that this run saves too.
        self._remove_old(keep_last=None)

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread is working on a save."""
        return self.in_flight is not None and not self.in_flight.job.done()

    def save(self, step: int, last: bool) -> None:
        """Start to save a checkpoint in the background. Collective.

        If a save fails (for example because the disk is full), training continues and the next due
        save tries again. If this step has already been saved, do nothing.

        Args:
            step: Number of completed steps.
            last: Whether the stage or the run ends here. If so, wait until the checkpoint is complete.

        Raises:
            comm.AgreedError: If the last save of the run fails, or too many saves in a row have failed.
        """
        with self._waiting(step):
            self._finish()  # the previous save, if it is still in progress
            if step == self.saved_step:
                return
            try:
                self.in_flight = checkpoint.start_save(
                    self.folder, self.engine, self.read_state(step), self.host_copy
                )
            except comm.AgreedError as error:
                self._note_failure(step, last, error)
            if last or self.host_copy is None:
                self._finish(last)

    def poll(self, step: int) -> None:
        """Advance the uploads and the save in progress. Collective.

        Args:
            step: Number of completed steps.

        Raises:
            comm.AgreedError: If too many saves have failed in a row.
        """
        if self.uploads:
            self.uploads.advance()
        if self.in_flight and self.all_written:
            with self._waiting(step):
                self._advance()

    def save_before_error(self, step: int) -> str:
        """Save the progress made before a failed step, unless it is already saved. Collective.

        Args:
            step: Number of completed steps.

        Returns:
            A clause for the error message that reports whether the progress was saved.
        """
        try:
            self.save(step, last=True)
        except comm.AgreedError as error:
            return f"step {step:,} could not be saved: {error}"
        if step == 0:
            return "no step was completed"
        return f"a checkpoint was saved after step {step:,}; --resume latest resumes from there"

    def end(self, step: int) -> None:
        """Complete the save in progress, then wait for the uploads up to a time limit. Collective.

        Failures are only logged, because the run ends anyway.
        """
        try:
            with self._waiting(step):
                self._finish()
        except comm.AgreedError as error:
            if comm.rank() == 0:
                logger.warning("the save in progress failed: %s", error)
        if self.settings.copy_command:
            self.heartbeat.mark(step, "waiting for uploads")
            wait = self.uploads.wait if self.uploads else lambda seconds: None
            jobs.run("uploading checkpoints", lambda: wait(self.heartbeat.timeout_s))

    def close(self) -> None:
        """Kill a running upload. Wait up to 10 seconds for a save in progress."""
        if self.uploads:
            self.uploads.close()
        if self.in_flight is not None:
            futures.wait([self.in_flight.job], 10.0)

    @contextmanager
    def _waiting(self, step: int) -> Iterator[None]:
        """Record the duration of the block as time waited for a save, and mark it as "saving" for the heartbeat."""
        start = time.monotonic()
        self.heartbeat.mark(step, "saving")
        yield
        self.add_wait(time.monotonic() - start)

    def _finish(self, last: bool = False) -> None:
        """Wait until the save in progress, if any, is complete or has failed. Collective.

        Args:
            last: Whether to raise the error of a failed save.
        """
        while self.in_flight:
            jobs.wait_for_all(self.in_flight.job, f"saving {self.in_flight.final}")
            self._advance(last)

    def _advance(self, last: bool = False) -> None:
        """Advance the save in progress. Collective.

        The first call makes the ranks exchange checksums. The second call records that the checkpoint is complete.

        If the save has failed, remove the oldest checkpoint to make room, and write the same state again. If no
        checkpoint can be removed, count the save as failed.

        Args:
            last: Whether to raise the error of a failed save, because no later save can make up for it.
        """
        save = self.in_flight
        assert save is not None
        try:
            is_complete = save.advance(tidy=self._removal(self.settings.keep_last))
        except comm.AgreedError as error:
            # Remove the oldest checkpoint to make room, unless it is the only one.
            keep_last = self.settings.keep_last
            if self._remove_old(keep_last and max(keep_last - 1, 1)):
                # Although training has continued, host memory still contains the state to save.
                save.start()
                return
            self.in_flight = None
            self._note_failure(save.meta["step"], last, error)
            return
        if not is_complete:
            return
        self.in_flight = None
        self.num_failed = 0
        self.saved_step = save.meta["step"]
        if self.uploads:
            self.uploads.add(save.final)

    def _note_failure(self, step: int, last: bool, error: comm.AgreedError) -> None:
        """Count a failed save and remove its files. Raise `error` if this was the last save or too many have failed."""
        self.num_failed += 1
        self._remove_old(self.settings.keep_last)
        if last or self.num_failed > MAX_FAILED_SAVES:
            raise error
        if comm.rank() == 0:
            logger.warning(
                "step %d is not saved: %s; training continues and the next save tries again",
                step,
                error,
            )

    def _remove_old(self, keep_last: int | None) -> int:
        """Remove old checkpoints and the files of failed saves. Files that cannot be removed are logged. Collective.

        Args:
            keep_last: Number of newest checkpoints to keep; None means all.

        Returns:
            Number of removed checkpoints.
        """
        remove = self._removal(keep_last) if comm.rank() == 0 else lambda: 0
        return comm.broadcast(jobs.run("removing old checkpoints", remove))

    def _removal(self, keep_last: int | None) -> Callable[[], int]:
        """Return a function that removes old checkpoints, except those being written, uploaded or queued for upload."""
        busy = list(self.uploads.pending) if self.uploads else []
        if self.in_flight:
            busy.append(self.in_flight.partial)
        keep_every = self.settings.keep_every_steps
        return partial(retention.remove_checkpoints, self.folder, keep_last, keep_every, busy)
