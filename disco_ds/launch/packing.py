"""Pack a command line into one argument, so that it reaches every rank unchanged."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

PACKED = "--packed="


def pack(argv: Sequence[str]) -> str:
    """Pack the trainer's arguments into a single argument that no shell on the way to the ranks can change."""
    # The result contains only letters, digits, - and _, because the trailing = padding is removed.
    text = base64.urlsafe_b64encode(json.dumps(argv).encode()).decode().rstrip("=")
    return PACKED + text


def unpack(argv: Sequence[str]) -> list[str]:
    """Replace each packed argument with the arguments that it contains."""
    found: list[str] = []
    for argument in argv:
        if argument.startswith(PACKED):
            # The decoder ignores excess padding.
            found += json.loads(base64.urlsafe_b64decode(argument.removeprefix(PACKED) + "=="))
        else:
            found.append(argument)
    return found
