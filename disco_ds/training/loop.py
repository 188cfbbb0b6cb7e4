"""The training loop: steps, records, checkpoints and evaluations, how the ranks agree to stop, and the end of a run.

What a run is made of is built in build.py. One step is in step.py. Only the command line calls this file.
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

from disco_ds.config import CheckpointSettings, Config, EvalSettings
from disco_ds.data import MicroBatch, StepData, augment
from disco_ds.distributed import comm
from disco_ds.distributed.interrupt import Interrupts
from disco_ds.eval import Accuracy, describe, evaluate_sets, record, tabulate
from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.figures import LogPoint
from disco_ds.metrics.report import REPORT, log_errors, save_examples, write_report
from disco_ds.metrics.run_folder import mark_finished
from disco_ds.metrics.run_log import say
from disco_ds.metrics.timers import Timer
from disco_ds.metrics.trouble import Trouble, features_spread
from disco_ds.training.build import Run
from disco_ds.training.engine import SpikeError, learning_rate, set_rates
from disco_ds.training.grad_accum import Rng
from disco_ds.training.saving import finish_save, save, save_before_stop
from disco_ds.training.step import StepOutput, train_step

logger = logging.getLogger(__name__)


class StopError(RuntimeError):
    """All ranks have agreed to stop."""


class DataStopError(StopError):
    """All ranks have agreed to stop because the data of one have failed; nothing was changed by that step."""


class AskedToStopError(RuntimeError):
    """A signal has asked the run to stop, and all ranks have saved."""


def train(run: Run) -> None:
    """Train from the run's first step to its last. Collective."""
    config, engine, num_steps = run.config, run.engine, run.config.num_steps
    engine.train()
    done, skipped_in_a_row = run.first_step, 0
    if 0 < done < num_steps and is_due(run, done, config.eval):
        evaluate(run, done)  # an evaluation comes after the checkpoint of its step, so this run may not have it yet
    while done < num_steps:
        data = run.loader.read_step()
        lr = learning_rate(done, num_steps, config.peak_lr, config.optim)
        logged = (done + 1) % config.log.every_steps == 0 or done + 1 == num_steps
        run.loss.accuracy = logged
        before = Rng()
        try:
            out = train_step(
                engine,
                run.loss,
                data.micro_batches,
                prepare(config),
                config.model.max_scale,
                agree=partial(agree, done, data, run.interrupts, run.trouble),
                set_rates=partial(set_rates, engine, lr, config.optim),
                timer=mark_phases(run, done, run.metrics.phases.timer(sampled=logged)),
            )
        except SpikeError:  # on every rank alike, with nothing changed; run.trouble has said why
            continue
        except FloatingPointError as error:  # on every rank alike, with nothing changed
            skipped_in_a_row += 1
            skip_batch(error, skipped_in_a_row, config.skip_nonfinite)
            continue
        except DataStopError as error:
            before.restore()
            run.loader.drop_step()
            raise DataStopError(f"{error}; {save_before_stop(run, done)}") from None
        finally:
            run.metrics.add_wait(data.wait_s)
            run.metrics.name_broken(done, data.broken)
        if out.grad_norm is not None:  # else fp16's loss scaler has skipped the update, and the loss's state stays too
            run.loss.commit()
        done, skipped_in_a_row = done + 1, 0
        if logged:
            log(run, done, lr, out, data)
        if run.copies:
            run.copies.poll()
        if run.saving and run.interrupts.written:
            finish_save(run)
        if done == num_steps or run.interrupts.save or is_due(run, done, config.checkpoint):
            save(run, done, last=done == num_steps or run.interrupts.stop)
        if run.interrupts.stop and done < num_steps:
            raise AskedToStopError(f"asked to stop, saved after step {done:,}; --resume latest goes on from there")
        if done < num_steps and is_due(run, done, config.eval):  # `finish` evaluates after the last step
            evaluate(run, done)


def mark_phases(run: Run, step: int, timer: Timer) -> Timer:
    """Extend the timer of the step's phases: the heartbeat learns of each phase as it begins."""

    def begin(name: str) -> AbstractContextManager[Any]:
        # The first step compiles, and takes as long as that takes.
        run.heart.mark(step, name.removeprefix("step/"), timed=step > run.first_step)
        return timer(name)

    return begin


def is_due(run: Run, done: int, settings: CheckpointSettings | EvalSettings) -> bool:
    """Return True if a checkpoint, or an evaluation, comes after this step: one of every_steps, or every_epochs."""
    if settings.every_epochs:
        epochs = (run.config.global_batch * step / run.loader.num_samples for step in (done - 1, done))
        before, now = (epoch // settings.every_epochs for epoch in epochs)
        return before < now
    return bool(settings.every_steps) and done % settings.every_steps == 0


def agree(
    step: int, data: StepData, interrupts: Interrupts, trouble: Trouble, embeddings: Embeddings, out: LossOutput
) -> None:
    """Go on together or stop together, before anything is changed. Collective, one all_reduce.

    The ranks also agree on requests to save or to stop, which are served after the step.

    Raises: StopError for a data error, or ranks that are at different steps; FloatingPointError for a loss that is not
            finite. Both name the step and the ranks. SpikeError for a loss to be skipped.
    """
    loss, failed = out.loss, float(data.error is not None)
    flags = torch.tensor([0.0, failed, *interrupts.requests, step, -step, 0.0], dtype=torch.float64)
    # CUDA copies so few bytes without waiting; flags that were made on the device would have to be waited for.
    flags = flags.to(loss.device, non_blocking=True)
    flags[0] = ~torch.isfinite(loss.detach())
    flags[-1] = out.metrics["loss"]
    not_finite, has_error, save, stop, writing, last, first, global_loss = comm.all_reduce_max(flags).tolist()
    # The maxima of step and -step give the last and the first step that any rank is at.
    if last != -first:  # a rank has left out a collective, so the others' were matched with its later ones
        places = comm.gather_objects(f"rank {comm.rank()} on {socket.gethostname()}: step {step}")
        raise StopError(f"the ranks are not at one step, so what they trained is not one model: {'; '.join(places)}")
    interrupts.agree(bool(save), bool(stop), bool(writing))
    if not (has_error or not_finite):
        if trouble.spikes("loss", step + 1, global_loss):
            raise SpikeError
        return
    finite = all(bool(torch.isfinite(side).all()) for side in (embeddings.image, embeddings.text))
    reports = comm.gather_objects((data.error, loss.item(), finite))
    if has_error:
        errors = {rank: error for rank, (error, *_) in enumerate(reports) if error is not None}
        first_error = next(iter(errors.values()))
        raise DataStopError(f"step {step}: data failed on rank {', '.join(map(str, errors))}: {first_error}")
    # A NaN in one rank's features makes every rank's loss NaN, so the features say more than the losses.
    culprits = [str(rank) for rank, (*_, fine) in enumerate(reports) if not fine]
    ranks = [str(rank) for rank, (_, value, _) in enumerate(reports) if not math.isfinite(value)]
    where = f"features of rank {', '.join(culprits)}" if culprits else f"loss of rank {', '.join(ranks)}"
    raise FloatingPointError(f"step {step}: the loss is not finite, from the {where}; nothing was updated")


def skip_batch(error: FloatingPointError, in_a_row: int, at_most: int) -> None:
    """Log that a batch is skipped; the step is done with the next one. Raises: `error`, after too many in a row."""
    if in_a_row > at_most:
        raise error
    if comm.rank() == 0:
        logger.warning("%s; the batch is skipped (%d in a row, at most %d)", error, in_a_row, at_most)


def log(run: Run, done: int, lr: float, out: StepOutput, data: StepData) -> None:
    """Write the record of a step. Collective. What is in it is chosen in metrics/figures.py."""
    now = LogPoint(
        step=done,
        metrics=out.metrics | features_spread(*out.features),
        scale=out.scale,
        bias=out.bias,
        lr=lr,
        grad_norm=out.grad_norm,
        index=torch.cat(data.index),
        broken=run.loader.broken,
        skipped=run.loader.state_dict()["steps"] - done,
        model=run.engine.module,
    )
    run.trouble.look(run.metrics.log(now))


def prepare(config: Config) -> Callable[[MicroBatch], tuple[Tensor, Tensor, Tensor]]:
    """The function that turns a micro-batch into step.py's inputs; equal at each pass, for the augmentation is keyed by
    (seed, epoch, id)."""

    def augmented(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        view = partial(augment, batch.image, batch.epoch, batch.index, config.seed, config.data.augment)
        return view(), view(view=1) if config.model.two_views else batch.text, batch.index

    return augmented


def finish(run: Run) -> None:
    """Evaluate, mark the run as finished, draw its report and print where its results are. Collective."""
    config = run.config
    values = evaluate(run, config.num_steps)
    run.heart.mark(config.num_steps, "ending")
    reached: dict[str, object] = {"steps": config.num_steps, **values}
    comm.from_rank_0("marking the run as finished", partial(mark_finished, run.folder, reached))
    if comm.rank() == 0:
        with log_errors("report.png was not drawn"):
            monitor = run.engine.monitor.tb_monitor
            picture = write_report(run.folder, monitor.summary_writer if monitor else None)
            if wandb := run.engine.monitor.wandb_monitor:
                wandb.write_report(config.num_steps * config.global_batch, picture)
        tensorboard = Path(sys.executable).with_name("tensorboard")
        command = shlex.join(
            [str(tensorboard) if tensorboard.exists() else "tensorboard", "--logdir", str(run.folder.parent)]
        )
        say(f"run folder: {run.folder}\npictures: {run.folder / REPORT}\ncurves: {command}")


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate on all sets, and record and return the results. Collective. The training is not affected."""
    run.heart.mark(step, "evaluating")
    start = time.monotonic()
    results = evaluate_sets(run.engine, run.sets, run.image, run.tokenizer, run.config.micro_batch)
    values = record(results)
    run.metrics.note(step, values)
    run.metrics.skip(time.monotonic() - start)
    if comm.rank() == 0 and results:
        epoch = step * run.config.global_batch / run.loader.num_samples
        say(f"step {step:,}, epoch {epoch:.2f}:\n{describe(results)}")
        with log_errors("the images for report.png were not kept"):
            shown = [result for result in results if isinstance(result, Accuracy)]
            if shown:
                save_examples(run.folder, shown[0].name, shown[0].examples)
        if wandb := run.engine.monitor.wandb_monitor:
            examples = [example for result in results if isinstance(result, Accuracy) for example in result.examples]
            wandb.write_results(step * run.config.global_batch, tabulate(results), examples)
    return values
