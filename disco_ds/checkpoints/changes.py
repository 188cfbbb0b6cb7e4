"""Compare the settings of a resumed run with the checkpoint's. Refuse changes unless --allow-change names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from disco_ds.config import OptimSettings, Tree
from disco_ds.distributed.hosts import flatten

MAY_BE_ALLOWED = {
    "global_batch",
    # It may change even without --allow-change. It is listed because users often name it along with global_batch.
    "micro_batch",
    *(
        f"optim.{name}"
        for name in OptimSettings.model_fields
        if name not in ("name", "factory", "elementwise", "image", "text")
    ),
    *(f"data.{name}" for name in ("augment", "captions", "crop_ratio", "crop_scale")),
    *(f"model.{name}" for name in ("max_scale", "patch_dropout")),
}
"""Settings that --allow-change may name. The other settings in checkpoint.identity must never change on resume: they
decide which samples are read, or to which model, optimizer and loss the saved state belongs."""


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
    if any(is_within(name, ["model.preprocess"]) for name in changed):
        lines.append(
            "model.preprocess comes from the folder of model.pretrained: is that folder missing?"
        )
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
            known = ", ".join(sorted(MAY_BE_ALLOWED))
            raise ValueError(
                f"--allow-change {name}: not a setting that may change within a run; choose from: {known}"
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
