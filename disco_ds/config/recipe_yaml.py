"""Parse recipes (YAML) and overrides (`a.b=value`).

A key that is given twice is refused, because one of the two values would silently be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """A loader that reads 1e-3 as a number, unlike YAML 1.1, and refuses duplicate keys, unlike
    PyYAML."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return node


# A run may be named 2026-01-31: dates are text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """A dumper that quotes strings that _Loader would read as numbers."""


for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )


def parse(text: str, origin: str) -> Any:
    """Return the value of a YAML document.

    Args:
        text: The document.
        origin: Name of the document for error messages.

    Raises:
        ValueError: If it is not valid YAML, naming the origin and the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # The origin of an override quotes its text, which is a single line.
        where = f"line {mark.line + 1}: " if mark and "\n" in text.strip() else ""
        raise ValueError(
            f"{origin} is not valid YAML: {where}{error.problem or error.context}"
        ) from None
    except RecursionError:
        raise ValueError(f"{origin} is nested too deeply") from None
    # Characters that YAML does not allow, or integers with thousands of digits.
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{origin} is not valid YAML: {str(error).splitlines()[0]}") from None


def find_line(text: str, keys: Sequence[str]) -> int | None:
    """Return the line number (from 1) of the key at this path in a YAML document; None if it is
    missing."""
    line = None
    node = yaml.compose(text, Loader=_Loader)
    for key in keys:
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((entry for entry in entries if entry[0].value == key), None)
        if found is None:
            return None
        line = found[0].start_mark.line + 1
        node = found[1]
    return line


def split_override(item: str) -> tuple[list[str], Any]:
    """Split `a.b=value` into keys and value.

    Raises:
        ValueError: If the text has another form.
    """
    key, separator, text = item.partition("=")
    keys = key.split(".")
    if not separator or not all(keys):
        raise ValueError(f"override {item!r} is not of the form a.b=value")
    return keys, parse(text, f"override {item!r}")


def split_overrides(items: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Split several overrides, outer keys first, so that `optim={...}` does not undo `optim.lr=...`.

    Raises:
        ValueError: If a key is given twice, also inside the value of an outer key.
    """
    seen: dict[tuple[str, ...], str] = {}
    found = [split_override(item) for item in items]
    for item, (keys, value) in zip(items, found, strict=True):
        for key in _all_keys(tuple(keys), value):
            if key in seen:
                raise ValueError(
                    f"{'.'.join(key)} is given twice, by {seen[key]!r} and {item!r}: give it once. A shell turns "
                    "unquoted {a..b} and {a,b} into several overrides."
                )
            seen[key] = item
    return sorted(found, key=lambda override: len(override[0]))


def _all_keys(keys: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    """Yield a key and the keys inside its value."""
    yield keys
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _all_keys((*keys, str(key)), part)


def assign(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set the value at this path of keys, replacing a mapping as well."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value
