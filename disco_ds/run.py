"""Train a run and evaluate a model, for Python programs and for the command line.

The functions here do not parse arguments, print errors or exit; the command line does that around them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disco_ds.checkpoints.weights import build_from, read_weights
from disco_ds.config import Config, ModelSettings, check_config, load_config
from disco_ds.config.ds_config import precision
from disco_ds.config.recipe_yaml import assign, split_overrides
from disco_ds.config.secrets import redact
from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.distributed.agreement import check_agreement
from disco_ds.distributed.heartbeat import Heartbeat
from disco_ds.distributed.host_share import share_host
from disco_ds.distributed.interrupt import SIGNALS
from disco_ds.eval import Result, evaluate_sets, load_sets
from disco_ds.launch.slurm import adopt_slurm
from disco_ds.losses import LossContractError
from disco_ds.models.clip import build_model, build_tokenizer, read_preprocessing
from disco_ds.runs.run_folder import AUTO, CONFIG, mark_launch
from disco_ds.runs.run_log import note, say
from disco_ds.runs.shared_folder import FinishedError
from disco_ds.training.build import build
from disco_ds.training.engine import DTYPES
from disco_ds.training.loop import AskedToStopError, StopError, finish, train
from disco_ds.training.out_of_memory import OutOfMemory, explained


class RefusedError(ValueError):
    """A mistake in settings, data or weights, raised on every rank before any work is done."""


AGREED_ERRORS = (
    RefusedError,
    comm.AgreedError,
    StopError,
    FloatingPointError,
    AskedToStopError,
)
"""Errors that all ranks raise together, after they have left the process group in order."""


def exit_code(error: Exception | None) -> int:
    """Return the exit code of a command that ends with this error."""
    if error is None:
        return 0
    if isinstance(error, RefusedError):
        return 2
    return 3 if isinstance(error, AskedToStopError) else 1


def run_training(
    config: Config, resume: str | Path | None = None, allow_change: Sequence[str] = ()
) -> Path:
    """Train a run to its end, and return its folder.

    Without a launcher it trains on one rank. Under a launcher (deepspeed, torchrun, srun) every
    rank must call it. Call it from the main thread: while it runs, SIGTERM, SIGUSR1 and SIGINT save
    a checkpoint and stop. Signal handlers and environment are restored afterwards. The random
    generators of torch, numpy and Python are seeded from config.seed.

    Args:
        config: Settings of the run.
        resume: None for a new run; "latest", a run folder or a checkpoint to resume; "auto" to
            resume the latest run if it has a complete checkpoint, and to start one otherwise. With
            "auto", the folder of a run that is already finished is returned at once.
        allow_change: Settings that may differ from the checkpoint's, such as "optim.lr".

    Returns:
        The run folder, with metrics.jsonl, report.png, checkpoints/ and finished.json.

    Raises:
        RefusedError: For a mistake in settings or data, before any work.
        ValueError: If this process has already joined a process group, or some variables of the
            launcher are missing.
        StopError: If data cannot be read, or the loss breaks its contract.
        FloatingPointError: If the loss is not finite.
        AskedToStopError: After a signal, when a checkpoint is saved.
        AgreedError: If an evaluation or the last checkpoint failed.
        OutOfMemory: Only on the rank where it happens; says what the memory held and what helps.

    Example:
        >>> from disco_ds import load_config, run_training
        >>> config = load_config("quickstart", ["samples=256", "optim.warmup_steps=1", "eval.labeled={}"])
        >>> folder = run_training(config)  # doctest: +ELLIPSIS
        runs/quickstart...: global batch 128 ...
        >>> (folder / "finished.json").exists()
        True
    """
    # Checked first, because Python would refuse the signal handlers after the run folder is made.
    if threading.current_thread() is not threading.main_thread():
        raise RefusedError(
            "run_training must be called in the main thread, which alone receives signals"
        )
    with _restored_process():
        try:
            return train_session(config, None if resume is None else str(resume), allow_change)
        except OutOfMemory as error:
            # Nobody has printed the explanation.
            raise OutOfMemory("\n".join([str(error), *error.explanation]), []) from error


def train_session(
    config: Config,
    resume: str | None,
    allow_change: Sequence[str] = (),
    launch_id: str | None = None,
    report: Callable[[object], object] = lambda error: None,
) -> Path:
    """Build, train and finish a run in a new process group. Collective.

    Args:
        config: Settings of the run.
        resume: See `run_training`.
        allow_change: See `run_training`.
        launch_id: Id that `disco-ds launch` has given to this attempt. The run folder records it
            with the exit code, and a damaged checkpoint is replaced by the one before it.
        report: Called on the first rank with an error on which all ranks have agreed, as soon as
            they have; also called with the explanation on a rank that ran out of memory.

    Returns:
        The run folder.

    Raises:
        Exception: One of AGREED_ERRORS on all ranks; OutOfMemory or any other error on some ranks.
    """
    with _session(config.timeout_s) as stack:
        first = comm.rank() == 0

        def agreed(error: Exception) -> Exception:
            if first:
                note(redact(str(error)))
                report(error)
            return error

        try:
            options = {"--resume": resume, "--allow-change": list(allow_change)}
            check_agreement(config.model_dump(mode="json") | options)
            with explained(config, lambda: "building", report):
                run = build(config, resume, stack, launch_id is not None, allow_change)
        except ValueError as error:
            if isinstance(error, FinishedError) and resume == AUTO:
                if first:
                    say(f"{error.folder} has done all its steps")
                    mark_launch(error.folder, launch_id, 0)
                return error.folder
            raise agreed(RefusedError(str(error))) from error
        if first:
            resumed = f"resumes after step {run.first_step:,}, " if run.first_step else ""
            say(f"{run.folder}: {resumed}{run.config.describe(comm.size())}")
            mark_launch(run.folder, launch_id)
        failure: Exception | None = None
        try:
            with explained(config, lambda: run.heartbeat.place.doing, report):
                train(run)
                finish(run)
        except LossContractError as error:
            # With several ranks it may be this one alone; its heartbeat tells the others.
            if comm.size() > 1:
                raise
            failure = agreed(StopError(str(error)))
        except AGREED_ERRORS as error:
            failure = agreed(error)
        # After a failure too: earlier checkpoints may not be uploaded yet.
        run.saver.end(run.heartbeat.place.step)
        if first:
            mark_launch(run.folder, launch_id, exit_code(failure))
        if failure is not None:
            raise failure
        return run.folder


@contextmanager
def _session(timeout_s: float) -> Iterator[ExitStack]:
    """Join the process group for a block, and leave it in order even if all ranks raise an agreed error.

    Args:
        timeout_s: See `comm.session`.

    Yields:
        A stack that is closed before the ranks leave.
    """
    adopt_slurm()
    failure: Exception | None = None
    with comm.session(timeout_s), ExitStack() as stack:
        try:
            yield stack
        except AGREED_ERRORS as error:
            # Raised below: for the process group and the heartbeat this rank has not failed.
            failure = error
    if failure is not None:
        raise failure


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what a run changes in its process: signal handlers, environment and torch's hook for tracebacks."""
    # Python lets only the main thread set handlers. Evaluation may run in another, and sets none.
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
) -> list[Result]:
    """Evaluate a model on labeled images (zero-shot accuracy), captioned images (retrieval) and held-out pairs (loss).

    The precision is that of the settings; without settings it is fp32. Under a launcher every rank
    must call it: each evaluates a part of the images, and all return the same results.

    Args:
        model: A run folder, a checkpoint folder or an export; with weights the name of a model, as
            in model.name.
        overrides: Settings such as "eval.labeled.imagenet=/data/imagenet/val".
        recipe: The recipe that the overrides apply to; default: the settings of the model's run.
        weights: A file that open_clip can load.

    Returns:
        A result for each set: its name, its values by kind as fractions, and counts of images.

    Raises:
        RefusedError: For a mistake in settings, data or weights.
        AgreedError: If images cannot be read.

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
        share_host()  # otherwise each rank would start as many threads as the host has cores
        try:
            arguments = {"MODEL": str(model), "--weights": str(weights)}
            check_agreement(config.model_dump(mode="json") | arguments)
            with comm.all_or_none("data"):
                sets = load_sets(config.eval, config.data)
            with comm.all_or_none("model"):
                module, tokenizer = load_model(model, weights)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        heartbeat.mark(0, "evaluating")
        kind = precision(config.deepspeed)
        if kind != "fp32" and comm.rank() == 0:
            say(f"evaluating in {kind}, as the run trains; add deepspeed={{}} for fp32")
        look = read_preprocessing(module)
        spec = ImageSpec(look.size, look.interpolation, look.resize_mode)
        module = in_precision(module, kind)
        return evaluate_sets(module, sets, spec, tokenizer, config.micro_batch)


def evaluation_settings(
    model: str | Path,
    overrides: Sequence[str],
    recipe: str | Path | None,
    weights: str | Path | None,
) -> Config:
    """Return the settings of the recipe, of the model's run, or only the overrides if there is neither.

    Raises:
        ValueError: If the settings are invalid, or there is no set to evaluate on.
    """
    path = Path(model)
    # The model may be RUN or RUN/checkpoints/step-N.
    found = [folder / CONFIG for folder in (path, *path.parents[:2]) if (folder / CONFIG).is_file()]
    if recipe or (found and not weights):
        config = load_config(recipe or found[0], list(overrides))
    else:
        # Evaluation reads micro_batch, deepspeed (precision), data (decoding) and eval only.
        tree: dict[str, Any] = {
            "name": "eval",
            "global_batch": 64,
            "micro_batch": 64,
            "steps": 1,
            "deepspeed": {},
            "optim": {"warmup_steps": 0},
            "data": {"source": "synthetic"},
        }
        for keys, value in split_overrides(list(overrides)):
            assign(tree, keys, value)
        config = check_config(tree, "the overrides")
    if not config.eval.sets:
        raise ValueError(
            "nothing to evaluate on; set eval.labeled.NAME=FOLDER, eval.retrieval.NAME=FOLDER or "
            "eval.validation.NAME=FOLDER"
        )
    return config


def in_precision(module: nn.Module, kind: str) -> nn.Module:
    """Make a model compute in the precision of an engine: autocast, bf16, fp16 or fp32."""
    if kind == "autocast":
        module.forward = torch.autocast(comm.local_device().type, torch.bfloat16)(module.forward)
    return module.to(DTYPES[kind])


def load_model(model: str | Path, weights: str | Path | None = None) -> tuple[nn.Module, Any]:
    """Load a model for evaluation.

    Args:
        model: See `evaluate_run`.
        weights: See `evaluate_run`.

    Returns:
        The model, on this rank's device and in eval mode, and its tokenizer.

    Raises:
        ValueError: If the model or the weights cannot be loaded.
    """
    if weights:
        settings = ModelSettings(name=str(model), pretrained=Path(weights))
        module = build_model(settings)
    elif Path(model).exists():
        read = read_weights(Path(model))
        settings, module = read.settings, build_from(read)
    else:
        raise ValueError(
            f"{model} does not exist; to evaluate a model by its name, add --weights FILE"
        )
    return module.to(comm.local_device()).eval(), build_tokenizer(settings, module)
