"""The hint in the message about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` for the known name nearest to `name` in any case; empty where none is near."""
    names = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {names[close[0]]}?" if close else ""
