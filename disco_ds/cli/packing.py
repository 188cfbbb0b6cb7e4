"""Pack a command line into one argument, so that it reaches every rank unchanged."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

PACKED = "--packed="
MAX_PACKED = 2**16
"""Maximum number of characters. Linux allows 2**17 in one argument, and ssh passes a host's
command as one."""


def pack(argv: Sequence[str]) -> str:
    """Pack the trainer's arguments into one that no shell on the way to the ranks can change.

    Raises:
        ValueError: If it would be too long for a command line.
    """
    # Only letters, digits, - and _: the padding with = is removed.
    text = base64.urlsafe_b64encode(json.dumps(argv).encode()).decode().rstrip("=")
    if len(text) > MAX_PACKED:
        raise ValueError(
            f"the packed overrides have {len(text):,} characters, but at most {MAX_PACKED:,} fit into a command line: "
            "write them into the recipe"
        )
    return PACKED + text


def unpack(argv: Sequence[str]) -> list[str]:
    """Replace packed arguments by what `pack` has packed.

    Raises:
        ValueError: If a packed argument was changed on the way.
    """
    found: list[str] = []
    for argument in argv:
        if not argument.startswith(PACKED):
            found.append(argument)
            continue
        text = argument.removeprefix(PACKED)
        try:
            packed = json.loads(
                base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            )
        except ValueError:
            packed = None
        if not isinstance(packed, list) or not all(isinstance(each, str) for each in packed):
            raise ValueError(
                f"{argument} was not packed by disco-ds launch, or was changed on the way to this rank"
            )
        found += packed
    return found
