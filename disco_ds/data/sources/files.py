"""Images in separate files: the rows of a csv file, and folders with one sub-folder per class.

A csv has the format of open_clip's --train-data: the first line contains the column names, separated by tabs, commas or
semicolons. data.image_key names the column of paths, which are relative to the csv's folder or, as in open_clip, to the
working directory. The templates of data.captions name the other columns. Only the offsets of the rows are kept in
memory. For the data order, the rows are divided into nominal shards.
"""

import csv
import hashlib
import io
import os
from array import array
from collections.abc import Collection, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import fill_template, list_fields
from disco_ds.data.errors import BrokenSample, breaks_sample, read_regular
from disco_ds.data.order import divide
from disco_ds.data.sources.base import Source, digest
from disco_ds.names import explain_errors

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")


class Table(Source):
    """A csv file and the byte offsets of its rows. The source is also the Reader.

    Args:
        path: Path of the file.
        settings: The settings that name columns.

    Raises:
        ValueError: If the file is missing or empty, if it lacks a column that the settings name, or if two columns
            have the same name.
    """

    def __init__(self, path: str, settings: DataSettings) -> None:
        self.path = Path(path).expanduser()
        with explain_errors(f"{path} cannot be read as a csv file"), open(self.path, "rb") as file:
            first_line = file.readline()
            heading = first_line.decode("utf-8-sig")  # Excel writes a byte order mark
            self._separator = "\t" if self.path.suffix == ".tsv" else max("\t,;", key=heading.count)
            columns = next(csv.reader([heading], delimiter=self._separator), [])
            self._starts, self.lines, self.fingerprint = _find_rows(
                file, self._separator, first_line
            )
        if repeated := [name for name in set(columns) if name and columns.count(name) > 1]:
            raise ValueError(f"{path} has several columns named {repeated[0]}; rename them")
        image = next((key for key in settings.image_key.split(";") if key in columns), None)
        templates = [*settings.captions, settings.group_by or ""]
        wanted = {field for template in templates for field in list_fields(template)}
        missing = ", ".join(sorted(wanted - set(columns)))
        if image is None or missing:
            raise ValueError(
                f"{path} has no column {missing or settings.image_key}; its columns: {', '.join(columns)}. Name them "
                "in data.image_key, data.captions and data.group_by, or, for an evaluation, in eval.caption_key and "
                "eval.label_key"
            )
        if not len(self.lines):
            raise ValueError(f"{path} has no rows below its column names")
        self._columns = columns
        self.image = image
        """The column of image paths."""
        self.sizes = divide(len(self.lines))
        """Number of rows in each nominal shard."""
        self._first_rows = [0, *accumulate(self.sizes)]

    @cached_property
    def _file(self) -> BinaryIO:
        return open(self.path, "rb", buffering=0)

    def open(self, num_slots: int = 1, window: int = 1) -> Self:
        """Return a copy, which opens the csv file. An open file could not be sent to a worker."""
        return copy(self)

    def close(self) -> None:
        """Close the csv file."""
        self._file.close()

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return the row's values by column, with the image's bytes in place of its path.

        Raises:
            BrokenSample: If the row has no image or too many values, or if its image cannot be read.
            ValueError, csv.Error: If the row is malformed.
            OSError: If the csv file itself cannot be read.
        """
        values = self.read_row(self._first_rows[shard] + entry)
        sample = {column: value.encode() for column, value in values.items()}
        sample[self.image] = read_regular(self.find(values[self.image]))
        return sample

    def read_row(self, row: int) -> dict[str, str]:
        """Return the values of a row by column. Raises the same exceptions as `read`."""
        start, stop = self._starts[row : row + 2].tolist()
        text = os.pread(self._file.fileno(), stop - start, start).decode()
        lines = io.StringIO(text, newline="\n")
        values = next(csv.reader(lines, delimiter=self._separator, strict=True), [])
        # Spreadsheets may write empty values after the last column.
        if any(values[len(self._columns) :]):
            raise BrokenSample(
                f"the row has {len(values)} values, but there are {len(self._columns)} columns; quote the caption, as "
                'in "a dog, running", and double every quote inside it'
            )
        named = dict(zip(self._columns, values, strict=False))
        if not named.get(self.image, "").strip():
            raise BrokenSample(f"the row has no {self.image}")
        return named

    def find(self, image: str) -> Path:
        """Return the path of an image in the csv's folder.

        If the image exists only in the working directory, return its path in that directory instead.
        """
        path = self.path.parent / image
        return path if os.path.lexists(path) or not os.path.lexists(image) else Path(image)

    def name(self, shard: int, entry: int) -> str:
        """Return `file/line number`, for messages."""
        return f"{self.path.name}/line {self.lines[self._first_rows[shard] + entry]}"


@dataclass
class _Image:
    """An image of a table. Several rows of the table may name the same image."""

    row: int
    """Number of the first row that names the image."""
    path: str
    """Path of the image, as the first row gives it."""
    error: BrokenSample | None = None
    """Why the first row cannot be used; None if it can."""
    texts: list[str] = field(default_factory=list)
    """The captions or labels of all rows, without line breaks."""


class CaptionedImages(Source):
    """The images of a table with their captions or labels. Used by evaluations. All images are in one nominal shard.

    Args:
        table: The table.
        template: Template of a row's text.
        joins: Whether rows with the same path are one image with several texts. A broken row is always a separate
            image, so that it is counted as broken.
    """

    def __init__(self, table: Table, template: str, joins: bool = True) -> None:
        images: dict[str | int, _Image] = {}
        with closing(table.open()) as reader:
            for row in range(table.num_samples):
                key: str | int = row
                path = ""
                try:
                    with breaks_sample(OSError):
                        values = reader.read_row(row)
                        path = values[table.image]
                        if joins:
                            key = os.path.abspath(table.find(path))
                        text = " ".join(fill_template(template, values).split())
                except BrokenSample as error:
                    images.setdefault(key, _Image(row, path, error))
                else:
                    images.setdefault(key, _Image(row, path)).texts.append(text)
        self._table = table
        self._images = list(images.values())
        self.sizes = [len(images)]
        self.fingerprint = table.fingerprint
        self.texts = {text for image in images.values() for text in image.texts}
        """All distinct captions or labels."""

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return the image under the name of its column, and its texts, one per line, under "texts"."""
        image = self._images[entry]
        if image.error and not image.texts:
            raise image.error
        data = read_regular(self._table.find(image.path))
        return {self._table.image: data, "texts": "\n".join(image.texts).encode()}

    def name(self, shard: int, entry: int) -> str:
        """Return `file/line number` of the image's first row, for messages."""
        return f"{self._table.path.name}/line {self._table.lines[self._images[entry].row]}"


def _find_rows(
    file: BinaryIO, separator: str, heading: bytes
) -> tuple[np.ndarray, np.ndarray, str]:
    """Find the rows of a table. A quoted value may span lines. Empty lines are skipped.

    Args:
        file: The file, positioned after its first line.
        separator: The separator of the columns.
        heading: The first line.

    Returns:
        The byte offset at which each row begins, and the offset at which the last row ends, [n + 1] int64.
        The line of the file at which each row begins, [n] int32. The first line of the file is line 1.
        The fingerprint: a digest of the whole file, because its rows are the samples.
    """
    digest = hashlib.sha256(heading)
    ends = array("q", [len(heading)])
    """Offset at which each line ends."""
    first_lines = array("i")
    """Number of lines between the heading and each row."""

    def read_lines() -> Iterator[str]:
        for line in file:
            digest.update(line)
            ends.append(ends[-1] + len(line))
            # Only the structure matters here, and latin-1 decodes any byte into one character.
            yield line.decode("latin-1")

    rows = csv.reader(read_lines(), delimiter=separator, strict=True)
    row: list[str] | None = []
    while row is not None:
        line = rows.line_num
        try:
            row = next(rows, None)
        except csv.Error:
            row = ["malformed"]  # costs one sample
        if row:
            first_lines.append(line)
    lines = np.array(first_lines)
    starts = np.append(np.array(ends)[lines], ends[-1])
    return starts, lines + 2, digest.hexdigest()[:16]


class ImageFolder(Source):
    """A folder with one sub-folder of images per class. A sub-folder is a shard.

    The sub-folders are sorted by name, or numerically if all names are numbers. Their image files are sorted by name.
    A sample's members are `image`, the bytes of the file, and `cls`, the name of its sub-folder.

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
        self.fingerprint = digest([self.classes, self.files])
        if not any(self.sizes):
            raise ValueError(
                f"{folder} has no sub-folder with an image; expected .tar shards, or one sub-folder per class with "
                f"{', '.join(_SUFFIXES)} files"
            )

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


def sort_labels(labels: Collection[str]) -> list[str]:
    """Sort labels alphabetically or, if all of them are numbers, numerically."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else None)
