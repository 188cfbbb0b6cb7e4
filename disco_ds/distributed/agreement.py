"""Check that all ranks have the same settings; otherwise report which settings differ on which hosts and ranks.

On several hosts, a remote shell expands the launcher's arguments, and the recipe may be a different
file on each host. A rank whose settings differ would train a wrong model or make all other ranks hang.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

from disco_ds.distributed import comm

Report = tuple[str, dict[str, str]]
"""(host, settings) of a rank. The settings map a dotted key to its value as JSON text."""
REMEDY = (
    "the remote shell expands the arguments of `deepspeed --hostfile`: start with `disco-ds launch`, or "
    "write the settings into the recipe, which must be the same file on every host"
)


def check_agreement(settings: dict[str, Any], remedy: str = REMEDY) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: Nested dicts of settings, with values that JSON can represent.
        remedy: Advice on how to fix the difference, the last part of the error message.

    Raises:
        ValueError: On every rank, if settings differ. The message lists the keys that differ, with their
            values and the hosts and ranks that have each value.
    """
    mine = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(settings)}
    differences = find_differences(comm.gather_objects((socket.gethostname(), mine)))
    if differences:
        lines = ["the ranks were given different settings:", *differences]
        raise ValueError("\n  ".join(lines) + f"\n{remedy}")


def find_differences(reports: list[Report]) -> list[str]:
    """Return a line for each setting that differs, with its values and the ranks that have each value."""
    keys = sorted({key for _, settings in reports for key in settings})
    lines = []
    for key in keys:
        # value -> host -> ranks, with the value of rank 0 first
        places: dict[str, dict[str, list[int]]] = {}
        for rank, (host, settings) in enumerate(reports):
            hosts = places.setdefault(settings.get(key, "not given"), {})
            hosts.setdefault(host, []).append(rank)
        if len(places) > 1:
            found = []
            for value, hosts in places.items():
                ranks_of = [f"{host} ({comm.join_ranks(ranks)})" for host, ranks in hosts.items()]
                found.append(f"{value} on {', '.join(ranks_of)}")
            lines.append(f"{key}: {'; '.join(found)}")
    return lines


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting in nested dicts. An empty dict yields nothing."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
