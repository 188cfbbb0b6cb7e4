"""The saves of a run: begun by the loop, written beside the training, completed together; then old ones are removed.

What a checkpoint holds is in checkpoint.py, how it is written in background_save.py, which stay in retention.py.
"""

from __future__ import annotations

import logging
import time

from disco_ds.distributed import comm
from disco_ds.training import checkpoint, retention
from disco_ds.training.build import Run

COPY_POLL_S = 5.0
logger = logging.getLogger(__name__)


def save(run: Run, step: int, last: bool) -> None:
    """Save a checkpoint, which is written beside the training unless it is the last one. Collective.

    After a failed save, as on a full disk, the run goes on and tries again when the next save is due.

    Raises: comm.AgreedError if the last save of the run fails, or too many in a row.
    """
    start = time.monotonic()
    run.heart.mark(step, "saving")
    run.interrupts.saved()
    if before := run.saving:  # one save at a time
        finish_save(run)
        if comm.rank() == 0:
            text = "step %d waited %.1f s until the save of step %d was written: save less often, or to a faster disk"
            logger.warning(text, step, time.monotonic() - start, before.step)
    try:
        run.saving = begin_save(run, step)
    except comm.AgreedError as error:
        note_failed(run, step, last, error)
    if last or run.host_copy is None:
        finish_save(run, last)
    run.metrics.add_save(time.monotonic() - start)


def begin_save(run: Run, step: int) -> checkpoint.Save:
    """Begin a checkpoint. Where that fails, remove the oldest one, which it replaces, and try again. Collective."""
    meta = {"step": step, "num_steps": run.config.num_steps, "identity": run.identity}
    meta["trouble"] = run.trouble.state_dict()
    meta["shape"] = checkpoint.shape(run.config, comm.size())
    while True:
        data, loss = run.loader.state_dict(), run.loss.state_dict()
        try:
            return checkpoint.begin_save(run.folder, meta, run.engine, data, loss, run.host_copy)
        except comm.AgreedError:
            if not remove_old(run, one_less(run.config.checkpoint.keep_last)):
                raise


def finish_save(run: Run, last: bool = False) -> None:
    """Wait for the save in flight, complete it, then remove old checkpoints. Collective.

    Where it has failed, remove the oldest one, which it replaces, and write the same state again.

    Raises: see save.
    """
    while saving := run.saving:
        try:
            path = saving.finish()
        except comm.AgreedError as error:
            if remove_old(run, one_less(run.config.checkpoint.keep_last)):
                # The copy on the host is still there, so the state is that of its step although training has gone on.
                saving.start()
                continue
            run.saving = None
            note_failed(run, saving.step, last, error)
            return
        run.saving, run.failed_saves, run.saved_step = None, 0, saving.step
        if run.copies:
            run.copies.start(path)
        remove_old(run, run.config.checkpoint.keep_last)


def note_failed(run: Run, step: int, last: bool, error: comm.AgreedError) -> None:
    """Count a failed save and remove what it has left. Collective. Raises: `error` if the run cannot go on."""
    settings = run.config.checkpoint
    run.failed_saves += 1
    remove_old(run, settings.keep_last)
    if last or run.failed_saves > settings.max_failed:
        raise error
    if comm.rank() == 0:
        logger.warning("step %d is not saved: %s; the run goes on and tries again at the next save", step, error)


def one_less(keep_last: int | None) -> int | None:
    """How many checkpoints to keep where the disk is full."""
    return None if keep_last is None else max(keep_last - 1, 1)


def remove_old(run: Run, keep_last: int | None) -> int:
    """Remove all but the last checkpoints, and the remains of failed saves. Failures are logged. Collective.

    Returns: how many checkpoints were removed.
    """

    def remove() -> int:
        busy = run.copies.busy if run.copies else []
        if run.saving:
            busy = [*busy, run.saving.partial]
        return retention.remove_old(run.folder, keep_last, run.config.checkpoint.keep_every_steps, busy)

    return comm.from_rank_0("removing old checkpoints", remove)


def end_save(run: Run) -> None:
    """Complete the save in flight of a run that all ranks have agreed to end; a failure is logged. Collective."""
    run.heart.mark(run.heart.place.step, "saving")
    try:
        finish_save(run)
    except comm.AgreedError as error:
        if comm.rank() == 0:
            logger.warning("the save in flight has failed: %s", error)


def wait_for_copies(run: Run) -> None:
    """Wait until the user's command has copied the last checkpoint, but no longer than its timeout. Collective."""
    run.heart.mark(run.heart.place.step, "waiting for copies")
    settings = run.config.checkpoint
    end = time.monotonic() + settings.copy_timeout_s
    while settings.copy_command:
        left = end - time.monotonic()
        waits = bool(run.copies and left > 0 and run.copies.wait(min(left, COPY_POLL_S)))
        if not comm.broadcast(waits):  # in short turns, because a broadcast that waits for too long would time out
            return


def save_before_stop(run: Run, done: int) -> str:
    """Save what the steps before a failed one have made, where that is not saved. Collective. Returns: what to say."""
    try:
        finish_save(run, last=True)
        if done > max(run.saved_step, run.first_step):
            save(run, done, last=True)
    except comm.AgreedError as error:
        return f"step {done:,} could not be saved: {error}"
    return f"saved after step {done:,}; --resume latest goes on from there" if done else "no step was done"
