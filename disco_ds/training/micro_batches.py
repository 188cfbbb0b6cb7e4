"""Batches of any form as micro-batches: which parts of them are divided, and how. Only own_loop.py imports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

DIVIDES = (
    "the fields of mappings, dataclasses and tuples are divided: tensors [b, ...] along their first dimension, "
    "lists of b samples by item"
)


def split(batch: Any, count: int) -> tuple[list[Any], int]:
    """Cut a batch into equal parts of the same form.

    Args:
        batch: Mappings, dataclasses, tuples, and lists that hold tensors are trees of fields. A field is a tensor
            [b, ...], or a list of b samples of any kind but tensors. None, numbers and strings go into every part.
        count: Number of parts.

    Returns:
        The parts, and b.

    Raises:
        ValueError: If b is not the same for all fields, or not a multiple of `count`, or if nothing can be divided.
    """
    sizes: dict[str, int] = {}
    parts = _cut(batch, count, (), sizes)
    if not sizes:
        raise ValueError(
            f"the batch holds nothing that can be divided into {count} micro-batches; {DIVIDES}"
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"the batch holds different numbers of samples: {found}; {DIVIDES}")
    return parts, next(iter(sizes.values()))


def _cut(value: Any, count: int, path: tuple[str, ...], sizes: dict[str, int]) -> list[Any]:
    """Cut a field, or a tree of them, and note in `sizes` how many samples each field has."""
    name = ".".join(path) or "the batch"
    if isinstance(value, Tensor) or _holds_samples(value):
        got = (
            f"of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"of {len(value)} items"
        )
        size = 0 if isinstance(value, Tensor) and value.dim() == 0 else len(value)
        if size == 0 or size % count:
            raise ValueError(f"{name} {got} does not divide into {count} micro-batches")
        sizes[name] = size
        return [value[first : first + size // count] for first in range(0, size, size // count)]
    if value is None or isinstance(value, str | bytes | int | float):
        return [value] * count
    fields, make = _open(value, name, count)
    cut = {key: _cut(field, count, (*path, str(key)), sizes) for key, field in fields.items()}
    return [make({key: parts[k] for key, parts in cut.items()}) for k in range(count)]


def _holds_samples(value: Any) -> bool:
    """Return True for a list of samples. torch's default_collate makes tuples of strings, and lists of fields."""
    if type(value) is tuple:
        return len(value) > 0 and all(isinstance(item, str) for item in value)
    return isinstance(value, list) and not any(isinstance(item, Tensor) for item in value)


def _open(
    value: Any, name: str, count: int
) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]]:
    """Return the fields of a tree, and what makes a tree of the same form from them."""
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
        return fields, lambda cut: dataclasses.replace(value, **cut)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        return dict(value), dict
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is a {type(value).__name__}, which cannot be divided; {DIVIDES}")
    shapes = {item.shape if isinstance(item, Tensor) else None for item in value}
    shape = shapes.pop() if len(shapes) == 1 else None
    # Cut as fields, b tensors of samples would give b / K rows too, of a part of each sample.
    if shape and len(value) > 2 and len(value) * count == shape[0]:
        raise ValueError(
            f"{name} has {len(value)} tensors of shape {tuple(shape)}, which may be samples or fields: stack the "
            "samples to one tensor, or make the fields a dict"
        )
    make = getattr(type(value), "_make", type(value))  # of a namedtuple
    return dict(enumerate(value)), lambda cut: make(cut.values())
