"""Read small text files with clear error messages, and write them atomically."""

import json
import os
from pathlib import Path

from disco_ds.names import shorten


def read_text(path: Path, what: str) -> str:
    """Return the text of a file, without a byte order mark.

    Args:
        path: The file.
        what: What the file should contain, such as "recipe". Error messages begin with this word.

    Raises:
        ValueError: If the file cannot be read or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except OSError as error:
        raise ValueError(f"{what} {shorten(path)} cannot be read: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. If writing fails, the file keeps its previous content.

    Raises:
        OSError: If the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{error.strerror}; make room, or choose another folder", str(path)
        ) from None


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically, as write_text does."""
    write_text(path, json.dumps(content, indent=1) + "\n")
