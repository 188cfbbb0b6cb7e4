"""Check caption and label templates: text with fields such as {txt} or {json[key]}."""

from __future__ import annotations

import re
import string

FIELD = re.compile(r"[^\s{}\[\]!:]+(\[[^{}\[\]]+\])*")
"""A sample member by its extension, or an entry of a JSON member."""


def check_template(template: str) -> str:
    """Return a template unchanged.

    Raises:
        ValueError: If no sample could fill the template, or if it has no field.
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
                f"template {template!r} has {{{name}}}; expected {{member}} or {{json[key]}}"
            )
    if not fields:
        raise ValueError(
            f"template {template!r} has no field such as {{txt}}; every sample would get the same text"
        )
    return template
