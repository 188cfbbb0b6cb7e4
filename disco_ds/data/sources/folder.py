"""Images in a folder with a sub-folder per class: a sub-folder is a shard, a file one of its entries."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

from disco_ds.data.images.broken import BrokenSample, read_regular
from disco_ds.data.sources.base import Source

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class ImageFolder(Source):
    """The class sub-folders, those without images too, and their image files, sorted by name (numbers as numbers).

    A sample's members are `image`, the bytes of the file, and `cls`, the name of its sub-folder. It is its own Reader.

    Raises: ValueError if there is no sub-folder, or no image in any.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        # Classes without images count too: they are among the answers of zero-shot classification.
        found = [
            entry.name
            for entry in os.scandir(self.folder)
            if entry.is_dir() and not entry.name.startswith(".")
        ]
        self.classes = sort_labels(found)
        self.files = [
            sorted(
                entry.name
                for entry in os.scandir(self.folder / name)
                if entry.name.lower().endswith(_SUFFIXES)
            )
            for name in self.classes
        ]
        self.sizes = [len(names) for names in self.files]
        if not any(self.sizes):
            what = f"{len(found)} sub-folders without an image" if found else "no sub-folders"
            raise ValueError(
                f"{folder} has {what}; expected .tar shards, or a sub-folder per class that holds "
                f"{', '.join(_SUFFIXES)}"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the names of classes and files."""
        return hashlib.sha256(json.dumps([self.classes, self.files]).encode()).hexdigest()[:16]

    def open(self, num_slots: int = 1, window: int = 1) -> ImageFolder:
        return self

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """The members of a sample. Raises: BrokenSample for a file that cannot be read."""
        try:
            image = read_regular(self.folder / self.name(shard, entry))
        except OSError as error:
            raise BrokenSample(f"cannot be read: {error.strerror}") from None
        return {"image": image, "cls": self.classes[shard].encode()}

    def name(self, shard: int, entry: int) -> str:
        return f"{self.classes[shard]}/{self.files[shard][entry]}"

    def close(self) -> None:
        """Nothing is open."""


def sort_labels(labels: Collection[str]) -> list[str]:
    """In alphabetical order; if all are numbers, in numerical order."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else None)
