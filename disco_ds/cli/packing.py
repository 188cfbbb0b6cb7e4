"""Command lines packed into one argument, which arrives at every rank as it was typed."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

PACKED = "--packed="
MAX_PACKED = 2**16
"""Characters; Linux allows 2**17 in one argument, and ssh gets the whole command of a host as one."""


def pack(argv: Sequence[str]) -> str:
    """The trainer's arguments as a single one, which no shell on its way to the ranks can change.

    Raises: ValueError where that would be longer than a command line may be.
    """
    # Letters, digits, - and _ only; padding with = is left out.
    text = base64.urlsafe_b64encode(json.dumps(argv).encode()).decode().rstrip("=")
    if len(text) > MAX_PACKED:
        raise ValueError(
            f"the overrides take {len(text):,} characters on the way to the ranks, where {MAX_PACKED:,} have room: "
            "write them into the recipe"
        )
    return PACKED + text


def unpack(argv: Sequence[str]) -> list[str]:
    """The arguments with those that `pack` has packed in their place.

    Raises: ValueError for a packed argument that was changed on its way.
    """
    found: list[str] = []
    for argument in argv:
        if not argument.startswith(PACKED):
            found.append(argument)
            continue
        text = argument.removeprefix(PACKED)
        try:
            packed = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        except ValueError:
            packed = None
        if not isinstance(packed, list) or not all(isinstance(each, str) for each in packed):
            raise ValueError(
                f"{argument} is not what disco-ds launch has packed: it was changed on its way to this rank"
            )
        found += packed
    return found
