"""A csv file of image paths and captions. A row is a sample, and its number is the sample's id.

The format is that of open_clip's --train-data: the first line contains the column names, separated by tabs or commas.
data.image_key names the column of paths, which are relative to the csv's folder or, as in open_clip, to the working
directory. The templates of data.captions name the other columns.

Only the offsets of the rows are kept in memory. For the data order, the rows are divided into nominal shards.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import fill_template, list_fields
from disco_ds.data.errors import BrokenSample, read_regular
from disco_ds.data.order import divide
from disco_ds.data.sources.base import Source

_NUM_CHECKED = 16
"""Maximum number of rows that are tried before the file is refused. They are the first rows of nominal shards."""
_QUOTE = 'quote the caption, as in "a dog, running", and double every quote inside it'


@dataclass(frozen=True, eq=False)
class Table(Source):
    """A csv file and the byte offsets of its rows."""

    path: Path
    separator: str
    columns: list[str]
    image: str
    """The column of image paths."""
    starts: np.ndarray
    """Byte offset at which each row begins, and the offset at which the last row ends, [n + 1] int64."""
    lines: np.ndarray
    """Line of the file at which each row begins, [n] int32. The first line of the file is line 1."""
    fingerprint: str
    """Digest of the whole file, because its rows are the samples."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows in each nominal shard."""
        return divide(len(self.starts) - 1)

    def open(self, num_slots: int, window: int) -> TableReader:
        """Open the file for reading in one process."""
        return TableReader(self)

    def find(self, image: str) -> Path:
        """Return the path of an image in the csv's folder.

        If the image exists only in the working directory, return its path in that directory instead.
        """
        path = self.path.parent / image
        return path if os.path.lexists(path) or not os.path.lexists(image) else Path(image)

    def name_row(self, row: int) -> str:
        """Return `file/line number`, for messages."""
        return f"{self.path.name}/line {self.lines[row]}"

    @classmethod
    def load(cls, shards: str, settings: DataSettings) -> Table:
        """Load a csv file: find its columns, and where each of its rows begins.

        Raises:
            ValueError: If the file is missing, empty or malformed, if it lacks a column that the settings name, if two
                columns have the same name, or if none of several rows can be read.
        """
        path = Path(shards).expanduser()
        try:
            with open(path, "rb") as file:
                first = file.readline()
                heading = first.decode("utf-8-sig")  # Excel writes a byte order mark
                separator = "\t" if path.suffix == ".tsv" else max("\t,;", key=heading.count)
                columns = next(csv.reader([heading], delimiter=separator), [])
                starts, lines, fingerprint = _find_rows(file, separator, first)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read as a csv file: {error}") from None
        if repeated := [name for name in set(columns) if name and columns.count(name) > 1]:
            raise ValueError(f"{path} has several columns named {repeated[0]}; rename them")
        image = next((key for key in settings.image_key.split(";") if key in columns), None)
        templates = [*settings.captions, settings.group_by or ""]
        fields = {field for template in templates for field in list_fields(template)}
        if image is None or not fields <= set(columns):
            missing = sorted(fields - set(columns)) or [settings.image_key]
            raise ValueError(
                f"{path} has no column {', '.join(missing)}; its columns: {', '.join(columns)}. Name them in "
                "data.image_key, data.captions and data.group_by, or, for an evaluation, in eval.caption_key and "
                "eval.label_key"
            )
        if len(starts) < 2:
            raise ValueError(f"{path} has no rows below its column names")
        table = cls(path, separator, columns, image, starts, lines, fingerprint)
        _check_rows(table)
        return table


class TableReader:
    """Reads the samples of a table by (nominal shard, entry)."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._first = [0, *accumulate(table.sizes)]
        self._file = open(table.path, "rb", buffering=0)  # noqa: SIM115 - close() closes it

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return the row's values by column, with the image's bytes in place of its path.

        Raises:
            BrokenSample: If the row is malformed, too short or too long, or if its image cannot be read.
            OSError: If the csv file itself cannot be read.
        """
        values = self.read_row(self._first[shard] + entry)
        sample = {column: value.encode() for column, value in values.items()}
        sample[self._table.image] = read_regular(self._table.find(values[self._table.image]))
        return sample

    def read_row(self, row: int) -> dict[str, str]:
        """Return the values of a row by column. Raises the same exceptions as `read`."""
        table = self._table
        start, stop = table.starts[row : row + 2].tolist()
        data = os.pread(self._file.fileno(), stop - start, start)
        try:
            lines = io.StringIO(data.decode(), newline="\n")
            values = next(csv.reader(lines, delimiter=table.separator, strict=True), [])
        except csv.Error as error:
            # A quote that is not closed joins its row with the lines up to the next quote.
            span = f" of {num} lines" if (num := data.strip().count(b"\n") + 1) > 1 else ""
            raise BrokenSample(f"the row{span} cannot be read: {error}; {_QUOTE}") from None
        except UnicodeDecodeError as error:
            raise BrokenSample(f"the row cannot be read: {error}") from None
        # Spreadsheets may write empty values after the last column.
        if any(values[len(table.columns) :]):
            raise BrokenSample(
                f"the row has {len(values)} values, but there are {len(table.columns)} columns; {_QUOTE}"
            )
        named = dict(zip(table.columns, values, strict=False))
        if table.image not in named:
            raise BrokenSample(
                f"the row has no {table.image}: it has {len(values)} of {len(table.columns)} values"
            )
        if not named[table.image].strip():
            raise BrokenSample(f"its {table.image} is empty")
        return named

    def name(self, shard: int, entry: int) -> str:
        """Return `file/line number`, for messages."""
        return self._table.name_row(self._first[shard] + entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, eq=False)
class CaptionedImages(Source):
    """The images of a table with their captions or labels. Used by evaluations."""

    table: Table
    rows: list[int]
    """The number of each image's first row."""
    texts: list[list[str] | BrokenSample]
    """The captions or labels of each image, without line breaks, or the reason why it has none."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of images. All of them are in one nominal shard."""
        return [len(self.rows)]

    def open(self, num_slots: int, window: int) -> CaptionedReader:
        """Open the file for reading in one process."""
        return CaptionedReader(self)

    @classmethod
    def load(cls, table: Table, template: str, joins: bool = True) -> CaptionedImages:
        """Read the texts of a table.

        Args:
            table: The table.
            template: Template of a row's text.
            joins: Whether rows with the same path are one image with several texts. A broken row is always a separate
                image, so that it is counted as broken.
        """
        texts: dict[str | int, tuple[int, list[str] | BrokenSample]] = {}
        with closing(TableReader(table)) as reader:
            for row in range(table.num_samples):
                key: str | int = row
                try:
                    values = reader.read_row(row)
                    if joins:
                        key = os.path.abspath(table.find(values[table.image]))
                    text = " ".join(fill_template(template, values).split())
                except BrokenSample as error:
                    texts.setdefault(key, (row, error))
                    continue
                first, known = texts.get(key, (row, []))
                texts[key] = first, [*([] if isinstance(known, BrokenSample) else known), text]
        images = list(texts.values())
        return cls(table, [row for row, _ in images], [known for _, known in images])


class CaptionedReader(TableReader):
    """Reads the images of a table, which are the entries of one nominal shard."""

    def __init__(self, images: CaptionedImages) -> None:
        super().__init__(images.table)
        self._images = images

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return the image under the name of its column, and its texts, one per line, under "texts"."""
        texts = self._images.texts[entry]
        if isinstance(texts, BrokenSample):
            raise texts
        image = self._table.image
        path = self._table.find(self.read_row(self._images.rows[entry])[image])
        return {image: read_regular(path), "texts": "\n".join(texts).encode()}

    def name(self, shard: int, entry: int) -> str:
        """Return `file/line number` of the image's first row, for messages."""
        return self._table.name_row(self._images.rows[entry])


def _check_rows(table: Table) -> None:
    """Raise ValueError if none of several rows can be read, for example because the folder or separator is wrong."""
    problems = []
    with closing(TableReader(table)) as reader:
        for shard in range(len(table.sizes))[:_NUM_CHECKED]:
            try:
                reader.read(shard, 0)
                return
            except BrokenSample as error:
                problems.append(error)
    raise ValueError(
        f"{table.path}: none of {len(problems)} rows can be read. The first error: {problems[0]}. Paths are relative "
        "to the csv's folder or to the working directory"
    )


def _find_rows(
    file: BinaryIO, separator: str, heading: bytes
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the offsets and line numbers of the rows, and the file's fingerprint.

    A quoted value may span lines. Empty lines are skipped.

    Args:
        file: The file, positioned after its first line.
        separator: The separator of the columns.
        heading: The first line, which the fingerprint includes.
    """
    digest = hashlib.sha256(heading)
    current: list[str] = []  # the lines of the current row

    def lines() -> Iterator[str]:
        for line in file:
            digest.update(line)
            # Only the structure matters here, and latin-1 decodes any byte into one character.
            current.append(line.decode("latin-1"))
            yield current[-1]

    starts, numbers, start = array("q"), array("i"), len(heading)
    rows = csv.reader(lines(), delimiter=separator, strict=True)
    while True:
        number = rows.line_num + 2  # the heading is line 1
        try:
            row = next(rows, None)
        except csv.Error:
            row = current  # a malformed row costs one sample
        if row is None:
            break
        if row:
            starts.append(start)
            numbers.append(number)
        start += sum(map(len, current))
        current.clear()
    starts.append(start)
    return np.array(starts), np.array(numbers), digest.hexdigest()[:16]
