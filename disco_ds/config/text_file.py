"""Reading the text files that a person names: a message for every one that is none."""

from __future__ import annotations

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
