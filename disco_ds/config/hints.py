"""Parts of messages: the nearest valid name, and a person's value in few letters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 300
"""Characters of valid names that a message lists; of more, nobody reads one."""
MAX_SHOWN = 200
"""Characters of a person's value that a message repeats."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` for the known name nearest to `name` in any case; empty where none is near."""
    names = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[close[0]]}?" if close else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """How a message on an unknown name ends: with the nearest valid one, else with all of them if they are few."""
    names = list(known)
    listed = ", ".join(names)
    return did_you_mean(name, names) or (f"; valid: {listed}" if len(listed) <= MAX_LISTED else "")


def shorten(value: object) -> str:
    """A value for a message; a long one without its middle."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}...{text[-MAX_SHOWN // 4 :]}"
