"""The result of a check, as a line of text."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

_WIDTH = 16
Status = Literal["ok", "warn", "fail"]


class Line(NamedTuple):
    """The result of one check."""

    status: Status
    check: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.status:4}  {self.check:{_WIDTH}}{self.found}"
        if self.remedy and self.status != "ok":
            text += f"\n{'':{6 + _WIDTH}}-> {self.remedy}"
        return text


def examine(
    check: str,
    results: Iterable[Line],
    errors: tuple[type[Exception], ...] = (Exception,),
) -> list[Line]:
    """Run a check and return its lines. Drop an ok line if another line with the same `check` reports a problem.

    Args:
        check: Name of the check.
        results: The generator that runs the check and yields its lines.
        errors: Exception types that are reported as a line with status fail, so that the other
            checks still run.
    """
    lines: list[Line] = []
    try:
        for line in results:
            lines.append(line)
    except errors as error:
        # Messages of ValueError and OSError are written for users. Other exceptions need their type as well.
        user_error = isinstance(error, ValueError | OSError)
        found = str(error) if user_error else f"{type(error).__name__}: {error}"
        lines.append(Line("fail", check, found))
    wrong = {line.check for line in lines if line.status != "ok"}
    return [line for line in lines if line.status != "ok" or line.check not in wrong]
