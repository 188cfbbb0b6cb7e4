"""Check that all ranks have the same settings and code; otherwise report what differs on which hosts and ranks.

On several hosts, a remote shell expands the launcher's arguments, and the recipe may be a different
file on each host. A rank whose settings differ would train a wrong model or make all other ranks hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from disco_ds.distributed import comm

logger = logging.getLogger(__name__)

Report = tuple[str, dict[str, str]]
"""(host, settings) of a rank. The settings map a dotted key to its value as JSON text."""
REMEDY = (
    "the remote shell expands the arguments of `deepspeed --hostfile`: start with `disco-ds launch`, or "
    "write the settings into the recipe, which must be the same file on every host"
)


SAME_CODE = "install the same code on all hosts"
PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "deepspeed", "open_clip_torch")
"""A rank whose version of one of these differs causes a warning."""


def check_agreement(settings: dict[str, Any], remedy: str = REMEDY, what: str = "settings") -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: Nested dicts of settings, with values that JSON can represent.
        remedy: Advice on how to fix the difference, the last part of the error message.
        what: What the settings are, for the error message.

    Raises:
        ValueError: On every rank, if settings differ. The message lists the keys that differ, with their
            values and the hosts and ranks that have each value.
    """
    differences = compare_ranks(settings)
    if differences:
        lines = [f"the ranks have different {what}:", *differences]
        raise ValueError("\n  ".join(lines) + f"\n{remedy}")


def check_code() -> None:
    """Check that all ranks run the same code, and warn if their versions of LIBRARIES differ. Collective.

    Raises:
        ValueError: On every rank, if the code differs. The message names the hosts.
    """
    check_agreement({"disco_ds": hash_code()}, SAME_CODE, "code")
    differences = compare_ranks({name: metadata.version(name) for name in LIBRARIES})
    if differences and comm.rank() == 0:
        logger.warning("the ranks have different libraries: %s", "; ".join(differences))


def hash_code() -> str:
    """Hash the names and contents of all files of disco_ds that affect a run."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json", ".yaml"):
            digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compare_ranks(settings: dict[str, Any]) -> list[str]:
    """Return a line for each setting that differs between ranks. Collective."""
    local = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(settings)}
    return find_differences(comm.gather_objects((socket.gethostname(), local)))


def find_differences(reports: list[Report]) -> list[str]:
    """Return a line for each setting that differs, with its values and the ranks that have each value."""
    keys = sorted({key for _, settings in reports for key in settings})
    lines = []
    for key in keys:
        # value -> host -> ranks, with the value of rank 0 first
        reporters: dict[str, dict[str, list[int]]] = {}
        for rank, (host, settings) in enumerate(reports):
            hosts = reporters.setdefault(settings.get(key, "not given"), {})
            hosts.setdefault(host, []).append(rank)
        if len(reporters) > 1:
            values = []
            for value, hosts in reporters.items():
                ranks_of = [f"{host} ({comm.join_ranks(ranks)})" for host, ranks in hosts.items()]
                values.append(f"{value} on {', '.join(ranks_of)}")
            lines.append(f"{key}: {'; '.join(values)}")
    return lines


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting in nested dicts. An empty dict yields nothing."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
