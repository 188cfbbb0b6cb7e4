"""Read hostfiles, and refuse to run if the hostfile that `deepspeed` was given is missing."""

from __future__ import annotations

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
        return ranks or 1
    return sum(read_hostfile(hostfile).values())


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the number of slots (ranks) of each host.

    Raises:
        ValueError: If the hostfile is missing or malformed, or `deepspeed` could not start ranks on
            several hosts because of the working directory's name.
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
    from deepspeed.launcher.runner import fetch_hostfile

    slots: dict[str, int] = fetch_hostfile(str(path))
    folder = str(Path.cwd())
    if len(slots) > 1 and re.search(r"[^\w@%+=:,./-]", folder):
        raise ValueError(
            f"working directory {folder!r}: deepspeed does not quote it in its commands to several "
            "hosts, so ranks would start elsewhere; use a path without spaces and shell characters"
        )
    return slots


def refuse_missing_hostfile() -> None:
    """Refuse to run as a rank of a `deepspeed` command whose hostfile is missing.

    `deepspeed` itself only warns, and starts ranks on this host.

    Raises:
        ValueError: If the hostfile is missing.
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
