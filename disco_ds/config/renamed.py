"""Keys of settings that have been renamed: refused in a recipe or an override, translated in what older runs wrote."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from disco_ds.config.recipe_yaml import assign, split_override

RENAMED = {"loss.options.wire": "loss.options.comm_dtype"}
"""Former dotted key -> the key now. Those of loss.options belong to the losses of this package, not to a user's own."""


def refuse_renamed(tree: dict[str, Any], overrides: Sequence[str], origin: str) -> None:
    """Refuse a former key, naming the override or else the file that has it, and the key now.

    Args:   tree: the settings with the overrides applied; origin: the file they were read from.
    Raises: ValueError.
    """
    for old, new in _find(tree).items():
        given = (item for item in overrides if _holder(_tree_of(item), old) is not None)
        where = next((f"override {item!r}" for item in given), origin)
        raise ValueError(f"{where}: {old} is now called {new}")


def translate_renamed(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings that an older version recorded, by their keys now."""
    tree = copy.deepcopy(tree)
    for old, new in _find(tree).items():
        holder = _holder(tree, old)
        assert holder is not None
        assign(tree, new.split("."), holder.pop(old.rpartition(".")[2]))
    return tree


def _find(tree: dict[str, Any]) -> dict[str, str]:
    """The entries of RENAMED whose former key the settings have."""
    loss = tree.get("loss")
    own_loss = isinstance(loss, dict) and ":" in str(loss.get("name"))
    found = {old: new for old, new in RENAMED.items() if _holder(tree, old) is not None}
    return {old: new for old, new in found.items() if not (own_loss and old.startswith("loss.options."))}


def _tree_of(override: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    assign(tree, *split_override(override))
    return tree


def _holder(tree: Any, key: str) -> dict[str, Any] | None:
    """The mapping that holds the last part of a dotted key, if there is one."""
    *outer, last = key.split(".")
    for part in outer:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) and last in tree else None
