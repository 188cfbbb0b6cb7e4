"""The text of recipes and overrides: YAML whose numbers are what a person means, and `a.b=value`.

Whatever is given twice is refused: of two values one would silently be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

MAX_VALUES = 100_000
"""In one document. A few lines of anchors can stand for billions, all of which would be written to config.yaml."""


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


# A name such as 2026-01-31 is text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """Quotes the strings that _Loader would read as numbers."""


for _side in (_Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse(text: str, origin: str) -> Any:
    """The value of a YAML document. Raises: ValueError naming the origin and the line."""
    try:
        value = yaml.load(text, Loader=_Loader)
        if _count(value, {}) > MAX_VALUES:
            raise ValueError(f"its anchors stand for more than {MAX_VALUES:,} values")
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # The text of an override is a single line, and is quoted whole by its origin.
        where = f"line {mark.line + 1}: " if mark and "\n" in text.strip() else ""
        raise ValueError(f"{origin} is not valid YAML: {where}{error.problem or error.context}") from None
    except RecursionError:
        raise ValueError(f"{origin} is nested too deeply to be settings, or contains itself") from None
    except (yaml.YAMLError, ValueError) as error:  # characters YAML does not allow; integers of thousands of digits
        raise ValueError(f"{origin} is not valid YAML: {str(error).splitlines()[0]}") from None


def _count(value: Any, known: dict[int, int]) -> int:
    """The values in a tree, those that an anchor repeats each time. `known`: by id, what was counted already."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(value)]


def find_line(text: str, keys: Sequence[str]) -> int | None:
    """The line of a YAML document, from 1, where the key at this path stands; None if it has none."""
    line, node = None, yaml.compose(text, Loader=_Loader)
    for key in keys:
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(name, value) for name, value in entries if name.value == key]
        if not found:
            return None
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line


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
