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
    parts = [_take(batch, k, count, (), sizes) for k in range(count)]
    if not sizes:
        raise ValueError(f"the batch contains no tensor; {DIVIDES}")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the tensors of the batch have different numbers of samples: {found}; {DIVIDES}"
        )
    return parts, next(iter(sizes.values()))


def _take(value: Any, k: int, count: int, path: tuple[str, ...], sizes: dict[str, int]) -> Any:
    """Return part k of a tensor or of all tensors in a container. Record the number of samples of each in `sizes`."""
    name = ".".join(path) or "the batch"

    def take(key: Any, field: Any) -> Any:
        return _take(field, k, count, (*path, str(key)), sizes)

    if value is None:
        return None
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        size = shape[0] if shape else 0
        if size == 0 or size % count:
            raise ValueError(
                f"{name} of shape {shape} cannot be divided evenly into {count} micro-batches"
            )
        sizes[name] = size
        return value.narrow(0, k * (size // count), size // count)
    if isinstance(value, Mapping):
        return {key: take(key, field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        make = getattr(type(value), "_make", type(value))  # namedtuples have _make
        return make(take(number, field) for number, field in enumerate(value))
    if dataclasses.is_dataclass(value):
        keys = [field.name for field in dataclasses.fields(value) if field.init]
        parts = {key: take(key, getattr(value, key)) for key in keys}
        return dataclasses.replace(value, **parts)  # type: ignore[type-var]
    raise ValueError(f"{name} is a {type(value).__name__}, which cannot be divided; {DIVIDES}")
