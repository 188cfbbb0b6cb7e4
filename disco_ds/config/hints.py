"""Parts of messages: the nearest valid name, and a person's value in few letters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 300
"""Characters of valid names that a message lists; of more, nobody reads one."""
MAX_SHOWN = 200
"""Characters of a person's value that a message repeats."""


def suggest(name: str, known: Iterable[str]) -> str:
    """How a message on an unknown name ends: with the nearest valid one, else with all if they are few."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    listed = ", ".join(names)
    return f"; valid: {listed}" if len(listed) <= MAX_LISTED else ""


def shorten(value: object) -> str:
    """A value for a message; a long one without its middle."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}...{text[-MAX_SHOWN // 4 :]}"
