"""A user's own code that a recipe names as `package.module:name`: found, and called with the recipe's options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

PATTERN = r"[\w.]+:\w+"


def find_own(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function or class of this name. Raises: ValueError if it cannot be imported, or takes other options."""
    try:
        found = resolve_name(name)
    except Exception as error:  # a missing module or name, or anything that the module raises when it is imported
        raise ValueError(
            f"{name} cannot be imported: {type(error).__name__}: {error}; its package must be installed, or its folder "
            "be on PYTHONPATH, on every host"
        ) from error
    if not callable(found):
        raise ValueError(f"{name} is neither a function nor a class")
    signature = inspect.signature(found)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}; its options: {', '.join(signature.parameters) or 'none'}") from None
    return found
