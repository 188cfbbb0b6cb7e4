"""Read hostfiles, and refuse to run if the `deepspeed` launcher does not start ranks correctly on every host."""

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
"""A line of a hostfile: empty, a comment, or a host and its number of slots (ranks)."""


def count_ranks(ranks: int | None, hostfile: Path | None) -> int:
    """Return the number of ranks that a run would have.

    Args:
        ranks: Number of ranks if there is no hostfile; None means 1.
        hostfile: The hostfile, if any.

    Raises:
        ValueError: See `read_hostfile`.
    """
    if hostfile is None:
        return 1 if ranks is None else ranks
    return sum(read_hostfile(hostfile).values())


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the number of slots (ranks) of each host.

    Raises:
        ValueError: If the hostfile is missing or malformed, or `deepspeed` could not start ranks on
            several hosts because of the working directory's name or a .deepspeed_env file.
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
            # DeepSpeed would silently use the beginning of the line, and would pass the host name to a shell.
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
    """Refuse to run as a rank of a faulty launch. `deepspeed` itself only warns about such launches.

    Raises:
        ValueError: If the hostfile is missing, or the path of the working directory contains spaces or shell
            characters, so that ranks start in another folder.
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
    # On several hosts, deepspeed puts the folder in which it was started first in PYTHONPATH.
    folder = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    if int(os.environ.get("CROSS_SIZE", "1")) > 1 and folder != str(Path.cwd()):
        _refuse_folder(folder)


def _refuse_folder(folder: str) -> None:
    if re.search(r"[^\w@%+=:,./-]", folder):
        raise ValueError(
            f"working directory {folder!r}: deepspeed does not quote it in its commands to several "
            "hosts, so ranks would start elsewhere; use a path without spaces and shell characters"
        )
