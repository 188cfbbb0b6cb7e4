"""Check caption and label templates: text with fields such as {txt} or {json[key]}."""

from __future__ import annotations

import re
import string

FIELD = re.compile(r"[^\s{}\[\]!:]+(\[[^{}\[\]]+\])*")
"""A sample member by its extension, or an entry of a JSON member."""


def check_template(setting: str, template: str) -> None:
    """Check the template of a setting.

    Args:
        setting: Name of the setting, for error messages.
        template: The template.

    Raises:
        ValueError: If no sample could fill the template, or if it has no field.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"{setting}: template {template!r} is malformed: {error}; write {{{{ for a literal brace"
        ) from None
    has_field = False
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        has_field = True
        if spec or conversion or not FIELD.fullmatch(field):
            raise ValueError(
                f"{setting}: template {template!r} has {{{field}}}, expected {{member}} or {{json[key]}}"
            )
    if not has_field:
        raise ValueError(
            f"{setting}: template {template!r} has no field such as {{txt}}, so all samples would get the same text"
        )
