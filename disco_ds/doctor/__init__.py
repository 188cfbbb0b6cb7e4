"""Looks at a run before it is started: `disco-ds doctor`, a table of what was found and what to do about it.

versions.py: packages. here.py: ds_config, batch, data. hosts.py: the hosts, by what probe.py says there. ranks.py: the
step and the collectives on the user's ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

_WIDTH = 16


class Line(NamedTuple):
    status: Literal["ok", "warn", "fail"]
    check: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n{'':{6 + _WIDTH}}-> {self.remedy}" if self.remedy and self.status != "ok" else ""
        return f"{self.status:4}  {self.check:{_WIDTH}}{self.found}{remedy}"


def examine(check: str, look: Callable[[], Iterable[Line]], *errors: type[Exception]) -> list[Line]:
    """What is wrong, or else that nothing is. One of `errors` is a line too: the other checks have more to tell."""
    lines = []
    try:
        for line in look():
            lines.append(line)
    except errors as error:
        told = isinstance(error, ValueError | OSError)
        lines.append(Line("fail", check, str(error) if told else f"{type(error).__name__}: {error}"))
    wrong = {line.check for line in lines if line.status != "ok"}
    return [line for line in lines if line.status != "ok" or line.check not in wrong]
