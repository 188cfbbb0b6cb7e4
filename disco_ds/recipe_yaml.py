"""The text of recipes and overrides: YAML whose numbers are what a person means, and `a.b=value`."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; a recipe means a number."""


class Dumper(yaml.SafeDumper):
    """Quotes the strings that _Loader would read as numbers."""


for _side in (_Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse(text: str, origin: str) -> Any:
    """Raises: ValueError naming the origin."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{origin} is not valid YAML: {error}") from None


def split_override(item: str) -> tuple[list[str], Any]:
    """Keys and value of `a.b=value`. Raises: ValueError for anything else."""
    key, separator, text = item.partition("=")
    keys = key.split(".")
    if not separator or not all(keys):
        raise ValueError(f"override {item!r} is not of the form a.b=value")
    return keys, parse(text, f"override {item!r}")


def assign(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Replace what stands at this key, a mapping too."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value
