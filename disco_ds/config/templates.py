"""What a caption or label template of a recipe may say: {txt} or {json[key]}, and text around them."""

from __future__ import annotations

import re
import string

FIELD = re.compile(r"[^\s{}\[\]!:]+(\[[^{}\[\]]+\])*")
"""A member of the sample by its extension, or an entry of one that is JSON."""


def check_template(setting: str, template: str) -> None:
    """Raises: ValueError naming the setting, for a template that no sample could fill, or that all fill alike."""
    try:
        parts = [(field, spec, conversion) for _, field, spec, conversion in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{setting}: template {template!r} cannot be read: {error}; a brace is written {{{{") from None
    fields = [(field, spec, conversion) for field, spec, conversion in parts if field is not None]
    if not fields:
        raise ValueError(f"{setting}: template {template!r} has no field, such as {{txt}}: all samples would be alike")
    for field, spec, conversion in fields:
        if spec or conversion or not FIELD.fullmatch(field):
            raise ValueError(f"{setting}: template {template!r} has {{{field}}}, expected {{member}} or {{json[key]}}")
