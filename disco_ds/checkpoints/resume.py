"""Resume a run: choose a checkpoint in the run folder and restore the engine from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine as Engine
from torch import nn

from disco_ds.checkpoints import checkpoint, reshard, retention
from disco_ds.checkpoints.changes import find_changes, refuse_changes
from disco_ds.checkpoints.checkpoint import Saved
from disco_ds.checkpoints.retention import DamagedError
from disco_ds.config import Config, Tree
from disco_ds.distributed import comm
from disco_ds.models.clip import read_architecture
from disco_ds.models.param_groups import parameter_groups
from disco_ds.runs.run_folder import split_resume

HYPERPARAMETERS = ("betas", "eps", "lr_factor", "momentum", "names", "weight_decay")
"""Keys of optimizer parameter groups whose values come from this run's settings on resume, not from the checkpoint.

The learning rate is not listed, because it is set before every update.
"""
logger = logging.getLogger(__name__)


def choose(
    folder: Path,
    resume: str,
    config: Config,
    identify: Callable[[Config], Tree],
    unattended: bool,
    allow_change: Sequence[str] = (),
) -> Saved:
    """Choose the checkpoint to resume from and verify all of its files. Collective.

    Args:
        folder: The run folder.
        resume: Value of --resume. If it does not name a checkpoint, the latest complete one is chosen.
        config: Settings of this run.
        identify: Returns the settings of a stage that must stay the same on resume, such as those in
            checkpoint.identity. It does not communicate.
        unattended: Whether to fall back to the previous checkpoint if this one is damaged.
        allow_change: Names of settings that may differ from those in the checkpoint.

    Raises:
        ValueError: On every rank, if settings not in `allow_change` have changed, or if there is no intact checkpoint
            that may be used. If the checkpoint is damaged, the message names the previous one.
    """
    # Only rank 0 chooses: a new folder on a shared file system may become visible to some hosts late.
    path = comm.from_rank_0(
        "run folder", lambda: split_resume(resume)[1] or retention.find_latest(folder)
    )

    def check(meta: Tree) -> None:
        # Compare with the stage of the checkpoint's last sample. The sample after it may belong to the next stage.
        stage = config.at_sample(meta["samples"] - 1)
        refuse_changes(meta["identity"], identify(stage), allow_change)
        last_step, _ = config.find_end(meta["step"], meta["samples"])
        if meta["step"] > last_step:
            raise ValueError(
                f"{path} is at step {meta['step']}, but the run would end at step {last_step}"
            )

    while True:
        try:
            return checkpoint.open_verified(path, check)
        except DamagedError as error:
            damage = error
        older = comm.from_rank_0("run folder", partial(retention.find_older, path))
        if older is None:
            raise ValueError(
                f"{damage}; {folder} has no older complete checkpoint: start a new run, without --resume"
            )
        # Only an unattended run falls back by itself. A user may prefer to restore the damaged file.
        if not unattended:
            raise ValueError(f"{damage}; --resume {older} resumes from the previous checkpoint")
        if comm.rank() == 0:
            logger.warning("%s; trying the previous one, %s", damage, older.name)
        path = older


def set_newer_aside(saved: Saved) -> None:
    """Set aside all checkpoints that are newer than the one a run resumes from. Collective.

    Raises:
        ValueError: On every rank, if a newer checkpoint cannot be renamed. It must not stay, because the
            next `--resume latest` would choose it.
    """

    def rename() -> None:
        for path in reversed(retention.list_complete(saved.path.parents[1])):
            if retention.step_of(path) > saved.step:
                retention.set_aside(path)

    comm.from_rank_0(f"setting aside checkpoints newer than {saved.path}", rename)


def log_changes(saved: Saved, num_steps: int, identity: Tree, shape: Tree) -> None:
    """On rank 0, log how this run differs from the checkpoint: settings, steps, ranks, ZeRO stage and precision.

    Args:
        saved: The checkpoint.
        num_steps: Length of this run in steps.
        identity: This run's settings that must stay the same on resume, in the stage in which the checkpoint was saved.
        shape: The result of checkpoint.shape for this run.
    """
    if comm.rank() != 0:
        return
    changes = find_changes(
        {**saved.meta["identity"], **saved.meta["shape"], "steps": saved.meta["num_steps"]},
        {**identity, **shape, "steps": num_steps},
    )
    for name, (old, new) in changes.items():
        logger.warning("from step %d on, %s is %r instead of %r", saved.step, name, new, old)


def restore(
    saved: Saved, config: Config, model: nn.Module, build_engine: Callable[[], Engine]
) -> Engine:
    """Build the engine and load the checkpoint into it. Collective.

    If the number of ranks, the ZeRO stage, the precision or the model's image size has changed, reshard the checkpoint.

    Args:
        saved: The checkpoint.
        config: Settings of this run.
        model: The model that the engine will train.
        build_engine: Builds the engine around the model. It is called once.

    Raises:
        ValueError: On every rank, if the checkpoint does not fit the model or cannot be read.
    """
    architecture = read_architecture(config.model)
    is_resized = bool(find_changes(saved.meta["identity"]["model.config"], architecture))
    is_same = saved.meta["shape"] == checkpoint.shape(config, comm.size()) and not is_resized
    order = [name for group in parameter_groups(model, config.optim) for name in group["names"]]
    if not is_same:
        # Load frozen parameters and buffers before the engine is built: at ZeRO 3, an engine leaves each rank only a
        # part of each parameter.
        reshard.load_untrained(saved, model, set(order))
    engine = build_engine()
    with _settings_kept(engine):
        if is_same:
            # Each rank loads its own part, including the random generators, so the resumed run is bit-identical to an
            # uninterrupted one.
            checkpoint.load_engine(saved, engine)
        else:
            reshard.load_trained(saved, engine, order)
    return engine


@contextmanager
def _settings_kept(engine: Engine) -> Iterator[None]:
    """Keep this run's optimizer settings while the `with` block loads a checkpoint, which contains older settings."""
    optimizer = engine.optimizer
    before = {
        group["name"]: {key: group[key] for key in HYPERPARAMETERS if key in group}
        for group in optimizer.param_groups
    }
    clip_norm = getattr(optimizer, "clip_grad", None)
    yield
    for group in optimizer.param_groups:
        group.update(before[group["name"]])
    if clip_norm is not None:
        optimizer.clip_grad = clip_norm
