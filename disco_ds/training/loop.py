"""The training loop: run steps, log, save and evaluate, and finish the run.

build.py builds the run, and step.py computes one step. run.py calls `train` and `finish`, both for
Python programs and for the command line.
"""

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from disco_ds.config import CheckpointSettings, EvalSettings, Schedule
from disco_ds.data import StepData
from disco_ds.distributed import comm
from disco_ds.eval import describe, evaluate_sets, record
from disco_ds.metrics.anomalies import features_spread
from disco_ds.metrics.report import REPORT, log_errors, save_examples, write_report
from disco_ds.runs.messages import say
from disco_ds.runs.run_folder import mark_finished
from disco_ds.training.build import Run
from disco_ds.training.optimizer import averaged, has_average
from disco_ds.training.step import Skipped, StepOutput, Stopped, run_step


def train(run: Run) -> None:
    """Train from the step at which the run starts or resumes to the last step of the current stage. Collective.

    Raises:
        comm.AgreedError: If data cannot be read, if the ranks are at different steps, if captions with different tokens
            have equal features, if the loss or the gradient is not finite in too many batches in a row, if fp16 skips
            all updates, if an evaluation or the last save fails, or if too many saves in a row fail.
        comm.AskedToStopError: If a signal requested a stop. The message says whether a checkpoint was saved.
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
        outcome = run_step(run, step, data, is_logged)
        run.metrics.add_wait(data.wait_s)
        run.metrics.name_broken(step, data.broken + data.damaged)
        if stopped := find_problem(run, step, outcome):
            problem = stopped.problem
            if stopped.is_sound:
                run.loader.drop_step()  # a resumed run reads this batch again
                problem = f"{problem}; {run.saver.save_before_error(step)}"
            raise comm.AgreedError(problem)
        # If the batch was skipped, `step` does not change, and the next batch is used for the same step.
        is_trained = False
        if isinstance(outcome, StepOutput):
            is_trained = True
            step += 1
            if is_logged:
                log(run, step, outcome, data)
            run.saver.poll(step)
        is_due_now = step == last_step or is_due(run, step, run.config.checkpoint)
        if run.interrupts.save or (is_trained and is_due_now):
            save(run, step)
        if run.interrupts.stop and step < num_steps:
            raise comm.AskedToStopError(f"asked to stop: {run.saver.save_before_error(step)}")
        # The next stage, or `finish`, evaluates after the last step.
        if is_trained and step < last_step and is_due(run, step, run.config.eval):
            try:
                evaluate(run, step)
            except comm.AgreedError as error:
                raise comm.AgreedError(f"{error}; {run.saver.save_before_error(step)}") from None


def find_problem(run: Run, step: int, outcome: StepOutput | Skipped | Stopped) -> Stopped | None:
    """Count the steps in a row without an update, and find out whether the run must stop.

    Args:
        run: The run.
        step: Number of steps that were completed before this one.
        outcome: What run_step has returned.

    Returns:
        Why the run stops, or None if it continues.
    """
    if isinstance(outcome, Stopped):
        return outcome
    if isinstance(outcome, Skipped):
        if outcome.problem is None:  # a spike
            return None
        run.skipped_in_a_row += 1
        limit = run.config.skip_nonfinite
        if run.skipped_in_a_row > limit:
            return Stopped(outcome.problem, is_sound=True)
        comm.warn(
            f"{outcome.problem}; the batch is skipped ({run.skipped_in_a_row} in a row, skip_nonfinite={limit})"
        )
        return None
    run.skipped_in_a_row = 0
    if outcome.grad_norm is not None:
        run.overflows.clear()
        return None
    run.overflows.append(run.engine.optimizer.loss_scale)
    problem = find_overflows(run.overflows, step + 1, run.schedule)
    # Without an update since the start of this process, a new checkpoint would only replace an older one.
    is_sound = step + 1 > run.schedule.first_step + len(run.overflows)
    return Stopped(problem, is_sound) if problem else None


def find_overflows(scales: Sequence[float], step: int, schedule: Schedule) -> str | None:
    """Find out whether fp16 overflow skips all updates, so that the run would finish without training anything.

    Args:
        scales: The loss scale after each step since the last applied update. All of these steps overflowed.
        step: Number of completed steps.
        schedule: Length of the run.

    Returns:
        An error message in either of two cases: there were enough skipped steps in a row to halve the loss scale
        down to 1; or this is the last step and this process has not updated anything. Otherwise None.
    """
    limit = math.log2(max(scales[0], 1)) + 1
    if len(scales) > limit or step == schedule.last_step == schedule.first_step + len(scales):
        return (
            f"step {step}: the gradients of the last {len(scales)} steps in a row overflowed in fp16, at loss scales "
            f"down to {scales[-1]:g}, so these steps updated nothing; use bf16 or torch_autocast, or lower "
            "fp16.initial_scale_power and fp16.hysteresis"
        )
    return None


def save(run: Run, step: int) -> None:
    """Save a checkpoint after this step, in the background unless training ends here. Collective."""
    run.interrupts.since = time.monotonic()
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
    index = torch.cat(data.index)
    metrics: dict[str, Any] = output.metrics | features_spread(*output.features)
    metrics |= {
        "scale": output.scale,
        "bias": output.bias,
        "lr": run.learning_rate(step - 1),
        # None if a loss scaler skipped the step; otherwise the norm before clipping.
        "grad_norm": output.grad_norm,
        # The mean per text. None if the text tower also processes padding.
        "text_tokens": data.num_tokens / len(index) if data.num_tokens else None,
        # Totals of the run so far. Samples are dropped by data.filter, data.uids or data.transforms.
        "broken_samples": run.loader.position.broken,
        "dropped_samples": run.loader.position.dropped,
        "skipped_batches": run.loader.position.steps - step,
    }
    run.anomalies.check_record(run.metrics.log(step, metrics, index))


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate the model on all evaluation sets, and log the results. Collective; training is not affected.

    With optim.ema, the average of the weights is evaluated too. Its results have names that end in _ema. Examples of
    the first set that has any are kept for report.png.

    Returns:
        The values that were written to metrics.jsonl, keyed by name.
    """
    run.heartbeat.mark(step, "evaluating")
    start = time.monotonic()
    results = evaluate_sets(run.encoder, run.sets)
    if run.sets and has_average(run.engine):
        with averaged(run.engine):
            for result in evaluate_sets(run.encoder, run.sets):
                results.append(replace(result, name=f"{result.name}_ema"))
    values = record(results)
    run.metrics.write_values(step, values)
    run.metrics.skip(time.monotonic() - start)
    if comm.rank() == 0 and results:
        samples, epoch_samples = run.schedule.samples(step), run.loader.epoch_samples
        epoch = f", epoch {samples / epoch_samples:.2f}" if epoch_samples else ""
        say(f"step {step:,}{epoch}:\n{describe(results)}")
        if classified := [result for result in results if result.examples]:
            with log_errors("images for report.png were not saved"):
                save_examples(run.folder, classified[0].name, classified[0].examples)
    return values


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
        write_report(run.folder)
    command = shlex.join(["tensorboard", "--logdir", str(run.folder.parent)])
    say(f"run folder: {run.folder}\npictures: {run.folder / REPORT}\ncurves: {command}")
