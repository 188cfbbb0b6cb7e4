"""The training loop: run steps, log, save and evaluate, and finish the run.

build.py builds the run, and step.py computes one step. run.py calls `train` and `finish`, both for
Python programs and for the command line.
"""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch

from disco_ds.config import CheckpointSettings, EvalSettings
from disco_ds.config.schedule import Schedule
from disco_ds.data import StepData
from disco_ds.distributed import comm
from disco_ds.eval import Result, describe, evaluate_sets, record
from disco_ds.metrics.anomalies import features_spread
from disco_ds.metrics.report import REPORT, log_errors, save_examples, write_report
from disco_ds.metrics.step_metrics import LogPoint
from disco_ds.runs.run_folder import mark_finished
from disco_ds.runs.run_log import say
from disco_ds.training.build import Run
from disco_ds.training.ema import averaged, has_average
from disco_ds.training.engine import SpikeError
from disco_ds.training.step import DataStopError, StepOutput, run_step

logger = logging.getLogger(__name__)


class AskedToStopError(RuntimeError):
    """A signal requested the run to stop. The message says whether a checkpoint was saved."""


def train(run: Run) -> None:
    """Train from the step at which the run starts or resumes to the last step of the current stage. Collective.

    Raises:
        StopError: If data cannot be read, if the ranks are at different steps, or if captions with different tokens
            have equal features.
        FloatingPointError: If the loss or the gradient is not finite in too many batches in a row, or if fp16 skips
            all updates.
        AskedToStopError: If a signal requested a stop. The message says whether a checkpoint was saved.
        comm.AgreedError: If an evaluation fails, the last save fails, or too many saves in a row fail.
    """
    run.interrupts.listen()
    run.engine.train()
    step = run.schedule.first_step
    last_step, num_steps = run.schedule.last_step, run.schedule.num_steps
    # A step is evaluated after its checkpoint is saved. If the run stopped in between, or a stage ended
    # there, the step that this run resumes from has not been evaluated yet.
    if 0 < step < num_steps and is_due(run, step, run.config.eval):
        evaluate(run, step)
    while step < last_step:
        is_logged = (step + 1) % run.config.log.every_steps == 0 or step + 1 == last_step
        data = run.loader.start_step(keep_text=step == 0)
        output = try_step(run, step, data, is_logged)
        trained = output is not None
        if output is not None:
            step += 1
            if is_logged:
                log(run, step, output, data)
            run.saver.poll(step)
        if (
            step == last_step
            or run.interrupts.save
            or (trained and is_due(run, step, run.config.checkpoint))
        ):
            save(run, step)
        if run.interrupts.stop and step < num_steps:
            raise AskedToStopError(f"asked to stop: {run.saver.save_before_error(step)}")
        # If the batch was skipped, `step` has not changed, and the next batch is used for the same step.
        if trained and step < last_step and is_due(run, step, run.config.eval):
            try:
                evaluate(run, step)  # the next stage, or `finish`, evaluates after the last step
            except comm.AgreedError as error:
                raise comm.AgreedError(f"{error}; {run.saver.save_before_error(step)}") from None


def try_step(run: Run, step: int, data: StepData, is_logged: bool) -> StepOutput | None:
    """Train one step. Return None if its batch was skipped. Collective.

    Before an error is raised, the progress made so far is saved.

    Args:
        run: The run.
        step: Number of completed steps.
        data: What run.loader.start_step has returned.
        is_logged: Whether the step's metrics are logged.

    Raises:
        DataStopError: If a rank could not read its data. The message says whether progress was saved.
        FloatingPointError: If the loss or the gradient was not finite in more than
            config.skip_nonfinite batches in a row, or if fp16 skips all updates (refuse_overflows). The message says
            whether progress was saved.
    """
    most = run.config.skip_nonfinite
    try:
        output = run_step(run, step, data, is_logged)
    except SpikeError as error:
        if error.norm is not None:
            run.anomalies.check_spike("grad_norm", step + 1, error.norm)
        return None
    except FloatingPointError as error:
        run.skipped_in_a_row += 1
        if run.skipped_in_a_row > most:
            raise FloatingPointError(f"{error}; {save_without(run, step)}") from None
        if comm.rank() == 0:
            logger.warning(
                "%s; the batch is skipped (%d in a row, skip_nonfinite=%d)",
                error,
                run.skipped_in_a_row,
                most,
            )
        return None
    except DataStopError as error:
        raise DataStopError(f"{error}; {save_without(run, step)}") from None
    finally:
        run.metrics.add_wait(data.wait_s)
        run.metrics.name_broken(step, data.broken + data.damaged)
    run.skipped_in_a_row = 0
    if output.grad_norm is None:
        run.overflows.append(run.engine.optimizer.loss_scale)
        try:
            refuse_overflows(run.overflows, step + 1, run.schedule)
        except FloatingPointError as error:
            # Without an update since the start of this process, a new checkpoint would only replace an older one.
            if step + 1 == run.schedule.first_step + len(run.overflows):
                raise
            raise FloatingPointError(f"{error}; {save_without(run, step)}") from None
    else:
        run.overflows.clear()
        run.anomalies.check_spike("grad_norm", step + 1, output.grad_norm.item())
    return output


def refuse_overflows(scales: Sequence[float], step: int, schedule: Schedule) -> None:
    """Stop a run whose updates are all skipped because of fp16 overflow. It would finish without training anything.

    Args:
        scales: The loss scale after each step since the last applied update. All of these steps overflowed.
        step: Number of completed steps.
        schedule: Length of the run.

    Raises:
        FloatingPointError: In either of two cases: there were enough skipped steps in a row to halve the loss scale
            down to 1; or this is the last step and this process has not updated anything.
    """
    most = math.log2(max(scales[0], 1)) + 1
    if len(scales) > most or step == schedule.last_step == schedule.first_step + len(scales):
        raise FloatingPointError(
            f"step {step}: the gradients of the last {len(scales)} steps in a row overflowed in fp16, at loss scales "
            f"down to {scales[-1]:g}, so these steps updated nothing; use bf16 or torch_autocast, or lower "
            "fp16.initial_scale_power and fp16.hysteresis"
        )


def save_without(run: Run, step: int) -> str:
    """Save the progress made before a failed step. A resumed run reads the batch of that step again. Collective.

    Returns:
        A clause for the error message that reports whether the progress was saved.
    """
    run.loader.drop_step()
    return run.saver.save_before_error(step)


def save(run: Run, step: int) -> None:
    """Save a checkpoint after this step, in the background unless training ends here. Collective."""
    run.interrupts.saved()
    if run.interrupts.stop:
        run.heartbeat.stop_agreed()
    run.saver.save(step, last=step == run.schedule.last_step or run.interrupts.stop)


def is_due(run: Run, step: int, settings: CheckpointSettings | EvalSettings) -> bool:
    """Return whether `settings` (every_steps or every_epochs) require a save or an evaluation after this step."""
    if settings.every_epochs:
        # Use the decimal number that the user wrote, because floats such as 0.1 are not exact.
        every_samples = Fraction(str(settings.every_epochs)) * run.loader.epoch_samples
        before, now = (run.schedule.samples(done) // every_samples for done in (step - 1, step))
        return before < now
    return bool(settings.every_steps) and step % settings.every_steps == 0


def log(run: Run, step: int, output: StepOutput, data: StepData) -> None:
    """Log the metrics of a step, and check them for anomalies. Collective."""
    point = LogPoint(
        step=step,
        metrics=output.metrics | features_spread(*output.features),
        scale=output.scale,
        bias=output.bias,
        lr=run.learning_rate(step - 1),
        grad_norm=output.grad_norm,
        index=torch.cat(data.index),
        text_tokens=data.num_tokens / sum(map(len, data.index)) if data.num_tokens else None,
        broken=run.loader.broken,
        dropped=run.loader.dropped,
        skipped=run.loader.state_dict()["steps"] - step,
        model=run.engine.module,
    )
    run.anomalies.check_record(run.metrics.log(point))


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate the model on all evaluation sets, and log the results. Collective; training is not affected.

    With optim.ema, the average of the weights is evaluated too. Its results have names that end in _ema.

    Returns:
        The values that were written to metrics.jsonl, keyed by name.
    """
    run.heartbeat.mark(step, "evaluating")
    start = time.monotonic()
    arguments = run.engine, run.sets, run.image, run.tokenizer, run.config.micro_batch
    results = evaluate_sets(*arguments)
    if run.sets and has_average(run.engine):
        with averaged(run.engine):
            for result in evaluate_sets(*arguments):
                results.append(replace(result, name=f"{result.name}_ema"))
    values = record(results)
    run.metrics.write_values(step, values)
    run.metrics.skip(time.monotonic() - start)
    if comm.rank() == 0 and results:
        publish(run, step, results)
    return values


def publish(run: Run, step: int, results: list[Result]) -> None:
    """Write the results to the log and to W&B, and keep examples for report.png. Rank 0 only."""
    samples, epoch_samples = run.schedule.samples(step), run.loader.epoch_samples
    epoch = f", epoch {samples / epoch_samples:.2f}" if epoch_samples else ""
    say(f"step {step:,}{epoch}:\n{describe(results)}")
    classified = [result for result in results if result.examples]
    if classified:
        with log_errors("images for report.png were not saved"):
            save_examples(run.folder, classified[0].name, classified[0].examples)
        if run.wandb:
            examples = [example for result in classified for example in result.examples]
            run.wandb.write_examples(samples, examples)


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
