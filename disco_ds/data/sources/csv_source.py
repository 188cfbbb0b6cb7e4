"""A csv file of image paths and captions: a row is a sample, its number the sample's id.

The format is that of open_clip's --train-data: column names in the first line, separated by tabs or commas.
data.image_key names the column of paths, relative to the csv's folder or, as open_clip has them, the working directory;
the templates of data.captions name the others.
Only the offsets of the rows are kept in memory; for the data order the rows are divided into nominal shards.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from disco_ds.config.data import DataSettings
from disco_ds.data.images.broken import BrokenSample, breaks_sample, read_regular
from disco_ds.data.images.decode import list_fields
from disco_ds.data.order.slots import divide
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.listing import is_table

_FIRST_ROWS = 16
logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Table(Source):
    path: Path
    separator: str
    columns: tuple[str, ...]
    image: str
    """The column of image paths."""
    starts: np.ndarray
    """Byte offsets at which the rows begin and the last one ends, [n + 1] int64."""
    fingerprint: str
    """Digest of the whole file, since its rows are the samples."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows in each nominal shard."""
        return divide(len(self.starts) - 1)

    def open(self, num_slots: int, window: int) -> TableReader:
        return TableReader(self)

    def find(self, image: str) -> Path:
        """The path of an image: relative to the csv's folder or, where there is none, to the working directory."""
        path = self.path.parent / image
        return path if os.path.lexists(path) or not os.path.lexists(image) else Path(image)

    @staticmethod
    def takes(shards: str) -> bool:
        return is_table(shards)

    @classmethod
    def load(cls, shards: str, manifest: Path | None, settings: DataSettings) -> Table:
        """Find the rows of a csv file; it needs no manifest.

        Raises:  ValueError for a file that is missing, empty or malformed, and for columns that it does not have.
        """
        path, separator = Path(shards).expanduser(), settings.csv_separator
        try:
            with open(path, "rb") as file:
                first = file.readline()
                heading = first.decode("utf-8-sig")  # Excel writes a byte order mark
                separator = separator or ("\t" if "\t" in heading else ",")
                columns = tuple(next(csv.reader([heading], delimiter=separator), ()))
                starts, fingerprint = _find_rows(file, separator, first)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read as a csv file: {error}") from None
        image = next((key for key in settings.image_key.split(";") if key in columns), None)
        missing = sorted(
            {field for template in settings.captions for field in list_fields(template)}
            - set(columns)
        )
        if image is None or missing:
            what = (
                f"captions name {', '.join(missing)}"
                if missing
                else f"image_key is {settings.image_key}"
            )
            raise ValueError(
                f"{path} has the columns {', '.join(columns)}, {what}: set, for instance, data.image_key="
                "filepath data.captions={'{title}': 1} (and data.csv_separator=';')"
            )
        if len(starts) < 2:
            raise ValueError(f"{path} has no row below its column names")
        table = cls(path, separator, columns, image, starts, fingerprint)
        _refuse_missing(table)
        return table


class TableReader:
    """Samples of a table by (nominal shard, entry)."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._first = [0, *accumulate(table.sizes)]
        self._file: BinaryIO | None = None

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """The row's values by column, with the image's bytes in place of its path.

        Raises:  BrokenSample if the row is short or its image cannot be read; OSError for the csv file itself.
        """
        table, row = self._table, self._first[shard] + entry
        if self._file is None:
            self._file = open(table.path, "rb", buffering=0)  # noqa: SIM115 - close() closes it
        start, stop = int(table.starts[row]), int(table.starts[row + 1])
        try:
            text = os.pread(self._file.fileno(), stop - start, start).decode()
            values = next(
                csv.reader(io.StringIO(text, newline="\n"), delimiter=table.separator), []
            )
            sample = {
                column: value.encode() for column, value in zip(table.columns, values, strict=False)
            }
        except (UnicodeDecodeError, csv.Error) as error:
            raise BrokenSample(f"the row cannot be read: {error}") from None
        if table.image not in sample:
            raise BrokenSample(
                f"the row has no {table.image}: {len(values)} of {len(table.columns)} values"
            )
        path = table.find(sample[table.image].decode())
        try:
            return {**sample, table.image: read_regular(path)}
        except (OSError, ValueError, BrokenSample) as error:
            raise BrokenSample(f"image {path} cannot be read: {error}") from None

    def name(self, shard: int, entry: int) -> str:
        return f"{self._table.path.name}/row {self._first[shard] + entry}"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _refuse_missing(table: Table) -> None:
    """Look at the first rows. Raises: ValueError where none of their images can be read, naming the first."""
    reader, reasons = TableReader(table), []
    with closing(reader):
        places = ((shard, entry) for shard, size in enumerate(table.sizes) for entry in range(size))
        for place in islice(places, _FIRST_ROWS):
            try:
                with breaks_sample():
                    reader.read(*place)
                return
            except BrokenSample as error:
                reasons.append(str(error))
    raise ValueError(
        f"{table.path}: none of the first {len(reasons)} rows can be read; the first: {reasons[0]}; paths are relative "
        "to the csv's folder or to the working directory"
    )


def _find_rows(file: BinaryIO, separator: str, heading: bytes) -> tuple[np.ndarray, str]:
    """Offsets of the rows, and the file's fingerprint. A quoted value may span lines; empty lines are no rows."""
    position, digest = file.tell(), hashlib.sha256(heading)
    current: list[str] = []

    def lines() -> Iterator[str]:
        nonlocal position
        for line in file:
            position += len(line)
            digest.update(line)
            # Only the structure matters here, and latin-1 decodes any byte.
            current.append(line.decode("latin-1"))
            yield current[-1]

    starts, start, joined = array("q"), position, list[str]()
    rows = csv.reader(lines(), delimiter=separator)
    while True:
        try:
            row = next(rows, None)
            if row is None:
                break
            if len(current) > 1:
                # A quote that is not closed joins the lines up to the next quote, which strict parsing refuses there.
                next(csv.reader(current, delimiter=separator, strict=True))
        except csv.Error:  # where `row` could not be read, it will be a broken sample
            row = current
            joined += (
                [f"{rows.line_num - len(current) + 2} to {rows.line_num + 1}"]
                if len(current) > 1
                else []
            )
        if row:
            starts.append(start)
        start = position
        current.clear()
    starts.append(position)
    if joined:
        logger.warning(
            "%s: a quote that is not closed makes one row of lines %s%s; their samples are lost: close or remove it",
            getattr(file, "name", "the csv file"),
            joined[0],
            f", and {len(joined) - 1} more times" if len(joined) > 1 else "",
        )
    return np.array(starts, dtype=np.int64), digest.hexdigest()[:16]
