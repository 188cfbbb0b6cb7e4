"""Check caption and label templates, which are strings with fields such as {txt} or {json[key]}."""

from __future__ import annotations

import re
import string

_MEMBER = r"[^\s{}\[\]!:|]+(\[[^{}\[\]|]+\])*"
FIELD = re.compile(rf"{_MEMBER}(\|{_MEMBER})*")
"""Matches the content of a template field: the extension of a sample's tar member, such as txt. For a JSON member, the
keys of an entry may follow in brackets. Several alternatives may be separated by `|`."""


def check_template(template: str) -> str:
    """Return a template unchanged, unless it is invalid.

    Raises:
        ValueError: If the template is malformed, or if it has no field.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"template {template!r} is malformed: {error}; write {{{{ for a literal brace"
        ) from None
    fields = [part[1:] for part in parts if part[1] is not None]
    for name, spec, conversion in fields:
        if spec or conversion or not FIELD.fullmatch(name or ""):
            raise ValueError(
                f"template {template!r} has {{{name}}}; expected {{member}}, {{json[key]}} or {{member|member}}"
            )
    if not fields:
        raise ValueError(
            f"template {template!r} has no field such as {{txt}}; every sample would get the same text"
        )
    return template
