"""Settings that differ from those of the checkpoint that a run goes on from: refused, or allowed by --allow-change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from disco_ds.config import OptimSettings

MAY_BE_ALLOWED = {
    *(
        f"optim.{name}"
        for name in OptimSettings.model_fields
        if name not in ("name", "image", "text")
    ),
    *(f"data.{name}" for name in ("augment", "captions", "crop_ratio", "crop_scale")),
    *(f"model.{name}" for name in ("max_scale", "patch_dropout")),
}
"""What --allow-change may name. Other settings decide which samples come, what the loss's state means, or which group
of parameters the optimizer's state belongs to, so that a run could not go on with another value."""


def refuse_changes(saved: dict[str, Any], now: dict[str, Any], allowed: Sequence[str] = ()) -> None:
    """Refuse settings that differ from the checkpoint's, except those of --allow-change and what is within them.

    Raises: ValueError naming each, and the --allow-change that would go on if there is one.
    """
    changed = [
        change for change in find_changes(saved, now) if not _is_within(change.setting, allowed)
    ]
    if changed:
        names = [
            name
            for name in sorted(MAY_BE_ALLOWED)
            if any(_is_within(each.setting, [name]) for each in changed)
        ]
        possible = all(_is_within(change.setting, MAY_BE_ALLOWED) for change in changed)
        remedy = (
            f"\n  --allow-change {','.join(names)} goes on with the new values" if possible else ""
        )
        what = "\n  ".join(map(_describe, changed))
        raise ValueError(f"the checkpoint was made with other settings:\n  {what}{remedy}")


def refuse_unchangeable(allowed: Sequence[str], resume: str | None) -> None:
    """Raises: ValueError for names of --allow-change that are unknown, or of what must not change within a run."""
    if allowed and not resume:
        raise ValueError("--allow-change goes with --resume: a new run takes any settings")
    for name in allowed:
        if not _is_within(name, MAY_BE_ALLOWED):
            known = ", ".join(sorted(MAY_BE_ALLOWED))
            raise ValueError(
                f"--allow-change {name}: there is no such setting, or a run cannot change it: samples, loss or "
                f"optimizer state would no longer fit; it may name {known}"
            )


class Change(NamedTuple):
    """A setting, by its dotted name, that is not as it was when a checkpoint was written."""

    setting: str
    old: Any
    new: Any


def find_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """What differs between two identities."""
    return [change for key in now for change in _differences(key, saved.get(key), now[key])]


def _differences(key: str, saved: Any, now: Any) -> list[Change]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(set(saved) | set(now))
        return [
            change
            for part in keys
            for change in _differences(f"{key}.{part}", saved.get(part), now.get(part))
        ]
    # JSON turns tuples into lists; compare as JSON would.
    return (
        []
        if json.loads(json.dumps(saved)) == json.loads(json.dumps(now))
        else [Change(key, saved, now)]
    )


def _is_within(name: str, settings: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{setting}.") for setting in settings)


def _describe(change: Change) -> str:
    key, saved, now = change
    hint = ""
    if key.startswith("model.preprocess.") and now is None:
        hint = "; it came with the weights of model.pretrained, whose folder is gone or has changed"
    return f"{key}: {saved!r} in the checkpoint, {now!r} now{hint}"
