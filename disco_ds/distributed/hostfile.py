"""Reads hostfiles as `deepspeed` does, and refuses launches of it that would not reach every host."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

LINE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._-]*)?\s+slots=[1-9]\d{0,3}\s*)?(#.*)?", re.ASCII
)
"""A line of a hostfile: empty, a comment, or a host with its slots."""


def count_ranks(ranks: int | None, hostfile: Path | None) -> int:
    """World size of a run that is only planned. Raises: ValueError, see read_hostfile."""
    if hostfile is None:
        return 1 if ranks is None else ranks
    return sum(read_hostfile(hostfile).values())


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots by host. Raises: ValueError for a missing or malformed hostfile, or one that deepspeed cannot use."""
    if not path.is_file():
        raise ValueError(f"no hostfile {path}; deepspeed would run on this host alone")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hostfile {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not LINE.fullmatch(line.strip()):
            # DeepSpeed would take the beginning of it, and hand the host's name to shells.
            raise ValueError(f"{path}, line {number}: expected `host slots=GPUs`, got {line[:80]!r}")
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME, DEEPSPEED_ENVIRONMENT_PATHS, fetch_hostfile

    slots: dict[str, int] = fetch_hostfile(str(path))
    if len(slots) > 1:
        _refuse_folder(str(Path.cwd()))
        for variables in (Path(folder, DEEPSPEED_ENVIRONMENT_NAME) for folder in DEEPSPEED_ENVIRONMENT_PATHS):
            for line in variables.read_text(encoding="utf-8").splitlines() if variables.is_file() else ():
                if "=" not in line:
                    raise ValueError(f"{variables}: deepspeed reads lines of NAME=VALUE only, got {line!r}; remove it")
    return slots


def refuse_launch() -> None:
    """Refuse a launch about which DeepSpeed's launcher has only warned. Raises: ValueError."""
    from deepspeed.launcher.runner import DLTS_HOSTFILE
    from deepspeed.launcher.runner import parse_args as parse_front_end

    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            command = process.cmdline()
            if len(command) > 1 and Path(command[1]).name == "deepspeed":
                hostfile = parse_front_end(command[2:]).hostfile
                if hostfile != DLTS_HOSTFILE and not Path(hostfile).is_file():
                    raise ValueError(f"no hostfile {hostfile}: deepspeed has started this host alone")
    # On several hosts, PYTHONPATH begins with the folder that deepspeed was started in.
    folder = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    if int(os.environ.get("CROSS_SIZE", "1")) > 1 and folder != str(Path.cwd()):
        _refuse_folder(folder)


def _refuse_folder(folder: str) -> None:
    if re.search(r"[^\w@%+=:,./-]", folder):
        raise ValueError(
            f"working directory {folder!r}: on several hosts deepspeed changes to it without quotes, so that the ranks "
            "start elsewhere; start from a folder without spaces or other characters of the shell's"
        )
