"""Refuses to run if ranks were given different settings, and names the keys, values, hosts and ranks.

On several hosts a remote shell expands the arguments of a launcher, and the recipe may be a different file on each. A
rank with other settings would train a wrong model or hang all the others.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from disco_ds.distributed import comm

SHOWN = 5
"""Most settings, and most values of one setting, that a message names."""
Report = tuple[str, dict[str, str]]
"""A rank's host, and its settings as dotted key -> value in JSON."""


REMEDY = (
    "the remote shell expands the arguments of `deepspeed --hostfile`: start with `disco-ds launch`, or write "
    "them into the recipe, the same file on every host"
)


def check_agreement(settings: dict[str, Any], remedy: str = REMEDY) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:   settings: a tree, as JSON would hold it; remedy: what the message ends with.
    Raises: ValueError on every rank alike, naming the keys that differ, their values, and the hosts and ranks.
    """
    mine = dict(_flatten(settings))
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(comm.gather_objects(digest))) > 1:
        raise ValueError(_describe(comm.gather_objects((socket.gethostname(), mine)), remedy))


def _describe(reports: list[Report], remedy: str = REMEDY) -> str:
    keys = sorted({key for _, settings in reports for key in settings})
    lines = []
    for key in keys:
        places: dict[str, dict[str, list[str]]] = {}  # value -> host -> ranks, rank 0's first
        for rank, (host, settings) in enumerate(reports):
            places.setdefault(settings.get(key, "not given"), {}).setdefault(host, []).append(str(rank))
        if len(places) > 1:
            found = [f"{value} on {_name(hosts)}" for value, hosts in places.items()]
            lines.append(f"{key}: {'; '.join(_first(found, 'more values'))}")
    shown = "\n  ".join(_first(lines, "more settings"))
    return f"the ranks were given different settings:\n  {shown}\n{remedy}"


def _name(hosts: dict[str, list[str]]) -> str:
    return ", ".join(f"{host} (rank {', '.join(ranks)})" for host, ranks in hosts.items())


def _first(items: list[str], rest: str) -> list[str]:
    return items if len(items) <= SHOWN else [*items[:SHOWN], f"and {len(items) - SHOWN} {rest}"]


def _flatten(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for part, value in tree.items():
            yield from _flatten(value, f"{key}.{part}" if key else str(part))
    else:
        yield key, json.dumps(tree, ensure_ascii=False)
