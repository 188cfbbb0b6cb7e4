"""Train a recipe: `deepspeed --module disco_ds.train --config NAME [key=value ...]`, or under torchrun, or alone.

The loop, how ranks agree to stop, and the end. What a run is made of is in build.py, the step in step.py.
"""

from __future__ import annotations

import logging
import math
import shlex
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.config import Config
from disco_ds.data import MicroBatch, StepData, augment
from disco_ds.distributed import comm
from disco_ds.distributed.interrupt import Interrupts
from disco_ds.eval import Accuracy, describe, evaluate_sets, record
from disco_ds.losses import Embeddings
from disco_ds.metrics.figures import LogPoint
from disco_ds.metrics.report import REPORT, save_examples, told_only, write_report
from disco_ds.metrics.run_folder import mark_finished
from disco_ds.metrics.timers import Timer
from disco_ds.training import checkpoint, retention
from disco_ds.training.build import Run
from disco_ds.training.engine import learning_rate, set_rates
from disco_ds.training.step import StepOutput, train_step

COPY_POLL_S = 5.0
logger = logging.getLogger(__name__)


class StopError(RuntimeError):
    """All ranks have agreed to stop."""


class AskedToStopError(RuntimeError):
    """A signal has come, and all ranks have saved."""


def train(run: Run) -> None:
    """The loop. Collective."""
    config, engine, num_steps = run.config, run.engine, run.config.num_steps
    engine.train()
    done, in_a_row = run.first_step, 0
    if done and is_due(done, config.eval.every_steps, num_steps):
        evaluate(run, done)  # it came after the checkpoint
    while done < num_steps:
        data = run.loader.read_step()
        lr = learning_rate(done, num_steps, config.peak_lr, config.optim)
        logged = (done + 1) % config.log.every_steps == 0 or done + 1 == num_steps
        run.loss.accuracy = logged
        try:
            out = train_step(
                engine,
                run.loss,
                data.micro_batches,
                prepare(config),
                config.model.max_scale,
                agree=partial(agree, done, data, run.interrupts),
                set_rates=partial(set_rates, engine, lr, config.optim),
                timer=mark_phases(run, done, run.metrics.phases.timer(sampled=logged)),
            )
        except FloatingPointError as error:  # on every rank alike
            in_a_row += 1
            pass_over(error, in_a_row, config.skip_nonfinite)
            continue
        finally:
            run.metrics.add_wait(data.wait_s)
            run.metrics.name_broken(done, data.broken)
        if out.grad_norm is not None:  # else a loss scaler has skipped the step
            run.loss.commit()
        done, in_a_row = done + 1, 0
        if logged:
            log(run, done, lr, out, data)
        every = config.checkpoint.every_steps
        if done == num_steps or run.interrupts.save or (every and done % every == 0):
            save(run, done, last=done == num_steps or run.interrupts.stop)
        if run.interrupts.stop and done < num_steps:
            raise AskedToStopError(f"asked to stop, saved after step {done:,}; --resume latest goes on from there")
        if is_due(done, config.eval.every_steps, num_steps):
            evaluate(run, done)


def mark_phases(run: Run, step: int, timer: Timer) -> Timer:
    """The timer, which now tells the heartbeat too which phase of the step begins. The first step compiles."""

    def begin(name: str) -> AbstractContextManager[Any]:
        run.heart.mark(step, name.removeprefix("step/"), timed=step > run.first_step)
        return timer(name)

    return begin


def is_due(done: int, every_steps: int, num_steps: int) -> bool:
    """Whether an evaluation comes after this step; the last one is finish's."""
    return bool(every_steps) and done % every_steps == 0 and done < num_steps


def agree(step: int, data: StepData, interrupts: Interrupts, embeddings: Embeddings, loss: Tensor) -> None:
    """Go on together or stop together, before anything is changed. Collective, one all_reduce.

    What `interrupts` wish for is agreed on too, and done after the step.

    Raises: StopError for a data error, or ranks that are not at one step; FloatingPointError for a loss that is not
            finite. Both name step and ranks.
    """
    flags = torch.tensor([0.0, float(data.error is not None), *interrupts.wishes, step, -step], dtype=torch.float64)
    # So few bytes CUDA takes over at once; made on the device, they would be waited for.
    flags = flags.to(loss.device, non_blocking=True)
    flags[0] = ~torch.isfinite(loss.detach())
    not_finite, has_error, save, stop, last, first = comm.all_reduce_max(flags).tolist()
    if last != -first:  # a rank has left out collectives, and others' have taken their place
        places = comm.gather_objects(f"rank {comm.rank()} on {socket.gethostname()}: step {step}")
        raise StopError(f"the ranks are not at one step, so what they trained is not one model: {'; '.join(places)}")
    interrupts.agree(bool(save), bool(stop))
    if not (has_error or not_finite):
        return
    finite = all(bool(torch.isfinite(side).all()) for side in (embeddings.image, embeddings.text))
    reports = comm.gather_objects((data.error, loss.item(), finite))
    if has_error:
        told = {rank: error for rank, (error, *_) in enumerate(reports) if error is not None}
        raise StopError(f"step {step}: data failed on rank {', '.join(map(str, told))}: {next(iter(told.values()))}")
    # One rank's NaN in the features is in every rank's loss.
    culprits = [str(rank) for rank, (*_, fine) in enumerate(reports) if not fine]
    ranks = [str(rank) for rank, (_, value, _) in enumerate(reports) if not math.isfinite(value)]
    where = f"features of rank {', '.join(culprits)}" if culprits else f"loss of rank {', '.join(ranks)}"
    raise FloatingPointError(f"step {step}: the loss is not finite, from the {where}; nothing was updated")


def pass_over(error: FloatingPointError, in_a_row: int, at_most: int) -> None:
    """Tell of a batch that had no effect; the step is done with the next one. Raises: error, where that is too many."""
    if in_a_row > at_most:
        raise error
    if comm.rank() == 0:
        logger.warning("%s; going on with the next batch (%d in a row, at most %d)", error, in_a_row, at_most)


def log(run: Run, done: int, lr: float, out: StepOutput, data: StepData) -> None:
    """Write the record of a step. Collective. What is in it is chosen in metrics/figures.py."""
    now = LogPoint(
        step=done,
        metrics=out.metrics,
        scale=out.scale,
        lr=lr,
        grad_norm=out.grad_norm,
        index=torch.cat(data.index),
        broken=run.loader.broken,
        skipped=run.loader.state_dict()["steps"] - done,
        model=run.engine.module,
    )
    run.metrics.log(now)


def prepare(config: Config) -> Callable[[MicroBatch], tuple[Tensor, Tensor, Tensor]]:
    """What step.py calls once per pass: augmented by (seed, epoch, id), so equal each time."""

    def augmented(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        view = partial(augment, batch.image, batch.epoch, batch.index, config.seed, config.data.augment)
        return view(), view(view=1) if config.model.two_views else batch.text, batch.index

    return augmented


def save(run: Run, step: int, last: bool) -> None:
    """Write a checkpoint, then remove old ones. Collective.

    A save that fails is told, and tried again when the next one is due: a full disk is no reason to stop at once.

    Raises: comm.AgreedError for the last save of the run, or too many failed in a row.
    """
    run.heart.mark(step, "saving")
    run.interrupts.saved()
    settings = run.config.checkpoint
    try:
        path = write_checkpoint(run, step)
    except comm.AgreedError as error:
        run.failed_saves += 1
        remove_old(run, settings.keep_last)
        if last or run.failed_saves > settings.max_failed:
            raise
        if comm.rank() == 0:
            logger.warning("step %d is not saved: %s; the run goes on and tries again at the next save", step, error)
        return
    run.failed_saves = 0
    if run.copies:
        run.copies.start(path)
    remove_old(run, settings.keep_last)


def write_checkpoint(run: Run, step: int) -> Path:
    """Write it; where that fails, make room by what it would have made superfluous, and try again. Collective."""
    meta = {"step": step, "num_steps": run.config.num_steps, "identity": run.identity}
    meta["shape"] = checkpoint.shape(run.config, comm.size())
    while True:
        try:
            return checkpoint.save(run.folder, meta, run.engine, run.loader.state_dict(), run.loss.state_dict())
        except comm.AgreedError:
            if not remove_old(run, max(run.config.checkpoint.keep_last - 1, 1)):
                raise


def remove_old(run: Run, keep_last: int) -> int:
    """Remove all but the last checkpoints, and what a failed save has left; what cannot be removed is a warning.

    Returns: how many. Collective.
    """
    removed = 0
    with comm.all_or_none("removing old checkpoints"):
        if comm.rank() == 0:
            busy = run.copies.busy if run.copies else ()
            removed = retention.remove_old(run.folder, keep_last, run.config.checkpoint.keep_every_steps, busy)
    return comm.broadcast(removed)


def wait_for_copies(run: Run) -> None:
    """Until the user's command has copied the last checkpoint, within its time. Collective."""
    run.heart.mark(run.heart.place.step, "waiting for copies")
    settings = run.config.checkpoint
    end = time.monotonic() + settings.copy_timeout_s
    while settings.copy_command:
        left = end - time.monotonic()
        waits = bool(run.copies and left > 0 and run.copies.wait(min(left, COPY_POLL_S)))
        if not comm.broadcast(waits):  # the others wait here a little at a time, however long it takes
            return


def finish(run: Run) -> None:
    """Evaluate, and say what came of it. Collective."""
    config = run.config
    values = evaluate(run, config.num_steps)
    run.heart.mark(config.num_steps, "ending")
    if comm.rank() == 0:
        mark_finished(run.folder, {"steps": config.num_steps, **values})
        with told_only("report.png was not drawn"):
            monitor = run.engine.monitor.tb_monitor
            write_report(run.folder, monitor.summary_writer if monitor else None)
        tensorboard = Path(sys.executable).with_name("tensorboard")
        command = shlex.join(
            [str(tensorboard) if tensorboard.exists() else "tensorboard", "--logdir", str(run.folder.parent)]
        )
        print(f"run folder: {run.folder}\npictures: {run.folder / REPORT}\ncurves: {command}", flush=True)


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate on all sets and note the figures, which are returned. Collective; the run goes on as if it had not."""
    run.heart.mark(step, "evaluating")
    start = time.monotonic()
    results = evaluate_sets(run.engine, run.sets, run.image, run.tokenizer, run.config.micro_batch)
    values = record(results)
    run.metrics.note(step, values)
    run.metrics.skip(time.monotonic() - start)
    if comm.rank() == 0 and results:
        print(describe(results), flush=True)
        with told_only("the images for report.png were not kept"):
            shown = [result for result in results if isinstance(result, Accuracy)]
            if shown:
                save_examples(run.folder, shown[0].name, shown[0].examples)
    return values
