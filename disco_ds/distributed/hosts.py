"""The hosts of a run. All ranks have the same settings and code, and those on a host share its cores and memory.

On several hosts, a remote shell expands the launcher's arguments, and the recipe may be a different
file on each host. A rank whose settings or code differ would train a wrong model or make all other ranks hang.
"""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from disco_ds.distributed import comm

Report = tuple[str, dict[str, str]]
"""(host, settings) of a rank. The settings map a dotted key to its value as JSON text."""
REMEDY = (
    "the remote shell expands the arguments of `deepspeed --hostfile`: start with `disco-ds launch`, or "
    "write the settings into the recipe, which must be the same file on every host"
)


SAME_CODE = "install the same code and libraries on all hosts"
PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "deepspeed", "open_clip_torch")


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
    local = {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(settings)}
    if differences := find_differences(comm.gather_objects((socket.gethostname(), local))):
        lines = [f"the ranks have different {what}:", *differences]
        raise ValueError("\n  ".join(lines) + f"\n{remedy}")


def check_code() -> None:
    """Check that all ranks run the same code and the same versions of LIBRARIES. Collective.

    Raises:
        ValueError: On every rank, if they differ. The message names the hosts.
    """
    versions = {name: metadata.version(name) for name in LIBRARIES}
    check_agreement({"disco_ds": hash_code(), **versions}, SAME_CODE, "code")


def hash_code() -> str:
    """Hash the names and contents of all files of disco_ds that affect a run."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json", ".yaml"):
            digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def find_differences(reports: list[Report]) -> list[str]:
    """Return a line for each setting that differs, with its values and the hosts and ranks that have each value."""
    lines = []
    for key in sorted({key for _, settings in reports for key in settings}):
        ranks_with: dict[str, list[int]] = {}
        for rank, (_, settings) in enumerate(reports):
            ranks_with.setdefault(settings.get(key, "not given"), []).append(rank)
        if len(ranks_with) > 1:
            values = []
            for value, ranks in ranks_with.items():
                hosts = ", ".join(dict.fromkeys(reports[rank][0] for rank in ranks))
                values.append(f"{value} on {hosts} ({comm.join_ranks(ranks)})")
            lines.append(f"{key}: {'; '.join(values)}")
    return lines


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting in nested dicts. An empty dict yields nothing."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Cores and memory

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files that contain the memory limit of a container, under cgroups v2 and v1."""


class HostShare(NamedTuple):
    """The cores and memory of a host that one of its ranks may use."""

    ranks: int
    """Number of ranks on this host."""
    cores: int
    memory_bytes: int
    """This rank's share of the memory that was free when the run began."""


def share_host() -> HostShare:
    """Return this rank's share of its host, and set torch's number of threads accordingly. Collective.

    If OMP_NUM_THREADS is set, the number of threads is not changed. torchrun sets it to 1. `deepspeed`
    does not set it, so torch would start one thread per core in every rank. Ranks that are bound to
    different cores, for example by --bind_cores_to_rank or srun --cpus-per-task, keep all of their cores.
    """
    host = socket.gethostname()
    cores = sorted(os.sched_getaffinity(0))
    ranks = comm.gather_objects((host, cores))
    num_sharing = ranks.count((host, cores))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(_original_threads() // num_sharing, 1))
    num_on_host = [other for other, _ in ranks].count(host)
    num_cores = max(len(cores) // num_sharing, 1)
    return HostShare(num_on_host, num_cores, free_memory_bytes() // num_on_host)


@cache
def _original_threads() -> int:
    """Return the number of threads that torch used when share_host was first called in this process."""
    return torch.get_num_threads()


def free_memory_bytes() -> int:
    """Return the free memory of this host, or the limit of its container if that is less."""
    limits = [psutil.virtual_memory().available]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            limits.append(int(Path(path).read_text()))
    return min(limits)
