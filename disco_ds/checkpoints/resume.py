"""Resuming in a run folder: which checkpoint is taken, which are set aside, and the engine restored from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine as Engine
from torch import nn

from disco_ds.checkpoints import checkpoint, reshard, retention
from disco_ds.checkpoints.changes import Change, find_changes, refuse_changes
from disco_ds.checkpoints.checkpoint import Saved
from disco_ds.checkpoints.retention import DamagedError
from disco_ds.config import Config
from disco_ds.config.text_file import write_text
from disco_ds.distributed import comm
from disco_ds.runs.run_folder import CHANGES, find_newest, split_resume

HYPERPARAMETERS = ("betas", "eps", "lr_factor", "momentum", "weight_decay")
"""Of a parameter group; the learning rate is set at every step."""
logger = logging.getLogger(__name__)


def find_started(config: Config) -> str | None:
    """Find the run that `--resume auto` continues: the newest of this name, if it has a complete checkpoint."""
    newest = find_newest(config.runs, config.name)
    return str(newest) if newest and retention.list_complete(newest) else None


def choose(
    folder: Path,
    resume: str,
    config: Config,
    identity: dict[str, Any],
    unattended: bool,
    allow_change: Sequence[str] = (),
) -> Saved:
    """The checkpoint to resume from, with every file of it verified. Collective.

    Args:   folder: of the run; resume: the value of --resume, which means the last complete checkpoint or names one;
            identity: of this run; unattended: take an older checkpoint where one is damaged; allow_change: settings
            that may differ from the checkpoint's.
    Raises: ValueError on every rank alike, for changed settings, or for damage, naming the older checkpoint.
    """
    damaged: list[str] = []
    # Rank 0 chooses, for on a shared file system the hosts may see a new folder at different times.
    path = comm.from_rank_0(
        "run folder", lambda: split_resume(resume)[1] or retention.find_latest(folder)
    )

    def check(meta: dict[str, Any]) -> None:
        refuse_changes(meta["identity"], identity, allow_change)
        check_length(path, meta, config)

    while True:
        try:
            return checkpoint.open_verified(path, check)
        except DamagedError as error:
            damaged.append(str(error))
        older = comm.from_rank_0("run folder", partial(retention.find_older, path))
        if older is None:
            what = "; ".join(damaged)
            raise ValueError(
                f"{what}; {folder} has no older complete checkpoint: start the run anew without --resume"
            )
        # A person may rather restore the damaged file; the launch of a night must go on.
        if not unattended:
            raise ValueError(f"{damaged[-1]}; --resume {older} goes on from the one before it")
        if comm.rank() == 0:
            logger.warning("%s; trying the one before it, %s", damaged[-1], older.name)
        path = older


def set_newer_aside(saved: Saved) -> None:
    """Make the checkpoint that a run resumes from the last one of its folder. Collective.

    Raises: ValueError on every rank alike if one cannot be renamed: the next --resume latest would take it.
    """
    comm.from_rank_0(
        f"setting aside what is newer than {saved.path}",
        lambda: retention.set_newer_aside(saved.path),
    )


def record_changes(
    folder: Path, saved: Saved | None, config: Config, identity: dict[str, Any]
) -> None:
    """Add a line to changes.jsonl for every setting, the length and the ranks, if not the checkpoint's. Collective.

    Lines of this step or later are of what is not gone on from, and are dropped, as the records of those steps are.
    """
    if saved is None:
        return
    changes = find_changes(saved.meta["identity"], identity)
    if saved.meta["num_steps"] != config.num_steps:
        changes.append(Change("steps", saved.meta["num_steps"], config.num_steps))
    if saved.meta["shape"]["ranks"] != comm.size():
        changes.append(Change("ranks", saved.meta["shape"]["ranks"], comm.size()))
    path = folder / CHANGES
    with comm.all_or_none(f"writing {path}"):
        if comm.rank() == 0 and (changes or path.exists()):
            before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = [line for line in before if json.loads(line)["step"] < saved.step]
            now = [json.dumps({"step": saved.step, **change._asdict()}) for change in changes]
            write_text(path, "".join(f"{line}\n" for line in kept + now))
            for change in changes:
                logger.warning(
                    "from step %d on %s is %r, it was %r",
                    saved.step,
                    change.setting,
                    change.new,
                    change.old,
                )


def check_length(path: Path, meta: dict[str, Any], config: Config) -> None:
    """Refuse a run that ends before its checkpoint; warn where its length has changed. Raises: ValueError."""
    if meta["step"] > config.num_steps:
        raise ValueError(
            f"{path} is at step {meta['step']}, the run would end at {config.num_steps}"
        )
    if meta["num_steps"] != config.num_steps and comm.rank() == 0:
        logger.warning(
            "the run was to be %d steps long and is now %d: its learning-rate schedule changes from here on",
            meta["num_steps"],
            config.num_steps,
        )


def restore(
    saved: Saved, config: Config, model: nn.Module, build_engine: Callable[[], Engine]
) -> Engine:
    """Build the engine and load the checkpoint into it, resharded if its shape was another. Collective.

    Args:
        saved: The checkpoint.
        config: Settings of this run.
        model: The model that the engine is built of.
        build_engine: Wraps the model; called once, after weights that are loaded before.

    Raises:
        ValueError: On every rank, if the files do not fit.
    """
    # Then every rank finds its own part, generators included, and the run goes on bit for bit.
    if checkpoint.same_shape(saved.meta["shape"], checkpoint.shape(config, comm.size())):
        engine = build_engine()
        with _settings_kept(engine):
            checkpoint.load_engine(saved, engine)
        return engine
    if comm.rank() == 0:
        before = "{ranks} ranks at ZeRO {stage}, {precision}".format_map(saved.meta["shape"])
        logger.warning(
            "%s was written by %s: random draws, as of dropout, will be others", saved.path, before
        )
    # Before the engine is built: ZeRO 3 would have left a rank a part of each parameter only.
    order = reshard.optimizer_order(model, config.optim)
    reshard.load_untrained(saved, model, set(order))
    engine = build_engine()
    with _settings_kept(engine):
        reshard.restore(saved, engine, order)
    return engine


@contextmanager
def _settings_kept(engine: Engine) -> Iterator[None]:
    """Load a checkpoint in the block: its optimizer settings, which DeepSpeed restores too, give way to this run's."""
    optimizer = engine.optimizer
    before = {
        group["name"]: {key: group[key] for key in HYPERPARAMETERS if key in group}
        for group in _groups(engine)
    }
    clip_norm = getattr(optimizer, "clip_grad", None)
    yield
    for group in _groups(engine):
        group.update(before[group["name"]])
    if clip_norm is not None:
        optimizer.clip_grad = clip_norm


def _groups(engine: Engine) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = engine.optimizer.param_groups
    return groups
