"""Split a batch of any structure into micro-batches. Only own_loop.py imports this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

DIVIDES = (
    "each field of a mapping, dataclass or tuple is divided: a tensor [b, ...] along its first "
    "dimension, a list of b samples into sublists"
)


def split(batch: Any, count: int) -> tuple[list[Any], int]:
    """Split a batch into parts of equal size, each with the same structure as the batch.

    Args:
        batch: A tensor [b, ...], a list of b samples that are not tensors, or a container of such
            fields. Mappings, dataclasses, tuples, and lists of tensors are containers and may be
            nested. A tuple that contains neither tensors nor lists counts as a list of samples. None, numbers and
            strings are copied into every part.
        count: Number of parts.

    Returns:
        The parts, and b, the number of samples in the batch.

    Raises:
        ValueError: If b differs between fields, if b is not a multiple of `count`, or if the batch
            contains nothing that can be divided.
    """
    sizes: dict[str, int] = {}
    parts = _cut(batch, count, (), sizes)
    if not sizes:
        raise ValueError(
            f"the batch contains nothing that can be divided into {count} micro-batches; {DIVIDES}"
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the fields of the batch have different numbers of samples: {found}; {DIVIDES}"
        )
    return parts, next(iter(sizes.values()))


def _cut(value: Any, count: int, path: tuple[str, ...], sizes: dict[str, int]) -> list[Any]:
    """Split a field, or all fields in a container, and record the number of samples per field in `sizes`."""
    name = ".".join(path) or "the batch"
    # own_loop.py puts the whole batch into a dict.
    if isinstance(value, Tensor) or _is_list_of_samples(value, is_field=len(path) > 1):
        shape = tuple(value.shape) if isinstance(value, Tensor) else (len(value),)
        size = shape[0] if shape else 0
        if size == 0 or size % count:
            raise ValueError(
                f"{name} of shape {shape} cannot be divided evenly into {count} micro-batches"
            )
        sizes[name] = size
        return [value[first : first + size // count] for first in range(0, size, size // count)]
    if value is None or isinstance(value, str | bytes | int | float):
        return [value] * count
    fields, make = _open(value, name, count)
    cut = {key: _cut(field, count, (*path, str(key)), sizes) for key, field in fields.items()}
    return [make({key: parts[k] for key, parts in cut.items()}) for k in range(count)]


def _is_list_of_samples(value: Any, is_field: bool) -> bool:
    """Return whether a value is a list or tuple of samples, not of fields.

    torch's default_collate turns a batch of strings into a tuple or list with one string per sample, but
    a batch of tuples into a list with one tensor per field. In `zip(*samples)`, each field is a tuple of samples,
    which may be numbers, dicts or tuples.
    """
    if type(value) is tuple:
        is_zipped = not is_field and any(isinstance(item, tuple) for item in value)
        return len(value) > 0 and not is_zipped and not _can_be_divided(value)
    return isinstance(value, list) and not any(isinstance(item, Tensor) for item in value)


def _can_be_divided(value: Any) -> bool:
    """Return whether a value is or contains a tensor or a list."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, Tensor | list) or (
        isinstance(value, tuple) and any(map(_can_be_divided, value))
    )


def _open(
    value: Any, name: str, count: int
) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]]:
    """Return the fields of a container, and a function that builds the same kind of container from new fields."""
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
    # If these tensors are samples, splitting them as fields would cut each sample into fragments. No later check would
    # fail if a part, which gets one fragment of each sample, then had as many rows as a part must return.
    if shape and len(value) > 2 and len(value) * count == shape[0]:
        raise ValueError(
            f"{name} has {len(value)} tensors of shape {tuple(shape)}, which could be samples or "
            "fields. If they are samples, stack them into one tensor; if they are fields, put them "
            "into a dict."
        )
    make = getattr(type(value), "_make", type(value))  # namedtuples have _make
    return dict(enumerate(value)), lambda cut: make(cut.values())
