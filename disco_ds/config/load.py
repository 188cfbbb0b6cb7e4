"""Build the Config from a recipe and overrides, and report every mistake in them."""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from disco_ds.config.ds_config import read_ds_config
from disco_ds.config.recipe import PACKAGE, Config
from disco_ds.config.recipe_yaml import assign, read_settings, split_overrides
from disco_ds.config.settings import Settings, Tree, explain_value
from disco_ds.names import did_you_mean, shorten, suggest


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply `a.b=value` overrides, and check every key and value.

    This function does not check whether the loss, the model and the data exist. The start of a run and
    `disco-ds doctor` check that. `disco-ds train --dry-run` checks the loss and the model.

    Args:
        recipe: The name of a bundled recipe, or a path.
        overrides: Strings of the form `a.b=value`, with the value in YAML. Each key may occur only once.

    Raises:
        ValueError: If a key or value is invalid. The message names the file and the key. It also contains
            the invalid value or, for an unknown key, a similar valid key if there is one.
    """
    path = find_recipe(recipe)
    tree = read_settings(path, "recipe")
    assigned = split_overrides(overrides)
    tree.setdefault("deepspeed", "zero1")
    tree |= {keys[0]: value for keys, value in assigned if len(keys) == 1}
    tree["deepspeed"] = read_ds_config(tree["deepspeed"], path.parent)
    for keys, value in assigned:
        if len(keys) > 1:
            assign(tree, keys, value)
    return check_config(tree, f"{path} and overrides" if overrides else str(path))


def check_config(tree: Tree, origin: str) -> Config:
    """Build a Config from a plain mapping.

    Args:
        tree: The settings as a nested mapping.
        origin: Where the settings come from, for error messages.

    Raises:
        ValueError: If a setting is invalid. The message lists the problems, one per line.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = "\n  ".join(map(_explain, error.errors()))
        raise ValueError(f"{origin}: {problems}") from None


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe that is given as a path or as the name of a bundled recipe.

    Raises:
        ValueError: If `recipe` is not a path and no bundled recipe has this name.
    """
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or os.path.lexists(path):
        return path
    known = {item.stem: item for item in sorted((PACKAGE / "recipes").glob("*.yaml"))}
    if str(recipe) not in known:
        raise ValueError(
            f"unknown recipe {shorten(recipe)!r}{did_you_mean(str(recipe), known)}; bundled recipes: "
            f"{', '.join(known)}"
        )
    return known[str(recipe)]


def _explain(item: Any) -> str:
    """Return the message for one item of pydantic's ValidationError."""
    key = ".".join(map(str, item["loc"]))
    *outer, name = item["loc"] or ("recipe",)
    if item["type"] == "extra_forbidden":
        explained = explain_word(str(name))
        hint = f"; {explained}" if explained else suggest(str(name), _find_fields(outer))
        return f"unknown key {key}{hint}"
    if item["type"] == "missing":
        return f"{key} is missing: set it"
    return explain_value(key, item)


def _find_fields(path: Sequence[str | int]) -> dict[str, FieldInfo]:
    """Return the fields of a group of settings, such as the group at the path ("data", "remote")."""
    model: Any = Config
    for part in path:
        # The index or name of an item of a list or mapping is no field.
        if part in model.model_fields:
            model = next(_find_groups(model.model_fields[part].annotation), model)
    return model.model_fields


def _find_groups(annotation: Any) -> Iterator[type[Settings]]:
    """Yield the groups of settings in a type, such as SourceSettings in `tuple[SourceSettings, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _find_groups(part)


@cache
def read_words() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the table open_clip_flags.yaml of other trainers' flags and settings, as {section: {flag: row}}.

    The sections are "flags" (open_clip_train's flags) and "other_words" (names from other trainers).
    A row has at least one of these keys: `ours`, a list of our corresponding settings or command-line
    options, and `note`, an explanation of the flag. If only one major release of open_clip has the
    flag, `only` names this release.
    """
    return read_settings(Path(__file__).with_name("open_clip_flags.yaml"), "table")


def explain_word(name: str) -> str | None:
    """Return a hint about our equivalent of another trainer's flag, or None if the flag is unknown."""
    word = name.lower().lstrip("-").replace("_", "-")
    words = read_words()
    row = words["flags"].get(word) or words["other_words"].get(word)
    if row is None:
        return None
    note = row.get("note", "")
    if "ours" not in row:
        return f"{note} (docs/settings.md)"
    hint = f"; {note}" if note else ""
    return f"here it is {' or '.join(row['ours'])}{hint}"
