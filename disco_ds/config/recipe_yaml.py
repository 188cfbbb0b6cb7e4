"""The text of recipes and overrides: YAML whose numbers are what a person means, and `a.b=value`.

Whatever is given twice is refused: of two values one would silently be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; a recipe means a number. PyYAML lets the last of equal keys win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


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


def split_overrides(items: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Keys and values of several overrides, wider keys first: `optim={...}` leaves what `optim.lr=...` says.

    Raises: ValueError for a key that is given twice, also as a part of a wider one's value.
    """
    seen: dict[tuple[str, ...], str] = {}
    found = [split_override(item) for item in items]
    for item, (keys, value) in zip(items, found, strict=True):
        for key in _given(tuple(keys), value):
            if key in seen:
                raise ValueError(
                    f"{'.'.join(key)} is given twice, by {seen[key]!r} and {item!r}: give it once; a shell turns "
                    "{a..b} and {a,b} into several overrides where they are not quoted"
                )
            seen[key] = item
    return sorted(found, key=lambda override: len(override[0]))


def _given(keys: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    """A key, and those within its value."""
    yield keys
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _given((*keys, str(key)), part)


def assign(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Replace what stands at this key, a mapping too."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value
