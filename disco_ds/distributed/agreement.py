"""Check that all ranks have the same settings, and name the keys, values, hosts and ranks that differ.

On several hosts, a remote shell expands the launcher's arguments, and the recipe may be a different
file on each host. A rank with different settings would train a wrong model or make all others hang.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from disco_ds.distributed import comm

MAX_SHOWN = 5
"""Maximum number of settings, and of values of one setting, in a message."""
Report = tuple[str, dict[str, str]]
"""A rank's host and its settings: dotted key -> value in JSON."""
REMEDY = (
    "the remote shell expands the arguments of `deepspeed --hostfile`: start with `disco-ds launch`, or "
    "write the settings into the recipe, which must be the same file on every host"
)


def check_agreement(settings: dict[str, Any], remedy: str = REMEDY) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: Nested settings that JSON can represent.
        remedy: Last part of the error message.

    Raises:
        ValueError: On every rank, naming the keys that differ, their values, hosts and ranks.
    """
    mine = dict(_flatten(settings))
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(comm.gather_objects(digest))) > 1:
        raise ValueError(_describe(comm.gather_objects((socket.gethostname(), mine)), remedy))


def _describe(reports: list[Report], remedy: str) -> str:
    keys = sorted({key for _, settings in reports for key in settings})
    lines = []
    for key in keys:
        # value -> host -> ranks, with the value of rank 0 first
        places: dict[str, dict[str, list[int]]] = {}
        for rank, (host, settings) in enumerate(reports):
            hosts = places.setdefault(settings.get(key, "not given"), {})
            hosts.setdefault(host, []).append(rank)
        if len(places) > 1:
            found = [f"{value} on {_join_hosts(hosts)}" for value, hosts in places.items()]
            lines.append(f"{key}: {'; '.join(_truncate(found, 'more values'))}")
    shown = "\n  ".join(_truncate(lines, "more settings"))
    return f"the ranks were given different settings:\n  {shown}\n{remedy}"


def _join_hosts(hosts: dict[str, list[int]]) -> str:
    return ", ".join(f"{host} ({comm.join_ranks(ranks)})" for host, ranks in hosts.items())


def _truncate(items: list[str], rest: str) -> list[str]:
    if len(items) <= MAX_SHOWN:
        return items
    return [*items[:MAX_SHOWN], f"and {len(items) - MAX_SHOWN} {rest}"]


def _flatten(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for part, value in tree.items():
            yield from _flatten(value, f"{key}.{part}" if key else str(part))
    else:
        yield key, json.dumps(tree, ensure_ascii=False)
