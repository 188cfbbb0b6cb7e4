"""Import custom code by name, and suggest the nearest valid name for a misspelled name.

This module imports only the standard library and is in the lowest layer, so every other module may import it.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

CUSTOM_CODE = r"\w+(\.\w+)*:\w+"
"""Regular expression for `package.module:name`, the form in which a recipe names custom code."""
MAX_LISTED = 300
"""An error message lists the valid names only if the whole list has at most this many characters."""
MAX_REASON = 400
"""The message of a library's error is cut after this many characters."""
MAX_SHOWN = 200
"""A value from the user is shortened in an error message if it has more characters than this."""


def load_custom(
    name: str, options: Mapping[str, Any] | None = None, base: type | None = None
) -> Callable[..., Any]:
    """Import the class or function that a recipe names as `package.module:name`.

    Args:
        name: The name in the recipe.
        options: Keyword arguments that the class or function must accept. None means no check.
        base: The class that the imported class must derive from. None allows any class or function.

    Raises:
        ValueError: If the name cannot be imported or refers to an object of the wrong kind, or if the
            object does not accept the options.
    """
    if not re.fullmatch(CUSTOM_CODE, name):
        raise ValueError(f"{name!r} is not of the form package.module:name")
    module_name, attribute = name.split(":")
    remedy = "on every host, install its package, or add the folder that contains it to PYTHONPATH"
    with explain_errors(f"{name} cannot be imported", remedy):
        module = importlib.import_module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        raise ValueError(
            f"{name}: module {module_name} has no {attribute}{did_you_mean(attribute, vars(module))}"
        )
    if base is not None and not (isinstance(found, type) and issubclass(found, base)):
        room = ".".join(base.__module__.split(".")[:2])
        raise ValueError(
            f"{name} is not a {base.__name__}: derive the class from {room}.{base.__name__}"
        )
    if not callable(found):
        raise ValueError(f"{name} is neither a function nor a class")
    if options is not None:
        signature = inspect.signature(found)
        try:
            signature.bind(**options)
        except TypeError as error:
            accepted = ", ".join(signature.parameters) or "none"
            raise ValueError(f"{name}: {error}; its options: {accepted}") from None
    return found


@contextmanager
def explain_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Raise any error in the `with` block as a ValueError with a one-line message: `what`, the error and the remedy.

    It is for code of libraries and users, which may raise anything.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        raise ValueError(f"{what}: {reason}{'; ' if remedy else ''}{remedy}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` with the most similar known name, or "" if no known name is similar."""
    names = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[close[0]]}?" if close else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint about an unknown name: the most similar valid name or, if none is similar, all valid names.

    If the list of all names would be too long, the hint is "".
    """
    names = list(known)
    hint = did_you_mean(name, names)
    listed = ", ".join(names)
    if hint or len(listed) > MAX_LISTED:
        return hint
    return f"; valid: {listed}"


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, for example `1 shard` or `1,200 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shorten(value: object, most: int = MAX_SHOWN) -> str:
    """Return a value as text for an error message. If it has more than `most` characters, `...` replaces its middle."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"
