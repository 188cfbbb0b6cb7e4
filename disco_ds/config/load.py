"""From a recipe's name or file and its overrides to a Config, with a message for every mistake."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from disco_ds.config.data import SourceSettings
from disco_ds.config.ds_config import read_ds_config
from disco_ds.config.open_clip_flags import explain_word
from disco_ds.config.recipe import PACKAGE, Config
from disco_ds.config.recipe_yaml import assign, find_line, parse, split_overrides
from disco_ds.config.text_file import read_text
from disco_ds.names import did_you_mean, shorten, suggest

MAX_PROBLEMS = 3
"""Problems of one recipe that a message names; the rest are counted."""
_OVERRIDE = "override: "


def load_config(recipe: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe, apply `a.b=value` overrides, each key once, and check every key and value.

    What takes the losses, the model or the data to know is checked by the start, `train --dry-run` and doctor: whether
    a loss or a model exists, and the shards.

    Args:    recipe: a name in disco_ds/recipes or a path; overrides: dotted keys, values in YAML.
    Raises:  ValueError naming the file, the key, what it got and the nearest valid name.
    """
    path = find_recipe(recipe)
    text = read_text(path, "recipe")
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {type(tree).__name__}")
    assigned = split_overrides(overrides or [])
    for keys, value in assigned:
        if keys == ["deepspeed"] or keys[0] != "deepspeed":
            assign(tree, keys, value)
    tree["deepspeed"] = read_ds_config(tree.get("deepspeed", "zero1"), folder=path.parent)
    for keys, value in assigned:
        if len(keys) > 1 and keys[0] == "deepspeed":
            assign(tree, keys, value)
    given = [keys for keys, _ in assigned]

    def locate(path: list[str]) -> str:
        """Name what sets a key: an override, or a line of the file; empty for what both may have a part in."""
        if any(keys == path[: len(keys)] for keys in given):
            return _OVERRIDE
        both = any(keys[: len(path)] == path for keys in given)
        line = None if both else find_line(text, path)
        return f"line {line}: " if line else ""

    return check_config(tree, str(path), locate)


def check_config(
    tree: dict[str, Any], origin: str, locate: Callable[[list[str]], str] = lambda path: ""
) -> Config:
    """Build the Config of a plain mapping.

    Args:    origin: the file, named in errors; locate: where in it a key stands, or that an override has set it.
    Raises:  ValueError, of MAX_PROBLEMS lines, and one for each further word that another trainer has.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        found = [(locate([str(part) for part in item["loc"]]), item) for item in error.errors()]
        found.sort(key=lambda each: (each[0] == _OVERRIDE, each[1]["type"] == "missing"))
        # Of words from another trainer all are explained, or its command line would be translated three at a time.
        shown = [each for n, each in enumerate(found) if n < MAX_PROBLEMS or _is_foreign(each[1])]
        lines = [where + _explain(item) for where, item in shown]
        if len(found) > len(shown):
            lines[-1] += f" (and {len(found) - len(shown)} more problems)"
        head = "" if shown[0][0] == _OVERRIDE else f"{origin}: "
        raise ValueError(head + "\n  ".join(lines)) from None


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe that is named as on the command line. Raises: ValueError."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or os.path.lexists(path):
        return path
    known = sorted(item.stem for item in (PACKAGE / "recipes").glob("*.yaml"))
    if str(recipe) not in known:
        raise ValueError(
            f"unknown recipe {shorten(recipe)!r}{did_you_mean(str(recipe), known)}; known: {', '.join(known)}"
        )
    return PACKAGE / "recipes" / f"{recipe}.yaml"


def _is_foreign(item: Any) -> bool:
    """Whether a key is another trainer's; within a section it is rather one of ours in the wrong place."""
    return (
        item["type"] == "extra_forbidden"
        and len(item["loc"]) == 1
        and bool(explain_word(str(item["loc"][0])))
    )


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "recipe"
    if item["type"] == "extra_forbidden":
        name = str(item["loc"][-1])
        explained = explain_word(name)
        return f"unknown key {key}{f'; {explained}' if explained else suggest(name, _fields(item['loc'][:-1]))}"
    if item["type"] == "missing":
        return f"{key} is missing"
    if item["type"] == "value_error":
        text = item["msg"].removeprefix("Value error, ")
        return text if key.rpartition(".")[2] in text or key == "recipe" else f"{key}: {text}"
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, got {shorten(repr(item['input']))}"


def _fields(path: tuple[str | int, ...]) -> list[str]:
    """Valid keys of the settings at this path."""
    if path[:2] == ("data", "sources"):
        return list(SourceSettings.model_fields)
    model: type[BaseModel] = Config
    for part in path:
        model = model.model_fields[part].annotation  # type: ignore[assignment,index]
    return list(model.model_fields)
