"""Find the checkpoint from which a run resumes, and compare its settings. state.py loads its content."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.checkpoints import keep
from disco_ds.checkpoints.checkpoint import Checkpoint, verify_on_all_ranks
from disco_ds.config import Config, OptimSettings, Tree
from disco_ds.distributed import comm
from disco_ds.distributed.hosts import flatten
from disco_ds.runs.run_folder import split_resume

DATA_MAY_CHANGE = {
    "workers",
    "prefetch",
    "max_broken",
    "shards",
    "manifest",
    "remote",
    "options",
}
"""Data settings that are not compared when a run is resumed, because they do not affect the samples or their order.

The shards are compared by their fingerprint, not by the settings that locate them.
"""

SOURCE_MAY_CHANGE = {"shards", "manifest", "source", "options"}
"""Settings of a data.sources entry that are not compared when a run is resumed.

They do not affect the samples or their order. The shards are compared by their fingerprint.
"""

MODEL_MAY_CHANGE = {
    "name",
    "factory",
    "options",
    "pretrained",
    "pretrained_image",
    "activation_checkpointing",
    "compile",
    "towers",
}
"""Model settings that are not compared when a run is resumed.

The architecture is compared instead of name, factory and options. The settings for initial weights do not
matter, because a resumed run takes its weights from the checkpoint.
"""

COMMUNICATION_SETTINGS = ("overlap_comm", "reduce_bucket_size")
"""ZeRO settings for gradient communication, which may change without resharding.

They do not affect which part of the state each rank holds.
"""
MAY_BE_ALLOWED = {
    "global_batch",
    # It may change even without --allow-change. It is listed because users often name it along with global_batch.
    "micro_batch",
    *(
        f"optim.{name}"
        for name in OptimSettings.model_fields
        if name not in ("name", "factory", "elementwise", "image", "text")
    ),
    "data.augment",
    "data.captions",
    "data.crop_ratio",
    "data.crop_scale",
    "model.max_scale",
    "model.patch_dropout",
    "loss.options.gamma_min",
    "loss.options.gamma_epochs",
}
"""Settings that --allow-change may name. The other settings in identity_of must never change on resume: they
decide which samples are read, or to which model, optimizer and loss the saved state belongs."""


def find_checkpoint(
    folder: Path,
    resume: str,
    config: Config,
    identify: Callable[[Config], Tree],
    unattended: bool,
    allow_change: Sequence[str] = (),
) -> Checkpoint:
    """Find the checkpoint to resume from and verify all of its files. Collective.

    Args:
        folder: The run folder.
        resume: Value of --resume. If it does not name a checkpoint, the latest complete one is chosen.
        config: Settings of this run.
        identify: Returns the settings of a stage that must stay the same on resume, such as those in
            identity_of. It does not communicate.
        unattended: Whether to fall back to the previous checkpoint if this one is damaged.
        allow_change: Names of settings that may differ from those in the checkpoint.

    Raises:
        ValueError: On every rank, if settings not in `allow_change` have changed, or if there is no intact checkpoint
            that may be used. If the checkpoint is damaged, the message names the previous one.
    """
    # Only rank 0 chooses: a new folder on a shared file system may become visible to some hosts late.
    path = comm.from_rank_0(
        "run folder", lambda: split_resume(resume)[1] or keep.find_latest(folder)
    )

    while True:
        try:
            read_meta = partial(keep.read_meta, path)
            meta = comm.from_rank_0("verifying the checkpoint", read_meta, keep.DamagedError)
            # Check the settings first: verifying a large checkpoint takes minutes, which a refusal would waste.
            with comm.all_or_none(f"checkpoint {path}"):
                keep.check_format(path, meta)
                # Compare with the stage of the checkpoint's last sample. The next one may belong to the next stage.
                stage = config.at_sample(meta["samples"] - 1)
                refuse_changes(meta["identity"], identify(stage), allow_change)
                last_step, _ = config.find_end(meta["step"], meta["samples"])
                if meta["step"] > last_step:
                    raise ValueError(
                        f"{path} is at step {meta['step']}, but the run would end at step {last_step}"
                    )
            saved = Checkpoint(path, meta)
            verify_on_all_ranks(saved)
            return saved
        except keep.DamagedError as error:
            damage = error
        older = comm.from_rank_0("run folder", partial(keep.find_older, path))
        if older is None:
            raise ValueError(
                f"{damage}; {folder} has no older complete checkpoint: start a new run, without --resume"
            )
        # Only an unattended run falls back by itself. A user may prefer to restore the damaged file.
        if not unattended:
            raise ValueError(f"{damage}; --resume {older} resumes from the previous checkpoint")
        comm.warn(f"{damage}; trying the previous one, {older.name}")
        path = older


def set_newer_aside(saved: Checkpoint) -> None:
    """Set aside all checkpoints that are newer than the one a run resumes from. Collective.

    Raises:
        ValueError: On every rank, if a newer checkpoint cannot be renamed. It must not stay, because the
            next `--resume latest` would choose it.
    """

    def rename() -> None:
        for path in reversed(keep.list_complete(saved.path.parents[1])):
            if keep.step_of(path) > saved.step:
                keep.set_aside(path)

    comm.from_rank_0(f"setting aside checkpoints newer than {saved.path}", rename)


def log_changes(saved: Checkpoint, num_steps: int, identity: Tree, shape: Tree) -> None:
    """On rank 0, log how this run differs from the checkpoint: settings, steps, ranks, ZeRO stage and precision.

    Args:
        saved: The checkpoint.
        num_steps: Length of this run in steps.
        identity: This run's settings that must stay the same on resume, in the stage in which the checkpoint was saved.
        shape: The result of shape_of for this run.
    """
    changes = find_changes(
        {**saved.meta["identity"], **saved.meta["shape"], "steps": saved.meta["num_steps"]},
        {**identity, **shape, "steps": num_steps},
    )
    for name, (old, new) in changes.items():
        comm.warn(f"from step {saved.step} on, {name} is {new!r} instead of {old!r}")


# Settings that must stay the same


def identity_of(config: Config, fingerprint: str, architecture: Tree) -> Tree:
    """Return the settings that must stay the same when a run is resumed, keyed by their names in a recipe.

    Args:
        config: Settings of the run.
        fingerprint: Fingerprint of the shards.
        architecture: The model's config in open_clip's format.
    """
    excluded = dict.fromkeys(DATA_MAY_CHANGE, True) | {"sources": {"__all__": SOURCE_MAY_CHANGE}}
    return {
        "loss": config.loss.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json", exclude=MODEL_MAY_CHANGE),
        "model.config": architecture,
        "optim": config.optim.model_dump(mode="json", exclude={"elementwise"}),
        "global_batch": config.global_batch,
        "seed": config.seed,
        "data": config.data.model_dump(mode="json", exclude=excluded),
        "data.shards": fingerprint,
    }


def shape_of(config: Config, ranks: int) -> Tree:
    """Return, as JSON values, the settings that decide which part of the state each rank holds.

    If they have changed when a run is resumed, state.py reads the files of all ranks.
    """
    zero = config.deepspeed.get("zero_optimization", {})
    return {
        "ranks": ranks,
        "stage": config.zero_stage,
        "precision": config.precision,
        "zero_optimization": {
            key: value for key, value in zero.items() if key not in COMMUNICATION_SETTINGS
        },
    }


def refuse_changes(saved: Tree, now: Tree, allowed: Sequence[str] = ()) -> None:
    """Refuse settings that differ from those in the checkpoint, unless --allow-change names them.

    Args:
        saved: The settings that must stay the same on resume, as read from the checkpoint.
        now: The settings of this run that must stay the same on resume.
        allowed: Dotted names given to --allow-change. Each name also allows all settings nested below it.

    Raises:
        ValueError: If a setting has changed and is not allowed. The message names each such setting. If
            --allow-change can allow all of them, the message also shows the option to use.
    """
    changes = find_changes(saved, now)
    changed = [name for name in changes if not is_within(name, allowed)]
    if not changed:
        return
    lines = ["the checkpoint was made with other settings:"]
    for name in changed:
        old, new = changes[name]
        lines.append(f"{name}: {old!r} in the checkpoint, {new!r} now")
    if all(is_within(name, MAY_BE_ALLOWED) for name in changed):
        names = [
            setting
            for setting in sorted(MAY_BE_ALLOWED)
            if any(is_within(name, [setting]) for name in changed)
        ]
        lines.append(f"--allow-change {','.join(names)} resumes with the new values")
    raise ValueError("\n  ".join(lines))


def refuse_unchangeable(allowed: Sequence[str], resume: str | None) -> None:
    """Refuse an --allow-change that cannot be used.

    Args:
        allowed: Dotted names given to --allow-change.
        resume: Value of --resume; None for a new run.

    Raises:
        ValueError: If a name is not a setting that may change within a run, or if the run is not resumed.
    """
    if allowed and not resume:
        raise ValueError("--allow-change needs --resume: a new run accepts any settings")
    for name in allowed:
        if not is_within(name, MAY_BE_ALLOWED):
            raise ValueError(
                f"--allow-change {name}: not a setting that may change within a run; choose from: "
                + ", ".join(sorted(MAY_BE_ALLOWED))
            )


def find_changes(saved: Tree, now: Tree) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two nested dicts: dotted name -> (old value, new value).

    A setting that is missing from one of the dicts counts as None.
    """
    # JSON turns the tuples of `now` into lists, as in the checkpoint.
    old, new = (dict(flatten(json.loads(json.dumps(tree)))) for tree in (saved, now))
    values = {name: (old.get(name), new.get(name)) for name in [*new, *old]}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def is_within(name: str, settings: Iterable[str]) -> bool:
    """Return whether a dotted name is one of these settings, or inside one of them."""
    return any(f"{name}.".startswith(f"{setting}.") for setting in settings)
