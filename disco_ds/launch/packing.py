"""Pack a command line into one argument, so that it reaches every rank unchanged."""

import json
from collections.abc import Sequence

PACKED = "--packed="


def pack(argv: Sequence[str]) -> str:
    """Pack the trainer's arguments into a single argument that no shell on the way to the ranks can change."""
    return PACKED + json.dumps(argv).encode().hex()


def unpack(argv: Sequence[str]) -> list[str]:
    """Replace each packed argument with the arguments that it contains."""
    found: list[str] = []
    for argument in argv:
        if argument.startswith(PACKED):
            found += json.loads(bytes.fromhex(argument.removeprefix(PACKED)))
        else:
            found.append(argument)
    return found
