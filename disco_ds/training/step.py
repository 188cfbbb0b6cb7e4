"""One optimizer step of a run, from the micro-batches to the update.

The parts are in grad_accum.py (the features, the loss and its gradient) and engine.py (the towers and the update).
contrastive_step (custom_loop.py) is the same algorithm without a run.
"""

import socket
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from disco_ds.data import StepData
from disco_ds.distributed import comm, deepspeed_quirks
from disco_ds.losses import Embeddings, LossOutput
from disco_ds.metrics.anomalies import EQUAL_TEXTS, MAX_EQUAL_TEXTS, SAMPLE, share_of_equal_texts
from disco_ds.training.build import Run
from disco_ds.training.engine import NOT_FINITE, backward_and_step, clamp_scale, set_rates
from disco_ds.training.grad_accum import Snapshot, forward_all, loss_at_features, surrogates
from disco_ds.training.optimizer import update_average


class StepOutput(NamedTuple):
    """The results of a step."""

    metrics: dict[str, Tensor]
    """The metrics that the loss returned (LossOutput.metrics). Each value is 0-d and the same on every rank."""
    scale: Tensor
    """[1], the logit scale that the loss was computed with."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None if a loss scaler skipped the step."""
    features: tuple[Tensor, ...]
    """The first SAMPLE rows (metrics/anomalies.py) of this rank's image features and of its text features."""
    bias: Tensor | None = None
    """[1], the logit bias that the loss was computed with; None if the model has no bias."""


class Skipped(NamedTuple):
    """The batch cannot be used. The step has changed nothing. The same on every rank."""

    problem: str | None
    """What is not finite; None if the batch is skipped because its loss or gradient norm is a spike."""


class Stopped(NamedTuple):
    """The run cannot continue. The step has changed nothing. The same on every rank."""

    problem: str
    is_sound: bool = False
    """True if there is progress from before this step that the problem has not affected.

    A checkpoint of this progress is then saved before the run stops.
    """


def run_step(
    run: Run, step: int, data: StepData, is_logged: bool = False
) -> StepOutput | Skipped | Stopped:
    """Update the parameters once, using the gradient of the global batch. Collective: every rank must call this.

    Unless a StepOutput is returned, the model, the optimizer and the random generators are the same as before the step.
    This also holds after an error.

    Args:
        run: The run. Its loader reads the micro-batches.
        step: Number of completed steps.
        data: What run.loader.start_step has returned for this step.
        is_logged: Whether the phases are measured.

    Returns:
        What happened, the same on every rank.
    """
    engine, config = run.engine, run.config
    timer = run.metrics.phases.timer(sampled=is_logged)
    # The first step has no time limit, because compiling the model may take a very long time.
    begin = partial(run.heartbeat.mark, step, timed=step > run.schedule.first_step)
    before = Snapshot(engine.module)
    is_done = False
    try:
        begin("forward")
        with timer("step/forward"):
            micro_batches = run.loader.first_pass()
            features = forward_all(run.towers, micro_batches, engine.gradient_accumulation_steps())
        # The repeated forwards must change neither BatchNorm's statistics nor the random numbers of the next step.
        after = Snapshot(engine.module)
        if step == run.schedule.first_step and engine.gradient_accumulation_steps() > 1:
            before.warn_of_changed_buffers(engine.module)
        begin("loss")
        with timer("step/loss"):
            out, leaves = loss_at_features(run.loss, features)
        if problem := agree(run, step, data, leaves, out):
            return problem
        set_rates(engine, run.learning_rate(step), config.optim, leaves.scale)
        begin("backward and update")
        with timer("step/backward and update"):
            again = surrogates(run.towers, run.loader.second_pass(), features, leaves)
            update = backward_and_step(engine, again, run.anomalies.max_norm)
        if update.result == "spike":
            run.anomalies.check_spike("grad_norm", step + 1, update.norm.item())
            return Skipped(None)
        if update.result == "not finite":
            return Skipped(f"step {step}: {NOT_FINITE}")
        is_done = True
    finally:
        if not is_done:
            before.restore()
            deepspeed_quirks.forget_trace(engine)
    # If fp16's loss scaler has skipped the update, nothing else may change either.
    is_applied = update.result == "applied"
    (after if is_applied else before).restore()
    clamp_scale(engine, config.model.max_scale, leaves.scale.detach())
    output = StepOutput(
        metrics=out.metrics,
        scale=leaves.scale.detach(),
        grad_norm=update.norm if is_applied else None,
        # Clone the rows, so that the features of the whole batch can be freed before the next step.
        features=tuple(side.detach()[:SAMPLE].clone() for side in (leaves.image, leaves.text)),
        bias=leaves.bias,
    )
    if is_applied:
        run.loss.commit()
        if config.optim.ema:
            update_average(engine, config.optim.ema)
        # At ZeRO 3, item() waits for the device, so everything else is started first.
        run.anomalies.check_spike("grad_norm", step + 1, update.norm.item())
    return output


def agree(
    run: Run, step: int, data: StepData, embeddings: Embeddings, out: LossOutput
) -> Skipped | Stopped | None:
    """Decide on all ranks together whether the parameters may be updated. Collective: one all_reduce.

    The ranks also agree on pending requests to save or to stop, and on whether the save in progress, if any, can
    continue. `train` handles these after the step.

    Returns:
        None if the step can continue.
    """
    image, text = embeddings.image.detach(), embeddings.text.detach()
    is_finite = torch.isfinite(out.loss + image.sum() + text.sum())
    equal_texts: Tensor | float = 0.0
    # After an error, the rest of the batch consists of placeholders without texts.
    if data.text and data.error is None:
        equal_texts = share_of_equal_texts(torch.cat(data.text).to(text.device), text)
    worst = comm.largest_of(
        {
            "not_finite": ~is_finite,
            "data_error": data.error is not None,
            "last_step": step,
            "minus_first_step": -step,
            "save": run.interrupts.is_save_due,
            "stop": run.interrupts.is_stop_requested,
            "writing": not run.saver.job.done(),
            "equal_texts": equal_texts,
            "loss": out.metrics["loss"],
        }
    )
    if worst["last_step"] != -worst["minus_first_step"]:
        # A rank has skipped a collective, so its later ones were paired with the wrong ones of the other ranks.
        steps = comm.gather_objects(f"rank {comm.rank()} on {socket.gethostname()}: step {step}")
        return Stopped(
            f"the ranks are at different steps, so they have not trained the same model: {'; '.join(steps)}"
        )
    run.interrupts.stop = bool(worst["stop"])
    run.interrupts.save = run.interrupts.stop or bool(worst["save"])
    run.saver.are_jobs_done = not worst["writing"]
    if worst["data_error"]:
        return Stopped(describe_data_errors(step, data), is_sound=True)
    if worst["not_finite"]:
        return Skipped(describe_not_finite(step, embeddings, out))
    if worst["equal_texts"] > MAX_EQUAL_TEXTS:
        return Stopped(f"{worst['equal_texts']:.0%} {EQUAL_TEXTS} Nothing was updated")
    if run.anomalies.check_spike("loss", step + 1, worst["loss"]):
        return Skipped(None)
    return None


def describe_data_errors(step: int, data: StepData) -> str:
    """Return an error message with the first error in reading data and the ranks that have one. Collective."""
    reports = comm.gather_objects(data.error)
    errors = {rank: error for rank, error in enumerate(reports) if error is not None}
    first_error = next(iter(errors.values()))
    return f"step {step}: reading the data failed on {comm.join_ranks(errors)}: {first_error}"


def describe_not_finite(step: int, embeddings: Embeddings, out: LossOutput) -> str:
    """Return an error message that names the ranks that caused a loss that is not finite. Collective."""
    # A NaN in the features of one rank makes the loss of every rank NaN, so check the features first.
    features = embeddings.image.double().sum() + embeddings.text.double().sum()
    if ranks := comm.ranks_where(not features.isfinite().item()):
        cause = f", because the features of {comm.join_ranks(ranks)} are not"
    else:
        cause = f" on {comm.join_ranks(comm.ranks_where(not out.loss.isfinite().item()))}"
    return f"step {step}: the loss is not finite{cause}; nothing was updated"
