"""Train a run, evaluate a model: what Python programs and the command line share.

Values go in and come out. Arguments, exit codes and messages are the command line's, which adds them by an Observer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disco_ds.checkpoints.weights import build_from, read_weights
from disco_ds.config import Config, ModelSettings, check_config, load_config
from disco_ds.config.ds_config import precision
from disco_ds.config.recipe_yaml import assign, split_overrides
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
from disco_ds.runs.run_folder import AUTO, CONFIG
from disco_ds.runs.shared_folder import FinishedError
from disco_ds.training.build import Run, build
from disco_ds.training.engine import DTYPES
from disco_ds.training.loop import AskedToStopError, StopError, finish, train
from disco_ds.training.out_of_memory import OutOfMemory, explained

_BARE: dict[str, Any] = {
    **{"name": "eval", "global_batch": 64, "micro_batch": 64, "steps": 1, "deepspeed": {}},
    **{"optim": {"warmup_steps": 0}, "data": {"source": "synthetic"}},
}
"""Settings where there is no recipe: of these, evaluation reads micro_batch, data (how to decode) and eval."""


class RefusedError(ValueError):
    """A mistake in settings or data, found on every rank alike before any work was done."""


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Observer:
    """What is called on every rank at moments of a run. None of it may communicate."""

    started: Callable[[Run], object] = _ignore
    """Everything is built."""
    failed: Callable[[Exception], object] = _ignore
    """All ranks have agreed to end with this error; copies of checkpoints may still be under way."""
    ended: Callable[[Run, Exception | None], object] = _ignore
    """The run has ended, in order, with or without an error."""
    finished: Callable[[Path], object] = _ignore
    """The run that "auto" has found in this folder had done all its steps before."""
    explain: Callable[[str], object] = _ignore
    """The accelerator was out of memory; called on the first such rank of each host."""
    unattended: bool = False
    """Whether an older checkpoint may be taken where the newest is damaged."""


def run_training(
    config: Config, resume: str | Path | None = None, allow_change: Sequence[str] = ()
) -> Path:
    """Train the run that the settings describe, to its end, and return its folder.

    In an ordinary process it trains on one rank. Under a launcher (deepspeed, torchrun, srun) every rank must call it.
    It must be called from the main thread: while it runs, SIGTERM, SIGUSR1 and SIGINT save a checkpoint and stop.
    Handlers and environment are put back afterwards. The generators of torch, numpy and Python are seeded from
    config.seed.

    Args:    resume: "latest", a run folder or one of its checkpoints to continue from; "auto" to continue the latest
             run if it has a complete checkpoint, and else to start one (if that run has done all its steps, its folder
             is returned at once); None for a new run; allow_change: settings that may differ from the checkpoint's,
             such as "optim.lr".
    Returns: the run folder, with metrics.jsonl, report.png, checkpoints/ and finished.json, on every rank.
    Raises:  RefusedError, a ValueError, for a mistake in settings or data, before any work. ValueError where this
             process has joined a process group already, or a launcher has left out some of its variables.
             Then on every rank alike: StopError for data that cannot be read; FloatingPointError for a loss that is not
             finite; AskedToStopError after a signal, when a checkpoint is saved; AgreedError for an evaluation or a
             last checkpoint that has failed.
             On the rank where it happens: OutOfMemory, with what was held and which settings help.

    Example:
        >>> from disco_ds import load_config, run_training
        >>> config = load_config("quickstart", ["samples=256", "optim.warmup_steps=1", "eval.labeled={}"])
        >>> folder = run_training(config)  # doctest: +ELLIPSIS
        step 2/2 ...
        >>> (folder / "finished.json").exists()
        True
    """
    # Python would refuse the signal handlers only after the run folder has been made.
    if threading.current_thread() is not threading.main_thread():
        raise RefusedError(
            "run_training must be called in the main thread, which alone receives signals"
        )
    with _put_back():
        try:
            ended = train_session(
                config, None if resume is None else str(resume), Observer(), allow_change
            )
        except OutOfMemory as error:  # nobody has printed the explanation
            raise OutOfMemory("\n".join([str(error), *error.explanation]), []) from error
    if isinstance(ended, Exception):
        raise ended
    return ended


def train_session(
    config: Config, resume: str | None, observer: Observer, allow_change: Sequence[str] = ()
) -> Path | Exception:
    """Build, train and finish in a process group of its own.

    Returns: the run folder, or the error on which all ranks have agreed; RefusedError where building has failed.
    Raises:  OutOfMemory, on some ranks; whatever else goes wrong on one rank alone.
    """
    adopt_slurm()
    with comm.session(config.timeout_s), ExitStack() as stack:
        try:
            options = {"--resume": resume, "--allow-change": list(allow_change)}
            check_agreement({**config.model_dump(mode="json"), **options})
            with explained(config, lambda: "building", observer.explain):
                run = build(config, resume, stack, observer.unattended, allow_change)
        except ValueError as error:
            if isinstance(error, FinishedError) and resume == AUTO:
                observer.finished(error.folder)
                return error.folder
            refusal = RefusedError(str(error)).with_traceback(error.__traceback__)
            observer.failed(refusal)
            return refusal
        # From here on a failure that all ranks share is reported, then the ranks leave together, in order.
        observer.started(run)
        failure: Exception | None = None
        try:
            with explained(config, lambda: run.heartbeat.place.doing, observer.explain):
                train(run)
                finish(run)
        except (
            StopError,
            LossContractError,
            FloatingPointError,
            comm.AgreedError,
            AskedToStopError,
        ) as error:
            if isinstance(error, LossContractError) and comm.size() > 1:
                raise  # perhaps on this rank alone: the others learn of it from its heartbeat
            failure = error
            observer.failed(error)
        # After a failure too: earlier checkpoints may still be on their way.
        run.saver.end(run.heartbeat.place.step)
        observer.ended(run, failure)
    return failure or run.folder


@contextmanager
def _put_back() -> Iterator[None]:
    """Put back what a run changes in its process: signal handlers, environment, and the hook that torch puts before
    tracebacks. A lone process gets a launcher's variables for as long as it runs."""
    # Python lets no other thread set handlers; evaluation, which may run in one, sets none.
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
    """Evaluate a model on labeled images (zero-shot accuracy), captioned ones (retrieval) and held-out pairs (loss).

    It computes in the precision of the settings: that of the run, and fp32 where there are none. Under a launcher every
    rank must call it; each takes its part of the images, and all return the same figures.

    Args:    model: a run folder, a checkpoint folder or an export; with weights the name of a model, as in model.name;
             overrides: settings such as "eval.labeled.imagenet=/data/imagenet/val"; recipe: the recipe whose settings
             they replace (default: the settings of the model's run); weights: a file that open_clip can load.
    Returns: one result per set: its name, its values by kind as fractions, and its counts of images.
    Raises:  RefusedError for a mistake in settings, data or weights; AgreedError for images that cannot be read.

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
    with _put_back():
        ended = evaluate_session(config, model, weights, lambda results: None)
    if isinstance(ended, Exception):
        raise ended
    return ended


def evaluation_settings(
    model: str | Path,
    overrides: Sequence[str],
    recipe: str | Path | None,
    weights: str | Path | None,
) -> Config:
    """Settings of the recipe, else of the run that the model belongs to, else none but the overrides.

    Raises: ValueError for a mistake, or where there is no set to evaluate on.
    """
    path, given = Path(model), list(overrides)
    # The model may be RUN or RUN/checkpoints/step-N.
    own = [folder / CONFIG for folder in (path, *path.parents[:2]) if (folder / CONFIG).is_file()]
    if recipe or (own and not weights):
        config = load_config(recipe or own[0], given)
    else:
        tree = json.loads(json.dumps(_BARE))  # a deep copy
        for keys, value in split_overrides(given):
            assign(tree, keys, value)
        config = check_config(tree, "the overrides")
    if not config.eval.sets:
        kinds = ", ".join(
            f"eval.{kind}.NAME=FOLDER" for kind in ("labeled", "retrieval", "validation")
        )
        raise ValueError(f"nothing to evaluate on: add one of {kinds}")
    return config


def evaluate_session(
    config: Config,
    model: str | Path,
    weights: str | Path | None,
    publish: Callable[[list[Result]], None],
) -> list[Result] | Exception:
    """Evaluate in a process group of its own.

    Args:    publish: called with the results on every rank; where it fails on one, all fail.
    Returns: the results, or the error on which all ranks have agreed; RefusedError if it came before any work.
    """
    adopt_slurm()
    with comm.session(config.timeout_s), Heartbeat(config.lost_after_s, config.timeout_s) as heart:
        share_host()  # or each rank would start as many threads as the host has cores
        try:
            check_agreement(
                {**config.model_dump(mode="json"), "MODEL": str(model), "--weights": str(weights)}
            )
            with comm.all_or_none("data"):
                sets = load_sets(config.eval, config.data)
            with comm.all_or_none("model"):
                module, tokenizer = load_model(model, weights)
        except ValueError as error:
            return RefusedError(str(error)).with_traceback(error.__traceback__)
        heart.mark(0, "evaluating")
        look = read_preprocessing(module)
        spec = ImageSpec(look.size, look.interpolation, look.resize_mode)
        module = in_precision(module, precision(config.deepspeed))
        try:
            results = evaluate_sets(module, sets, spec, tokenizer, config.micro_batch)
            with comm.all_or_none("results"):
                publish(results)
        except comm.AgreedError as error:
            return error
    return results


def in_precision(module: nn.Module, kind: str) -> nn.Module:
    """Make the module compute as an engine of this precision does, one of autocast, bf16, fp16, fp32."""
    if kind == "autocast":
        module.forward = torch.autocast(comm.local_device().type, torch.bfloat16)(module.forward)
    return module.to(DTYPES[kind])


def load_model(model: str | Path, weights: str | Path | None = None) -> tuple[nn.Module, Any]:
    """The model on this rank's device, in eval mode, and its tokenizer. Raises: ValueError."""
    if weights:
        settings = ModelSettings(name=str(model), pretrained=Path(weights))
        module = build_model(settings)
    elif Path(model).exists():
        read = read_weights(Path(model))
        settings, module = read.settings, build_from(read)
    else:
        raise ValueError(
            f"{model} does not exist; the name of a model needs its weights: --weights FILE"
        )
    return module.to(comm.local_device()).eval(), build_tokenizer(settings, module)
