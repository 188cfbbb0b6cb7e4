"""Train a model or evaluate one. Python programs and the command line call these functions.

The functions do not parse arguments or exit the process; the command-line code does that.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from disco_ds.checkpoints.keep import Mirror
from disco_ds.config import Config, find_late
from disco_ds.distributed import comm, deepspeed_quirks
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.distributed.hosts import check_agreement, check_code, share_host
from disco_ds.distributed.launcher import SIGNALS, Interrupts, adopt_slurm
from disco_ds.eval import Encoder, Result, evaluate_sets, load_sets
from disco_ds.eval.model import evaluation_settings, in_precision, load_model, read_image_spec
from disco_ds.losses import LossContractError
from disco_ds.runs.messages import log_only, say, show
from disco_ds.runs.run_folder import AUTO, mark_launch
from disco_ds.runs.shared_folder import FinishedError
from disco_ds.training.build import Run, build
from disco_ds.training.loop import finish, train


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
        AskedToStopError: If a signal stopped the run. A checkpoint has been saved.
        AgreedError: If data cannot be read, if the ranks are at different steps, if captions with different tokens
            have equal features, if the loss or the gradient is not finite in more than config.skip_nonfinite batches in
            a row, if fp16 skips all updates, if a stage after the first cannot be built, if an evaluation or the last
            save fails, if too many saves in a row fail or, on a single rank, if the loss breaks its contract.
        ValueError: If this process has already joined a process group, or some of the launcher's
            environment variables are missing.
        RendezvousError: If the ranks cannot connect to each other.
        LossContractError: With several ranks, only on a rank where the loss breaks its contract. The other
            ranks are then ended.
        torch.OutOfMemoryError: Only on a rank that runs out of memory. The message names the phase.

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
        raise comm.RefusedError(
            "run_training must be called in the main thread, because only that thread receives signals"
        )
    with _restored_process():
        return train_session(config, None if resume is None else str(resume), allow_change)


def train_session(
    config: Config,
    resume: str | None,
    allow_change: Sequence[str] = (),
    launch_id: str | None = None,
    is_command: bool = False,
) -> Path:
    """Build, train and finish a run. Each stage of the run gets a new process group. Collective.

    Args:
        config: Settings of the run.
        resume: As in `run_training`.
        allow_change: As in `run_training`.
        launch_id: ID that `disco-ds launch` has given to this attempt; None for any other launcher. If
            given, the ID and the exit code are recorded in the run folder, and a run whose newest
            checkpoint is damaged resumes from an older one.
        is_command: Whether to print an error on stderr as soon as it is known, before uploads are completed: on rank 0
            an AgreedError, on any rank that it has run out of memory.

    Returns:
        The run folder.

    Raises:
        Exception: As in `run_training`: an AgreedError on all ranks, or another error on some ranks.
    """
    adopt_slurm()
    interrupts = Interrupts(60 * config.checkpoint.every_minutes)
    uploads: Mirror | None = None
    is_first_stage = True
    while True:
        run: Run | None = None
        # The engine of the previous stage contains reference cycles, so only the garbage collector frees its memory.
        gc.collect()
        get_accelerator().empty_cache()
        with comm.session(config.timeout_s), ExitStack() as stack:
            try:
                _check_ranks(config, {"--resume": resume, "--allow-change": list(allow_change)})
                unattended = launch_id is not None
                run = build(config, resume, stack, unattended, allow_change, uploads, interrupts)
                if comm.rank() == 0:
                    _announce(run)
                    mark_launch(run.folder, launch_id)
                train(run)
                if run.is_last_stage:
                    finish(run)
            except Exception as error:
                if isinstance(error, FinishedError) and resume == AUTO:
                    if comm.rank() == 0:
                        say(f"{error.folder} has done all its steps")
                        mark_launch(error.folder, launch_id, 0)
                    return error.folder
                failure = _explain(error, run, is_first_stage)
                _report(failure, is_command)
                if run is not None and isinstance(failure, comm.AgreedError):
                    _end(run, launch_id, failure.exit_code)
                if failure is error:
                    raise
                raise failure from error
            if run.is_last_stage:
                _end(run, launch_id, 0)
            else:  # the uploads continue in the next stage
                uploads, run.saver.uploads = run.saver.uploads, None
            deepspeed_quirks.release(run.engine)
        if run.is_last_stage:
            return run.folder
        resume, allow_change, is_first_stage = str(run.folder), (), False


def _check_ranks(config: Config, options: dict[str, Any]) -> None:
    """Check that all ranks have the same settings, options and code. Collective.

    Raises:
        ValueError: On every rank, if they differ, or if a rank has called `refuse_recipe` instead.
    """
    with comm.all_or_none("recipe"):
        pass
    check_agreement(config.model_dump(mode="json") | options)
    check_code()


def refuse_recipe(problem: ValueError) -> None:
    """Tell the other ranks that this rank cannot read its recipe, so that none waits for it. Collective.

    Raises:
        RefusedError: On every rank. The message names the ranks that cannot read their recipe.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise comm.RefusedError(str(problem))
    timeout_s = Config.model_fields["timeout_s"].default
    with comm.session(timeout_s), comm.all_or_none("recipe", comm.RefusedError):
        raise problem


def _announce(run: Run) -> None:
    """Print what is trained."""
    step, samples = run.schedule.first_step, run.schedule.first_samples
    resumed = f"resumes after step {step:,}, " if step else ""
    say(f"{run.folder}: {resumed}{run.recipe.describe(comm.size(), step, samples)}")
    say(run.description)
    num_epochs = run.schedule.num_samples / max(run.loader.epoch_samples, 1)
    for problem in find_late(run.recipe, run.schedule.num_steps, num_epochs):
        say(f"warning: {problem}")


def _explain(error: Exception, run: Run | None, is_first_stage: bool) -> Exception:
    """Return the error to raise in place of `error`: an AgreedError if all ranks have failed with the same error.

    Args:
        error: The error of this rank.
        run: The run; None if it could not be built.
        is_first_stage: Whether the run could not be built because of a mistake in the settings. If a later stage cannot
            be built, this is probably not the cause, so `disco-ds launch` may restart the run.
    """
    if comm.is_out_of_memory(error):
        phase = run.heartbeat.progress.doing if run else "building"
        # torch's first line lists the memory of the device and of this process.
        first_line = str(error).partition("\n")[0]
        return torch.OutOfMemoryError(
            f"out of memory in {phase}: {first_line}\n"
            f"  disco-ds plan --config NAME --ranks {comm.size()} shows where the memory goes; "
            "--fit FOLDER writes a recipe that fits"
        )
    if run is None and isinstance(error, ValueError):
        return (comm.RefusedError if is_first_stage else comm.AgreedError)(str(error))
    if isinstance(error, LossContractError) and comm.size() == 1:
        return comm.AgreedError(str(error))
    return error


def _report(error: Exception, is_command: bool) -> None:
    """Log an error that all ranks have agreed on. In a command, also print it, or that this rank is out of memory."""
    host = socket.gethostname()
    if isinstance(error, torch.OutOfMemoryError) and is_command:
        show(f"rank {comm.rank()} is {error}", f"error on {host}")
    if isinstance(error, comm.AgreedError) and comm.rank() == 0:
        is_requested = isinstance(error, comm.AskedToStopError)
        log_only(str(error), logging.INFO if is_requested else logging.ERROR)
        if is_command:
            show(error, host if is_requested else f"error on {host}")


def _end(run: Run, launch_id: str | None, code: int) -> None:
    """Record the exit code, and wait for the uploads, which earlier checkpoints may need even after a failure."""
    # Write the exit code first, because this process may be killed while it waits for the uploads.
    if comm.rank() == 0:
        mark_launch(run.folder, launch_id, code)
    run.saver.end(run.heartbeat.progress.step)


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
        os.environ.clear()
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
    adopt_slurm()
    try:
        config = evaluation_settings(model, overrides, recipe, weights)
    except ValueError as error:
        with _restored_process():
            refuse_recipe(error)
    with _restored_process(), comm.session(config.timeout_s), ExitStack() as stack:
        try:
            _check_ranks(config, {"MODEL": str(model), "--weights": str(weights), "--ema": ema})
            heartbeat = stack.enter_context(Heartbeat(config.lost_after_s, config.timeout_s))
            share_host()  # without this, each rank would start as many threads as the host has cores
            with comm.all_or_none("data"):
                sets = load_sets(config.eval, config.data)
            with comm.all_or_none("model"):
                module, tokenizer = load_model(model, weights, ema, config.model)
        except ValueError as error:
            raise comm.RefusedError(str(error)) from error
        heartbeat.mark(0, "evaluating")
        in_precision(module, config.precision)
        encoder = Encoder(module, read_image_spec(module), tokenizer, config.micro_batch)
        return evaluate_sets(encoder, sets)
