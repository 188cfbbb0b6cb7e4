"""Read hostfiles, and refuse launches by `deepspeed` that would not reach every host."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

LINE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._-]*)?\s+slots=[1-9]\d{0,3}\s*)?(#.*)?",
    re.ASCII,
)
"""A line of a hostfile: empty, a comment, or a host with its slots."""


def count_ranks(ranks: int | None, hostfile: Path | None) -> int:
    """Return the number of ranks of a run that is not started.

    Args:
        ranks: Their number if there is no hostfile; None: 1.
        hostfile: The hostfile, if any.

    Raises:
        ValueError: See `read_hostfile`.
    """
    if hostfile is None:
        return 1 if ranks is None else ranks
    return sum(read_hostfile(hostfile).values())


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the slots of each host.

    Raises:
        ValueError: If the hostfile is missing or malformed, or deepspeed could not reach its hosts
            from this working directory.
    """
    if not path.is_file():
        raise ValueError(f"no hostfile {path}: deepspeed would start ranks on this host only")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"hostfile {path} is not UTF-8 text: byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"hostfile {path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not LINE.fullmatch(line.strip()):
            # DeepSpeed would use the beginning of the line, and pass the host's name to shells.
            raise ValueError(
                f"{path}, line {number}: expected `host slots=GPUs`, got {line[:80]!r}"
            )
    from deepspeed.launcher.runner import (
        DEEPSPEED_ENVIRONMENT_NAME,
        DEEPSPEED_ENVIRONMENT_PATHS,
        fetch_hostfile,
    )

    slots: dict[str, int] = fetch_hostfile(str(path))
    if len(slots) > 1:
        _refuse_folder(str(Path.cwd()))
        for folder in DEEPSPEED_ENVIRONMENT_PATHS:
            _check_environment_file(Path(folder, DEEPSPEED_ENVIRONMENT_NAME))
    return slots


def _check_environment_file(path: Path) -> None:
    """Refuse a .deepspeed_env that deepspeed cannot read."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        if "=" not in line:
            raise ValueError(f"{path}: expected lines NAME=VALUE, without comments, got {line!r}")


def refuse_launch() -> None:
    """Refuse to run as a rank of a launch about which `deepspeed` only warned.

    Raises:
        ValueError: If the hostfile is missing, or the ranks run in another folder.
    """
    from deepspeed.launcher.runner import DLTS_HOSTFILE
    from deepspeed.launcher.runner import parse_args as parse_front_end

    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            command = process.cmdline()
            if len(command) > 1 and Path(command[1]).name == "deepspeed":
                hostfile = parse_front_end(command[2:]).hostfile
                if hostfile != DLTS_HOSTFILE and not Path(hostfile).is_file():
                    raise ValueError(
                        f"no hostfile {hostfile}: deepspeed has started ranks on this host only"
                    )
    # On several hosts, PYTHONPATH begins with the folder in which deepspeed was started.
    folder = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    if int(os.environ.get("CROSS_SIZE", "1")) > 1 and folder != str(Path.cwd()):
        _refuse_folder(folder)


def _refuse_folder(folder: str) -> None:
    if re.search(r"[^\w@%+=:,./-]", folder):
        raise ValueError(
            f"working directory {folder!r}: deepspeed does not quote it in its commands to several "
            "hosts, so ranks would start elsewhere; use a path without spaces and shell characters"
        )
