"""NCCL's flight recorder, which torch keeps: the last collectives of every group, and which of them have ended.

`torchfrtrace` reads the records of all ranks and names the collectives in which they differ. Under other backends
nothing here does anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed.accelerator import get_accelerator

SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""New name and old one, of the number of collectives that are kept."""
FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Prefix of the file that torch writes; the rank follows."""


def is_there() -> bool:
    return bool(get_accelerator().communication_backend_name() == "nccl")


def switch_on() -> None:
    """Record, and write at a timeout, as newer versions of torch do by default; what a user has set stays.

    To be called before there is a process group.
    """
    if is_there():
        _set(SIZE, "2000")
        _set(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")


def send_to(prefix: Path) -> None:
    """Name the file that torch writes at a timeout, unless the user has. torch asks for it when it writes the first."""
    _set(FILE, str(prefix.absolute()))


def read() -> bytes | None:
    """This rank's record, pickled, as torchfrtrace has it. May block, with Python's global lock in hand."""
    if not is_there():
        return None
    from torch._C._distributed_c10d import _dump_nccl_trace

    return bytes(_dump_nccl_trace())


def _set(names: tuple[str, ...], value: str) -> None:
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value
