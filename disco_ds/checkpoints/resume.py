"""Resume in a run folder: choose the checkpoint, and restore the engine from it."""

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
"""Keys of an optimizer's parameter group that come from this run's settings. The learning rate is set at every step."""
logger = logging.getLogger(__name__)


def find_started(config: Config) -> str | None:
    """Return the folder that `--resume auto` resumes: the newest of this name, if it has a complete checkpoint."""
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
    """Choose the checkpoint to resume from, and verify all of its files. Collective.

    Args:
        folder: The run folder.
        resume: Value of --resume; unless it names a checkpoint, the latest complete one is chosen.
        config: Settings of this run.
        identity: Identity of this run, see checkpoint.identity.
        unattended: If the checkpoint is damaged, fall back to the previous one.
        allow_change: Settings that may differ from those of the checkpoint.

    Raises:
        ValueError: On every rank, if settings have changed, or for damage, naming the previous checkpoint.
    """
    damaged: list[str] = []
    # Rank 0 chooses, because the hosts may see a new folder on a shared file system at different times.
    path = comm.from_rank_0(
        "run folder", lambda: split_resume(resume)[1] or retention.find_latest(folder)
    )

    def check(meta: dict[str, Any]) -> None:
        refuse_changes(meta["identity"], identity, allow_change)
        if meta["step"] > config.num_steps:
            raise ValueError(
                f"{path} is at step {meta['step']}, but the run would end at step {config.num_steps}"
            )

    while True:
        try:
            return checkpoint.open_verified(path, check)
        except DamagedError as error:
            damaged.append(str(error))
        older = comm.from_rank_0("run folder", partial(retention.find_older, path))
        if older is None:
            raise ValueError(
                f"{'; '.join(damaged)}; {folder} has no older complete checkpoint: start a new run, without --resume"
            )
        # A user may prefer to restore the damaged file. Unattended runs fall back.
        if not unattended:
            raise ValueError(
                f"{damaged[-1]}; --resume {older} resumes from the previous checkpoint"
            )
        if comm.rank() == 0:
            logger.warning("%s; trying the previous one, %s", damaged[-1], older.name)
        path = older


def set_newer_aside(saved: Saved) -> None:
    """Make the checkpoint that a run resumes from the last one of its folder. Collective.

    Raises:
        ValueError: On every rank, if a newer one cannot be renamed, because the next `--resume latest`
            would choose it.
    """

    def rename() -> None:
        for path in reversed(retention.list_complete(saved.path.parents[1])):
            if retention.step_of(path) > saved.step:
                retention.set_aside(path)

    comm.from_rank_0(f"setting aside checkpoints newer than {saved.path}", rename)


def record_changes(
    folder: Path, saved: Saved | None, config: Config, identity: dict[str, Any]
) -> None:
    """Add a line to changes.jsonl for every changed setting, and for another length or number of ranks. Collective.

    Each change is logged too. Lines of the checkpoint's step or later are dropped, as the metrics of those steps are.
    """
    if saved is None:
        return
    changes = find_changes(saved.meta["identity"], identity)
    for name, old, new in (
        ("steps", saved.meta["num_steps"], config.num_steps),
        ("ranks", saved.meta["shape"]["ranks"], comm.size()),
    ):
        if old != new:
            changes.append(Change(name, old, new))
    path = folder / CHANGES
    with comm.all_or_none(f"writing {path}"):
        if comm.rank() == 0 and (changes or path.exists()):
            before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            lines = [line for line in before if json.loads(line)["step"] < saved.step]
            for change in changes:
                lines.append(json.dumps({"step": saved.step, **change._asdict()}))
                logger.warning(
                    "from step %d on, %s is %r instead of %r",
                    saved.step,
                    change.setting,
                    change.new,
                    change.old,
                )
            write_text(path, "".join(f"{line}\n" for line in lines))


def restore(
    saved: Saved, config: Config, model: nn.Module, build_engine: Callable[[], Engine]
) -> Engine:
    """Build the engine and load the checkpoint into it; reshard if its shape differs. Collective.

    Args:
        saved: The checkpoint.
        config: Settings of this run.
        model: The model of the engine.
        build_engine: Wraps the model; called once.

    Raises:
        ValueError: On every rank, if the files do not fit.
    """
    if saved.meta["shape"] == checkpoint.shape(config, comm.size()):
        # Every rank finds its own part, random generators included, so the run is bit-identical.
        engine = build_engine()
        with _settings_kept(engine):
            checkpoint.load_engine(saved, engine)
        return engine
    if comm.rank() == 0:
        before = "ranks={ranks}, ZeRO stage {stage}, {precision}".format_map(saved.meta["shape"])
        logger.warning(
            "%s was written with %s: random draws, such as dropout, will differ", saved.path, before
        )
    # Before the engine is built, because ZeRO 3 leaves each rank only a part of each parameter.
    order = reshard.optimizer_order(model, config.optim)
    reshard.load_untrained(saved, model, set(order))
    engine = build_engine()
    with _settings_kept(engine):
        reshard.load_trained(saved, engine, order)
    return engine


@contextmanager
def _settings_kept(engine: Engine) -> Iterator[None]:
    """Load a checkpoint in the block, without the optimizer settings that DeepSpeed would restore with it."""
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
