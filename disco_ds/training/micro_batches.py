"""Split a batch into micro-batches. Only custom_loop.py imports this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

DIVIDES = (
    "a batch is a tensor [b, ...], which is divided along its first dimension, or a mapping, dataclass, "
    "tuple or list of such tensors"
)


def split(batch: Any, count: int) -> tuple[list[Any], int]:
    """Split a batch into parts of equal size. Each has the structure of the batch, but mappings become dicts.

    Args:
        batch: A tensor [b, ...], or a mapping, dataclass, tuple or list of such tensors. These containers may be
            nested. None is copied into every part.
        count: Number of parts.

    Returns:
        The parts, and b, the number of samples in the batch.

    Raises:
        ValueError: If b differs between tensors, if b is not a multiple of `count`, if the batch contains an object of
            another type, or if it contains no tensor.
    """
    sizes: dict[str, int] = {}
    parts = _cut(batch, count, (), sizes)
    if not sizes:
        raise ValueError(f"the batch contains no tensor; {DIVIDES}")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the tensors of the batch have different numbers of samples: {found}; {DIVIDES}"
        )
    return parts, next(iter(sizes.values()))


def _cut(value: Any, count: int, path: tuple[str, ...], sizes: dict[str, int]) -> list[Any]:
    """Split a tensor, or all tensors in a container, and record the number of samples per tensor in `sizes`."""
    name = ".".join(path) or "the batch"
    if value is None:
        return [None] * count
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        size = shape[0] if shape else 0
        if size == 0 or size % count:
            raise ValueError(
                f"{name} of shape {shape} cannot be divided evenly into {count} micro-batches"
            )
        sizes[name] = size
        return list(value.split(size // count))
    if isinstance(value, Mapping):
        fields = dict(value)
    elif isinstance(value, list | tuple):
        fields = dict(enumerate(value))
    elif dataclasses.is_dataclass(value):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
    else:
        raise ValueError(f"{name} is a {type(value).__name__}, which cannot be divided; {DIVIDES}")
    cut = {key: _cut(field, count, (*path, str(key)), sizes) for key, field in fields.items()}
    return [_build(value, {key: parts[k] for key, parts in cut.items()}) for k in range(count)]


def _build(container: Any, fields: dict[Any, Any]) -> Any:
    """Return a container like `container` whose values are those of `fields`. A mapping becomes a dict."""
    if isinstance(container, Mapping):
        return fields
    if isinstance(container, list | tuple):
        make = getattr(type(container), "_make", type(container))  # namedtuples have _make
        return make(fields.values())
    return dataclasses.replace(container, **fields)
