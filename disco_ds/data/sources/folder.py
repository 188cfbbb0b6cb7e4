"""Images in a folder with one sub-folder per class. A sub-folder is a shard, and a file is one of its entries."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

from disco_ds.data.errors import read_regular
from disco_ds.data.sources.base import Source, digest

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")


class ImageFolder(Source):
    """A folder with one sub-folder of images per class.

    The sub-folders are sorted by name, or numerically if all names are numbers. Their image files are sorted by name.
    A sample's members are `image`, the bytes of the file, and `cls`, the name of its sub-folder. The source is also
    the Reader.

    Raises:
        ValueError: If there is no sub-folder, or if none contains an image.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        # Keep classes without images, because they are possible answers in zero-shot classification.
        self.folders = sort_labels(
            [
                entry.name
                for entry in os.scandir(self.folder)
                if entry.is_dir() and not entry.name.startswith(".")
            ]
        )
        # The label of a sample comes from a filled template, which is stripped, so strip these labels too.
        self.classes = [name.strip() for name in self.folders]
        self.files = [
            sorted(
                name for name in os.listdir(self.folder / label) if name.lower().endswith(_SUFFIXES)
            )
            for label in self.folders
        ]
        self.sizes = [len(names) for names in self.files]
        if not any(self.sizes):
            raise ValueError(
                f"{folder} has no sub-folder with an image; expected .tar shards, or one sub-folder per class with "
                f"{', '.join(_SUFFIXES)} files"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the names of classes and files."""
        return digest([self.classes, self.files])

    def open(self, num_slots: int = 1, window: int = 1) -> ImageFolder:
        """Return the source itself, which keeps no file open."""
        return self

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return the members of a sample.

        Raises:
            BrokenSample: If the file cannot be read.
        """
        image = read_regular(self.folder / self.name(shard, entry))
        return {"image": image, "cls": self.classes[shard].encode()}

    def name(self, shard: int, entry: int) -> str:
        """Return `class/file`."""
        return f"{self.folders[shard]}/{self.files[shard][entry]}"

    def close(self) -> None:
        """Do nothing: no file is open."""


def sort_labels(labels: Collection[str]) -> list[str]:
    """Sort labels alphabetically or, if all of them are numbers, numerically."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else None)
