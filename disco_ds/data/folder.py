"""Images in a folder with a sub-folder per class, read as shards are: a sub-folder is a shard, a file an entry."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from disco_ds.data.tar import BrokenSample

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageFolder:
    """A sample's members are `image`, the bytes of the file, and `cls`, the name of its sub-folder."""

    folder: Path
    classes: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]

    @property
    def sizes(self) -> list[int]:
        return [len(names) for names in self.files]

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """The members of a sample. Raises: BrokenSample for a file that cannot be read."""
        try:
            image = (self.folder / self.name(shard, entry)).read_bytes()
        except OSError as error:
            raise BrokenSample(f"cannot be read: {error.strerror}") from None
        return {"image": image, "cls": self.classes[shard].encode()}

    def name(self, shard: int, entry: int) -> str:
        return f"{self.classes[shard]}/{self.files[shard][entry]}"

    def close(self) -> None:
        """Nothing stays open."""


def scan_folder(folder: Path) -> ImageFolder:
    """The class sub-folders, those without images too, and their image files, sorted by name (numbers as numbers).

    Raises: ValueError when there is no sub-folder, or no image in any.
    """
    found = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    classes = sort_labels(found)
    files = tuple(
        tuple(sorted(entry.name for entry in os.scandir(folder / name) if entry.name.lower().endswith(_SUFFIXES)))
        for name in classes
    )
    if not any(files):
        what = f"{len(classes)} sub-folders without an image" if classes else "no sub-folders"
        raise ValueError(
            f"{folder} has {what}; expected .tar shards, or a sub-folder per class that holds {', '.join(_SUFFIXES)}"
        )
    return ImageFolder(folder, tuple(classes), files)


def sort_labels(labels: Collection[str]) -> list[str]:
    """In order of the alphabet; if all are numbers, as numbers."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else None)
