"""Parse recipes (YAML), ds_configs (JSON) and overrides (`a.b=value`).

Duplicate keys are refused, because otherwise all values but one would be silently lost.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from disco_ds.config.settings import Tree
from disco_ds.config.text_file import read_text


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads numbers and booleans as in YAML 1.2, and refuses duplicate keys.

    PyYAML's SafeLoader reads YAML 1.1, in which `no` is false, `0100` is 64 and `1:30` is 90.
    """

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


# Keep only PyYAML's patterns for null and merge keys. Dates become text, so that a run can be named 2026-01-31.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.endswith((":null", ":merge"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PATTERNS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+)",
    "float": r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)",
}


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes any string that _Loader would otherwise read as a number or a boolean."""


for _tag, _pattern in _PATTERNS.items():
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list("-+.0123456789tTfF")
        )


def dump(tree: Tree) -> str:
    """Return the text of a YAML document, which `parse` reads as the same values."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def parse(text: str, origin: str) -> Any:
    """Parse a YAML document and return its value.

    Args:
        text: The text of the document.
        origin: Name of the document for error messages.

    Raises:
        ValueError: If the text is not valid YAML. The message contains the origin and the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # For a single line, such as an override, the origin contains the line itself.
        where = f"line {mark.line + 1}: " if mark and "\n" in text.strip() else ""
        raise ValueError(
            f"{origin} has a syntax error: {where}{error.problem or error.context}"
        ) from None
    # Python raises a ValueError for an integer with thousands of digits.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{origin} has a syntax error: {str(error).splitlines()[0]}") from None


def read_settings(path: Path, what: str) -> Tree:
    """Read a file of settings in YAML or JSON.

    Args:
        path: The file.
        what: What the file should contain, such as "recipe", for error messages.

    Raises:
        ValueError: If the file cannot be read, is malformed or is not a mapping.
    """
    text = read_text(path, what)
    if path.suffix == ".json":
        text = text.expandtabs()  # apart from tabs, JSON is YAML
    tree = parse(text, str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {type(tree).__name__}")
    return tree


def split_overrides(items: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Split overrides `a.b=value` into their keys and parsed values, and sort them by the number of keys.

    Shorter paths come first, so that `optim={...}` does not undo `optim.lr=...`.

    Raises:
        ValueError: If an override does not have this form, or a key is given twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, separator, text = item.partition("=")
        if not separator or not all(key.split(".")):
            raise ValueError(f"override {item!r} is not of the form a.b=value")
        if key in found:
            raise ValueError(
                f"{key} is given twice: give it once. If the value contains {{a..b}} or {{a,b}}, "
                "quote it, because a shell turns it into several overrides otherwise."
            )
        found[key] = parse(text, f"override {item!r}")
    split = [(key.split("."), value) for key, value in found.items()]
    return sorted(split, key=lambda override: len(override[0]))


def assign(tree: Tree, keys: list[str], value: Any) -> None:
    """Set the value at a path of keys. An existing mapping at this path is replaced as a whole."""
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value
