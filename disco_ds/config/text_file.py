"""Text files: read with a message for every one that is none, written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from disco_ds.config.hints import shorten

MAX_BYTES = 4_000_000
"""No recipe or ds_config is this long; a mistaken path may name a file of gigabytes."""


def read_text(path: Path, what: str) -> str:
    """The text of a regular file. Raises: ValueError beginning with `what`, as "recipe"."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{what} {path} is not a file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"{what} {path} has {status.st_size:,} bytes, which no settings need")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except FileNotFoundError:
        raise ValueError(f"{what} {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{what} {shorten(path)} cannot be read: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file by a rename: whatever happens, it holds this text, or what it held before. Raises: OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; make room, or choose another folder", str(path)) from None
