"""torch's flight recorder of NCCL: the last collectives of every group, and which of them have ended.

`torchfrtrace` reads the records of all ranks and names the collectives in which they differ. With other backends the
functions here do nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed.accelerator import get_accelerator

SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""New and old variable for the number of collectives that are kept."""
FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""New and old variable for the prefix of the file that torch writes; the rank follows."""


def is_there() -> bool:
    return bool(get_accelerator().communication_backend_name() == "nccl")


def switch_on() -> None:
    """Record, and write at a timeout, as newer versions of torch do by default; a user's own settings stay.

    Has to be called before there is a process group.
    """
    if is_there():
        _set(SIZE, "2000")
        _set(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")


def send_to(prefix: Path) -> None:
    """Name the file that torch writes at a timeout, unless the user has. torch reads the name at its first write."""
    _set(FILE, str(prefix.absolute()))


def read() -> bytes | None:
    """This rank's record, pickled as torchfrtrace reads it. May block while it holds Python's global lock."""
    if not is_there():
        return None
    from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]  # in builds with NCCL

    return bytes(_dump_nccl_trace())


def _set(names: tuple[str, ...], value: str) -> None:
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value
