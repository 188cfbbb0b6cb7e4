"""From a recipe's name or file and its overrides to a Config, with a message for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from disco_ds.config.data import SourceSettings
from disco_ds.config.ds_config import read_ds_config
from disco_ds.config.nearest import did_you_mean
from disco_ds.config.recipe import PACKAGE, Config
from disco_ds.config.recipe_yaml import assign, parse, split_overrides
from disco_ds.config.renamed import refuse_renamed, translate_renamed


def load_config(recipe: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe, apply `a.b=value` overrides, each key once, check everything.

    Args:    recipe: a name in disco_ds/recipes or a path; overrides: dotted keys, values in YAML.
    Raises:  ValueError naming the file, the key, what it got and the nearest valid name.

    The config.yaml of a run that an older version has written may have keys that are called otherwise now.
    """
    path = find_recipe(recipe)
    try:
        tree = parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {type(tree).__name__}")
    if path.name == "config.yaml" and (path.parent / "ds_config.json").is_file():  # a run folder's, not a user's
        tree = translate_renamed(tree)
    assigned = split_overrides(overrides or [])
    for keys, value in assigned:
        if keys == ["deepspeed"] or keys[0] != "deepspeed":
            assign(tree, keys, value)
    refuse_renamed(tree, overrides or [], str(path))
    tree["deepspeed"] = read_ds_config(tree.get("deepspeed", "zero1"), folder=path.parent)
    for keys, value in assigned:
        if len(keys) > 1 and keys[0] == "deepspeed":
            assign(tree, keys, value)
    return check_config(tree, str(path))


def check_config(tree: dict[str, Any], origin: str) -> Config:
    """Build the Config of a plain mapping; `origin` is named in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item, tree) for item in error.errors()]
        raise ValueError(f"{origin}: " + "\n  ".join(lines)) from None


def find_recipe(recipe: str | Path) -> Path:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ValueError(f"recipe {recipe} does not exist")
        return path
    known = sorted(item.stem for item in (PACKAGE / "recipes").glob("*.yaml"))
    if str(recipe) not in known:
        raise ValueError(f"unknown recipe {str(recipe)!r}{did_you_mean(str(recipe), known)}; known: {', '.join(known)}")
    return PACKAGE / "recipes" / f"{recipe}.yaml"


def _explain(item: Any, tree: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "recipe"
    if item["type"] == "extra_forbidden":
        fields = _fields(item["loc"][:-1])
        hint = did_you_mean(str(item["loc"][-1]), fields) or f"; valid: {', '.join(fields)}"
        return f"unknown key {key}{hint}"
    if item["type"] == "missing":
        return f"{key} is missing"
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _fields(path: tuple[str | int, ...]) -> list[str]:
    """Valid keys of the settings at this path."""
    if path[:2] == ("data", "sources"):
        return list(SourceSettings.model_fields)
    model: type[BaseModel] = Config
    for part in path:
        model = model.model_fields[part].annotation  # type: ignore[assignment,index]
    return list(model.model_fields)
