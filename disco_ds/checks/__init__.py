"""Checks of a run before it is started: `disco-ds doctor` prints what they found and what to do about it.

versions.py checks the packages; here.py ds_config, batch, kernels and data on this host; hosts.py the hosts, on each of
which it runs probe.py; ranks.py the step and the collectives on the user's ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

_WIDTH = 16


class Line(NamedTuple):
    """The result of one check."""

    status: Literal["ok", "warn", "fail"]
    check: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n{'':{6 + _WIDTH}}-> {self.remedy}" if self.remedy and self.status != "ok" else ""
        return f"{self.status:4}  {self.check:{_WIDTH}}{self.found}{remedy}"


def examine(check: str, look: Callable[[], Iterable[Line]], *errors: type[Exception]) -> list[Line]:
    """The lines of a check: those with a problem, or else those that say it is fine.

    One of `errors` becomes a line too, so that the other checks still run.
    """
    lines = []
    try:
        for line in look():
            lines.append(line)
    except errors as error:
        speaks = isinstance(error, ValueError | OSError)  # for itself; other types name what happened
        lines.append(Line("fail", check, str(error) if speaks else f"{type(error).__name__}: {error}"))
    wrong = {line.check for line in lines if line.status != "ok"}
    return [line for line in lines if line.status != "ok" or line.check not in wrong]
