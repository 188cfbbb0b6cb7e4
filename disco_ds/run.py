"""Train a model or evaluate one. Python programs and the command line call these functions.

The functions do not parse arguments, print errors or exit the process; the command-line code does that.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from disco_ds.checkpoints.keep import Mirror
from disco_ds.config import Config, find_late
from disco_ds.config.secrets import redact
from disco_ds.distributed import comm
from disco_ds.distributed.agreement import check_agreement
from disco_ds.distributed.deepspeed_quirks import release
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.distributed.host_share import share_host
from disco_ds.distributed.interrupt import SIGNALS, Interrupts
from disco_ds.distributed.slurm import adopt_slurm
from disco_ds.eval import Result, evaluate_sets, load_sets
from disco_ds.eval.model import evaluation_settings, in_precision, load_model, read_image_spec
from disco_ds.losses import LossContractError
from disco_ds.runs.run_folder import AUTO, mark_launch
from disco_ds.runs.run_log import note, say
from disco_ds.runs.shared_folder import FinishedError
from disco_ds.training.build import build
from disco_ds.training.loop import AskedToStopError, finish, train
from disco_ds.training.out_of_memory import OutOfMemory, explained
from disco_ds.training.step import StopError


class RefusedError(ValueError):
    """A mistake in the settings, data or weights. It is raised on every rank before the first training step."""


AGREED_ERRORS = (
    RefusedError,
    comm.AgreedError,
    StopError,
    FloatingPointError,
    AskedToStopError,
)
"""Errors that all ranks raise together, after they have left the process group normally."""


def exit_code(error: Exception | None) -> int:
    """Return the exit code of a command that ends with this error. None: the command succeeded."""
    if error is None:
        return 0
    if isinstance(error, RefusedError):
        return 2
    return 3 if isinstance(error, AskedToStopError) else 1


def run_training(
    config: Config, resume: str | Path | None = None, allow_change: Sequence[str] = ()
) -> Path:
    """Train a model to the last step of its run, and return the run folder.

    A run with stages saves a checkpoint at the end of each stage, and resumes from it with the settings
    of the next stage.

    Without a launcher, this function trains on one rank. Under a launcher (deepspeed, torchrun, srun),
    every rank must call it. Call it from the main thread: while it runs, SIGTERM, SIGUSR1 and SIGINT
    make it save a checkpoint and stop. It restores the signal handlers and the environment before it
    returns. It seeds the random generators of torch, numpy and Python from config.seed.

    Args:
        config: Settings of the run.
        resume: None starts a new run. "latest" or the path of a run folder or checkpoint resumes a run.
            "auto" resumes the latest run if it has a complete checkpoint, and otherwise starts a new
            run. With "auto", if the latest run is already finished, its folder is returned immediately.
        allow_change: Names of settings, such as "optim.lr", that may differ from those in the checkpoint.

    Returns:
        The run folder, with metrics.jsonl, report.png, checkpoints/ and finished.json.

    Raises:
        RefusedError: If there is a mistake in the settings or data. Raised before the first step.
        ValueError: If this process has already joined a process group, or some of the launcher's
            environment variables are missing.
        RendezvousError: If the ranks cannot connect to each other.
        StopError: If data cannot be read, if the ranks are at different steps, if captions with different tokens have
            equal features, if a stage after the first cannot be built or, on a single rank, if the loss breaks its
            contract.
        LossContractError: With several ranks, only on a rank where the loss breaks its contract. The other
            ranks are then ended.
        FloatingPointError: If the loss or the gradient is not finite in more than config.skip_nonfinite
            batches in a row, or if fp16 skips all updates.
        AskedToStopError: If a signal stopped the run. A checkpoint has been saved.
        AgreedError: If an evaluation fails, the last save fails, or too many saves in a row fail.
        OutOfMemory: Only on a rank that runs out of memory. On the first such rank of each host, the message
            lists the memory in use and the settings that save memory.

    Example:
        >>> from disco_ds import load_config, run_training
        >>> config = load_config("quickstart", ["samples=256", "optim.warmup_steps=1", "eval.labeled={}"])
        >>> folder = run_training(config)  # doctest: +ELLIPSIS
        runs/quickstart...: global batch 128 ...
        >>> (folder / "finished.json").exists()
        True
    """
    # Check this first. Otherwise, Python would refuse the signal handlers only after the run folder was created.
    if threading.current_thread() is not threading.main_thread():
        raise RefusedError(
            "run_training must be called in the main thread, because only that thread receives signals"
        )
    with _restored_process():
        try:
            return train_session(config, None if resume is None else str(resume), allow_change)
        except OutOfMemory as error:
            # The explanation has not been printed, so put it into the message.
            raise OutOfMemory("\n".join([str(error), *error.explanation]), []) from error


def train_session(
    config: Config,
    resume: str | None,
    allow_change: Sequence[str] = (),
    launch_id: str | None = None,
    report: Callable[[object], object] = lambda error: None,
) -> Path:
    """Build, train and finish a run. Each stage of the run gets a new process group. Collective.

    Args:
        config: Settings of the run.
        resume: As in `run_training`.
        allow_change: As in `run_training`.
        launch_id: ID that `disco-ds launch` has given to this attempt; None for any other launcher. If
            given, the ID and the exit code are recorded in the run folder, and a run whose newest
            checkpoint is damaged resumes from an older one.
        report: Called on rank 0 with an error as soon as all ranks have agreed on the error. Also
            called with the explanation of an out-of-memory error, on the first rank of each host that
            has run out of memory.

    Returns:
        The run folder.

    Raises:
        Exception: One of AGREED_ERRORS on all ranks, or OutOfMemory or any other error on some ranks.
    """
    interrupts = Interrupts(60 * config.checkpoint.every_minutes)
    uploads: Mirror | None = None
    refusal: type[Exception] = RefusedError
    while True:
        folder, is_finished, uploads = _train_stage(
            config, resume, allow_change, launch_id, report, interrupts, uploads, refusal
        )
        if is_finished:
            return folder
        # One stage has been trained. If the next one cannot be built, the settings are probably not the cause, so raise
        # an error after which `disco-ds launch` restarts the run.
        resume, allow_change, refusal = str(folder), (), StopError
        # The engine contains reference cycles, so only the garbage collector frees its memory.
        gc.collect()
        get_accelerator().empty_cache()


def _train_stage(
    config: Config,
    resume: str | None,
    allow_change: Sequence[str],
    launch_id: str | None,
    report: Callable[[object], object],
    interrupts: Interrupts,
    uploads: Mirror | None,
    refusal: type[Exception],
) -> tuple[Path, bool, Mirror | None]:
    """Build the run and train it to the end of its current stage. Collective.

    Args:
        config: As in `train_session`.
        resume: As in `train_session`.
        allow_change: As in `train_session`.
        launch_id: As in `train_session`.
        report: As in `train_session`.
        interrupts: Requests to save or to stop.
        uploads: Uploads that the previous stage did not finish; None for the first stage.
        refusal: Class of the error that is raised if the stage cannot be built.

    Returns:
        The run folder; whether the run is finished; and, if it is not finished, the unfinished uploads for the next
        stage.
    """
    with _session(config.timeout_s) as stack:
        first = comm.rank() == 0

        def agreed(error: Exception) -> Exception:
            if first:
                is_requested = isinstance(error, AskedToStopError)
                note(redact(str(error)), logging.INFO if is_requested else logging.ERROR)
                report(error)
            return error

        try:
            options = {"--resume": resume, "--allow-change": list(allow_change)}
            check_agreement(config.model_dump(mode="json") | options)
            with explained(config, lambda: "building", report):
                unattended = launch_id is not None
                run = build(config, resume, stack, unattended, allow_change, uploads, interrupts)
        except ValueError as error:
            if isinstance(error, FinishedError) and resume == AUTO:
                if first:
                    say(f"{error.folder} has done all its steps")
                    mark_launch(error.folder, launch_id, 0)
                return error.folder, True, None
            raise agreed(refusal(str(error))) from error
        if first:
            step, samples = run.schedule.first_step, run.schedule.first_samples
            resumed = f"resumes after step {step:,}, " if step else ""
            say(f"{run.folder}: {resumed}{run.recipe.describe(comm.size(), step, samples)}")
            say(run.description)
            num_epochs = run.schedule.num_samples / max(run.loader.epoch_samples, 1)
            for problem in find_late(run.recipe, run.schedule.num_steps, num_epochs):
                say(f"warning: {problem}")
            mark_launch(run.folder, launch_id)
        is_finished = run.schedule.last_step == run.schedule.num_steps
        failure: Exception | None = None
        try:
            doing = lambda: run.heartbeat.place.doing  # noqa: E731
            with explained(config, doing, report, run.loader.describe_long_texts):
                train(run)
                if is_finished:
                    finish(run)
        except LossContractError as error:
            # Possibly only this rank has failed. If there are other ranks, its heartbeat informs them.
            if comm.size() > 1:
                raise
            failure = agreed(StopError(str(error)))
        except AGREED_ERRORS as error:
            failure = agreed(error)
        if is_finished or failure:
            # Write the exit code first, because this process may be killed while it waits for the uploads.
            if first:
                mark_launch(run.folder, launch_id, exit_code(failure))
            # Do this even after a failure: earlier checkpoints may still wait for their upload.
            run.saver.end(run.heartbeat.place.step)
        if failure is not None:
            raise failure
        if run.wandb:
            run.wandb.exit_code = 0
        if not is_finished:  # the uploads continue in the next stage
            uploads, run.saver.uploads = run.saver.uploads, None
        release(run.engine)
        return run.folder, is_finished, uploads


@contextmanager
def _session(timeout_s: float) -> Iterator[ExitStack]:
    """Join the process group for the `with` block, and leave it normally even if all ranks raise one of AGREED_ERRORS.

    Args:
        timeout_s: A collective operation fails if it takes longer than this many seconds.

    Yields:
        An exit stack that is closed before the ranks leave the process group.
    """
    adopt_slurm()
    failure: Exception | None = None
    with comm.session(timeout_s), ExitStack() as stack:
        try:
            yield stack
        except AGREED_ERRORS as error:
            # Raise it only after this rank has left the process group. The process group and the heartbeat
            # would otherwise treat this rank as failed.
            failure = error
    if failure is not None:
        raise failure


@contextmanager
def _restored_process() -> Iterator[None]:
    """After the `with` block, restore signal handlers, environment and sys.excepthook, which a run changes."""
    # Python allows only the main thread to set signal handlers. An evaluation may run in another thread, but
    # it sets no handlers.
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if main}
    environment, hook = dict(os.environ), sys.excepthook
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.excepthook = hook
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def evaluate_run(
    model: str | Path,
    overrides: Sequence[str] = (),
    recipe: str | Path | None = None,
    weights: str | Path | None = None,
    ema: bool = False,
) -> list[Result]:
    """Evaluate a model on labeled images (zero-shot accuracy), captioned images (retrieval) and held-out pairs (loss).

    The settings determine the precision. If there is neither a recipe nor a run, it is fp32 unless the
    overrides change it. Under a launcher, every rank must call this function. Each rank evaluates a
    part of the images, and all ranks return the same results.

    Args:
        model: A run folder, a checkpoint folder or an export. If `weights` is given: the name of a
            model, as in the setting model.name.
        overrides: Settings that replace those of the recipe, such as
            "eval.labeled.imagenet=/data/imagenet/val".
        recipe: The recipe that the overrides apply to. By default, it is the config of the model's run.
        weights: Weights that open_clip can load into the model: a file, a folder or a tag.
        ema: Whether to evaluate the moving average of the run's weights (optim.ema) instead of its last weights.

    Returns:
        A result for each evaluation set: the set's name, its metrics (accuracies and recalls are
        fractions) and counts of images.

    Raises:
        RefusedError: If there is a mistake in the settings, data or weights.
        ValueError: If this process has already joined a process group, or some of the launcher's
            environment variables are missing.
        RendezvousError: If the ranks cannot connect to each other.
        AgreedError: If an evaluation fails, for example because images cannot be read.

    Example:
        >>> from disco_ds import evaluate_run
        >>> for result in evaluate_run("runs/quickstart", ["eval.labeled.unseen=bundled:emoji/unseen"]):
        ...     print(result.name, sorted(result.values))
        unseen ['chance', 'recall', 'top1', 'top5']
    """
    try:
        config = evaluation_settings(model, overrides, recipe, weights)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    with _restored_process(), _session(config.timeout_s) as stack:
        heartbeat = stack.enter_context(Heartbeat(config.lost_after_s, config.timeout_s))
        share_host()  # without this, each rank would start as many threads as the host has cores
        try:
            arguments = {"MODEL": str(model), "--weights": str(weights), "--ema": ema}
            check_agreement(config.model_dump(mode="json") | arguments)
            with comm.all_or_none("data"):
                sets = load_sets(config.eval, config.data)
            with comm.all_or_none("model"):
                module, tokenizer = load_model(model, weights, ema, config.model)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        heartbeat.mark(0, "evaluating")
        kind = config.precision
        if kind != "fp32" and comm.rank() == 0:
            say(f"evaluating in {kind}, the precision of the settings; add deepspeed={{}} for fp32")
        spec = read_image_spec(module)
        module = in_precision(module, kind)
        return evaluate_sets(module, sets, spec, tokenizer, config.micro_batch)
