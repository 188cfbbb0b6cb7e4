"""The training loop: run steps, log, save and evaluate, and finish the run.

build.py builds the run, and step.py computes one step. run.py calls `train` and `finish`, both for
Python programs and for the command line.
"""

from __future__ import annotations

import logging
import math
import shlex
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disco_ds.config import CheckpointSettings, Config, EvalSettings
from disco_ds.config.schedule import Schedule
from disco_ds.data import MicroBatch, StepData, augment
from disco_ds.distributed import comm
from disco_ds.distributed.interrupt import Interrupts
from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.anomalies import (
    EQUAL_TEXTS,
    MAX_EQUAL_TEXTS,
    AnomalyDetector,
    features_spread,
    share_of_equal_texts,
)
from disco_ds.metrics.report import REPORT, log_errors, write_report
from disco_ds.metrics.step_metrics import LogPoint
from disco_ds.metrics.timers import Timer
from disco_ds.models.clip import Texts
from disco_ds.runs.run_folder import mark_finished
from disco_ds.runs.run_log import say
from disco_ds.training.build import Run
from disco_ds.training.ema import update_average
from disco_ds.training.engine import SpikeError, learning_rate, set_rates
from disco_ds.training.evaluation import evaluate
from disco_ds.training.grad_accum import Rng
from disco_ds.training.step import StepOutput, train_step

logger = logging.getLogger(__name__)


class StopError(RuntimeError):
    """All ranks have agreed to stop."""


class DataStopError(StopError):
    """All ranks have agreed to stop because a rank could not read its data. The failed step changed nothing."""


class AskedToStopError(RuntimeError):
    """A signal requested the run to stop, and all ranks have saved a checkpoint."""


def train(run: Run) -> None:
    """Train from the step at which the run starts or resumes to the last step of the current stage. Collective.

    Raises:
        StopError: If data cannot be read, or the ranks are at different steps.
        FloatingPointError: If the loss or the gradient is not finite in too many batches in a row.
        AskedToStopError: If a signal requested a stop. A checkpoint has been saved by then.
        comm.AgreedError: If an evaluation fails, the last save fails, or too many saves in a row fail.
    """
    run.engine.train()
    step = run.schedule.first_step
    last_step, num_steps = run.schedule.last_step, run.schedule.num_steps
    # A step is evaluated after its checkpoint is saved. If the run stopped in between, or a stage ended
    # there, the step that this run resumes from has not been evaluated yet.
    if 0 < step < num_steps and is_due(run, step, run.config.eval):
        evaluate(run, step)
    while step < last_step:
        is_logged = (step + 1) % run.config.log.every_steps == 0 or step + 1 == last_step
        data = run.loader.read_step()
        output = run_step(run, step, data, is_logged)
        if output is not None:
            step += 1
            if is_logged:
                log(run, step, output, data)
            run.saver.poll(step, run.interrupts.written)
        trained = output is not None
        if (
            step == last_step
            or run.interrupts.save
            or (trained and is_due(run, step, run.config.checkpoint))
        ):
            save(run, step)
        if run.interrupts.stop and step < num_steps:
            raise AskedToStopError(f"asked to stop: {run.saver.save_before_error(step)}")
        # The batch may have been skipped. The next batch then takes its place.
        if trained and step < last_step and is_due(run, step, run.config.eval):
            try:
                evaluate(run, step)  # the next stage, or `finish`, evaluates after the last step
            except comm.AgreedError as error:
                raise comm.AgreedError(f"{error}; {run.saver.save_before_error(step)}") from None


def run_step(run: Run, step: int, data: StepData, is_logged: bool) -> StepOutput | None:
    """Train one step, and handle its errors. Collective.

    All errors are raised on every rank, before the model or the optimizer has changed.

    Args:
        run: The run.
        step: Number of completed steps.
        data: This rank's micro-batches.
        is_logged: Whether the step's metrics are logged. If False, no accuracies are computed.

    Returns:
        The output of the step, or None if its batch was skipped.

    Raises:
        DataStopError: If a rank could not read its data. The message says whether progress was saved.
        FloatingPointError: If the loss or the gradient was not finite in more than
            config.skip_nonfinite batches in a row, or if fp16 skips all updates. The message says whether progress was
            saved.
    """
    config = run.config
    run.loss.accuracy = is_logged
    rate = find_rate(run, step)
    generators = Rng()

    texts: list[Tensor] = []  # of the first step only

    def prepare_and_keep(batch: MicroBatch) -> tuple[Any, ...]:
        if step == 0:
            texts.append(batch.text.clone())  # the loader may reuse the buffer
        return prepare(config, batch)

    def agree_and_set_rates(embeddings: Embeddings, out: LossOutput) -> None:
        equal = None
        if texts:
            equal = share_of_equal_texts(torch.cat(texts), embeddings.text.detach())
        agree(step, data, run.interrupts, run.anomalies, embeddings, out, equal)
        set_rates(run.engine, rate, config.optim, embeddings.scale)

    try:
        output = train_step(
            run.engine,
            run.loss,
            data.micro_batches,
            prepare_and_keep,
            config.model.max_scale,
            agree_and_set_rates,
            run.anomalies.check_norm,
            mark_phases(run, step, run.metrics.phases.timer(sampled=is_logged)),
        )
    except SpikeError:  # run.anomalies has logged it
        return None
    except FloatingPointError as error:
        run.skipped_in_a_row += 1
        if run.skipped_in_a_row > config.skip_nonfinite:
            raise FloatingPointError(f"{error}; {save_without(run, step, generators)}") from None
        if comm.rank() == 0:
            logger.warning(
                "%s; the batch is skipped (%d in a row, skip_nonfinite=%d)",
                error,
                run.skipped_in_a_row,
                config.skip_nonfinite,
            )
        return None
    except DataStopError as error:
        raise DataStopError(f"{error}; {save_without(run, step, generators)}") from None
    finally:
        run.metrics.add_wait(data.wait_s)
        run.metrics.name_broken(step, data.broken + data.damaged)
    run.skipped_in_a_row = 0
    # If the fp16 loss scaler has skipped the update, the loss must not update its state either.
    if output.grad_norm is not None:
        run.overflows.clear()
        run.loss.commit()
        if config.optim.ema:
            update_average(run.engine, config.optim.ema)
    else:
        run.overflows.append(run.engine.optimizer.loss_scale)
        refuse_overflows(run.overflows, step + 1, run.schedule)
    return output


def refuse_overflows(scales: Sequence[float], step: int, schedule: Schedule) -> None:
    """Stop a run whose updates are all skipped because of fp16 overflow. It would finish without training anything.

    Args:
        scales: The loss scale after each of the latest consecutive steps whose updates were skipped.
        step: Number of completed steps.
        schedule: Length of the run.

    Raises:
        FloatingPointError: If enough consecutive steps were skipped to halve the loss scale to 1, or if this is the
            last step and this process has not updated anything.
    """
    most = math.log2(max(scales[0], 1)) + 1
    if len(scales) > most or step == schedule.last_step == schedule.first_step + len(scales):
        raise FloatingPointError(
            f"step {step}: the gradients of the last {len(scales)} steps in a row overflowed in fp16, at loss scales "
            f"down to {scales[-1]:g}, so these steps updated nothing; use bf16 or torch_autocast, or lower "
            "fp16.initial_scale_power and fp16.hysteresis"
        )


def save_without(run: Run, step: int, generators: Rng) -> str:
    """Save the progress made before a failed step. A resumed run reads the batch of that step again. Collective.

    Args:
        run: The run.
        step: Number of completed steps.
        generators: The random states from before the failed step.

    Returns:
        See Saver.save_before_error.
    """
    generators.restore()
    run.loader.drop_step()
    return run.saver.save_before_error(step)


def find_rate(run: Run, step: int) -> float:
    """Return the learning rate of the step with index `step`. It depends on the samples seen, not on the index."""
    batch = run.schedule.warmup_batch
    steps, num_steps = run.schedule.samples(step) / batch, run.schedule.num_samples / batch
    return learning_rate(steps, num_steps, run.config.peak_lr, run.config.optim)


def save(run: Run, step: int) -> None:
    """Save a checkpoint after this step, as described in Saver.save. Collective."""
    run.interrupts.saved()
    if run.interrupts.stop:
        run.heartbeat.stop_agreed()
    run.saver.save(step, last=step == run.schedule.last_step or run.interrupts.stop)


def mark_phases(run: Run, step: int, timer: Timer) -> Timer:
    """Wrap the timer of the step's phases so that the heartbeat also publishes each phase as it begins."""

    def begin(name: str) -> AbstractContextManager[Any]:
        # The first step has no time limit, because compiling the model may take a very long time.
        run.heartbeat.mark(step, name.removeprefix("step/"), timed=step > run.schedule.first_step)
        return timer(name)

    return begin


def is_due(run: Run, step: int, settings: CheckpointSettings | EvalSettings) -> bool:
    """Return whether `settings` (every_steps or every_epochs) require a save or an evaluation after this step."""
    if settings.every_epochs:
        # Use the decimal number that the user wrote, because floats such as 0.1 are not exact.
        every_samples = Fraction(str(settings.every_epochs)) * run.loader.epoch_samples
        before, now = (run.schedule.samples(done) // every_samples for done in (step - 1, step))
        return before < now
    return bool(settings.every_steps) and step % settings.every_steps == 0


def agree(
    step: int,
    data: StepData,
    interrupts: Interrupts,
    anomalies: AnomalyDetector,
    embeddings: Embeddings,
    out: LossOutput,
    equal_texts: Tensor | None = None,
) -> None:
    """Make all ranks continue or stop together, before the parameters are updated. Collective: one all_reduce.

    The ranks also agree on pending requests to save or to stop, which `train` handles after the step. `equal_texts` is
    what share_of_equal_texts returned on this rank; None if it was not called.

    Raises:
        StopError: If a rank could not read its data, if the ranks are at different steps, or if captions with different
            tokens have equal features.
        FloatingPointError: If the loss is not finite. The message names the step and the ranks at fault.
        SpikeError: If the batch must be skipped because its loss is a spike.
    """
    loss = out.loss
    has_error = float(data.error is not None)
    flags = torch.tensor(
        [0.0, has_error, *interrupts.requests, step, -step, 0.0, 0.0], dtype=torch.float64
    )
    # This does not make the host wait for the device: CUDA copies a few bytes asynchronously.
    flags = flags.to(loss.device, non_blocking=True)
    features = embeddings.image.detach().sum() + embeddings.text.detach().sum()
    flags[0] = ~torch.isfinite(loss.detach() + features)
    if equal_texts is not None:
        flags[-2] = equal_texts
    flags[-1] = out.metrics["loss"]
    agreed = comm.all_reduce_max(flags).tolist()
    not_finite, has_error, save, stop, writing, last, first, equal, global_loss = agreed
    # The maximum of `step` over ranks is the latest step, and the maximum of `-step` is minus the earliest.
    if last != -first:
        # A rank has skipped a collective, so its next collectives were matched with the wrong collectives
        # of other ranks.
        places = comm.gather_objects(f"rank {comm.rank()} on {socket.gethostname()}: step {step}")
        raise StopError(
            "the ranks are at different steps, so they have not trained the same model: "
            f"{'; '.join(places)}"
        )
    interrupts.agree(bool(save), bool(stop), bool(writing))
    if not (has_error or not_finite):
        if equal > MAX_EQUAL_TEXTS:
            raise StopError(f"{equal:.0%} {EQUAL_TEXTS} Nothing was updated")
        if anomalies.check_spike("loss", step + 1, global_loss):
            raise SpikeError
        return
    is_finite = all(bool(torch.isfinite(x).all()) for x in (embeddings.image, embeddings.text))
    reports = comm.gather_objects((data.error, loss.item(), is_finite))
    if has_error:
        errors = {rank: error for rank, (error, *_) in enumerate(reports) if error is not None}
        first_error = next(iter(errors.values()))
        raise DataStopError(
            f"step {step}: reading the data failed on {comm.join_ranks(errors)}: {first_error}"
        )
    # A NaN in the features of one rank makes the loss of every rank NaN, so check the features first.
    sources = [rank for rank, (*_, finite) in enumerate(reports) if not finite]
    cause = f", because the features of {comm.join_ranks(sources)} are not"
    if not sources:
        sources = [rank for rank, (_, x, _) in enumerate(reports) if not math.isfinite(x)]
        cause = f" on {comm.join_ranks(sources)}"
    raise FloatingPointError(f"step {step}: the loss is not finite{cause}; nothing was updated")


def log(run: Run, step: int, output: StepOutput, data: StepData) -> None:
    """Log the metrics of a step, and check them for anomalies. Collective."""
    point = LogPoint(
        step=step,
        metrics=output.metrics | features_spread(*output.features),
        scale=output.scale,
        bias=output.bias,
        lr=find_rate(run, step - 1),
        grad_norm=output.grad_norm,
        index=torch.cat(data.index),
        text_tokens=data.num_tokens / sum(map(len, data.index)) if data.num_tokens else None,
        broken=run.loader.broken,
        dropped=run.loader.dropped,
        skipped=run.loader.state_dict()["steps"] - step,
        model=run.engine.module,
    )
    run.anomalies.check_record(run.metrics.log(point))


def prepare(config: Config, batch: MicroBatch) -> tuple[Any, ...]:
    """Turn a micro-batch into (image, text or second view, sample ids[, group ids]).

    The augmentation depends only on (seed, epoch, sample id), so both forwards of a micro-batch get
    equal inputs.
    """
    view = partial(augment, batch.image, batch.epoch, batch.index, config.seed, config.data.augment)
    text = view(view=1) if config.model.two_views else Texts(batch.text, batch.lengths)
    inputs = view(), text, batch.index
    return (*inputs, batch.group_id) if config.data.group_by else inputs


def finish(run: Run) -> None:
    """Evaluate the model, mark the run as finished, draw the report and print where the results are. Collective."""
    num_steps, num_samples = run.schedule.num_steps, run.schedule.num_samples
    values = evaluate(run, num_steps)
    run.heartbeat.mark(num_steps, "ending")
    reached: dict[str, object] = {"steps": num_steps, "samples": num_samples, **values}
    comm.from_rank_0("marking the run as finished", partial(mark_finished, run.folder, reached))
    if comm.rank() != 0:
        return
    with log_errors("report.png was not drawn"):
        picture = write_report(run.folder)
        if run.wandb:
            run.wandb.write_report(num_samples, picture)
    command = shlex.join(["tensorboard", "--logdir", str(run.folder.parent)])
    say(f"run folder: {run.folder}\npictures: {run.folder / REPORT}\ncurves: {command}")
