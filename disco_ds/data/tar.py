"""Random access to the samples of a tar shard: one scan of its headers, then one read per sample.

Samples are grouped as webdataset groups them: consecutive members of one key, the path up to the first dot of the
basename; a repeated extension begins a new sample. A sample's entry is its place in the tar. Plain, uncompressed tar
only. Nothing is decoded here.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from webdataset.tariterators import base_plus_ext

_BLOCK = 512
_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset skips."""
_REGULAR = (b"0", b"\0", b"7")
_PAX_RECORD = re.compile(rb"([1-9]\d*) ([^=]+)=")
_FILES_KEPT = 64


class BrokenSample(Exception):  # noqa: N818 - it is an event that costs one sample, not an error of the run
    """A sample that cannot be used, with the reason; the order goes on with the next one."""


class TarIndex:
    """Where the members of every complete sample of a tar lie; compact, a worker holds hundreds of them.

    A sample counts as complete when another one or the tar's end mark follows it, so `truncated` costs the last one.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.truncated: str | None = None
        """What is wrong with the tar's end, or None."""
        self._names: list[str] = []
        self._headers = array("q")
        self._starts = array("q", [0])
        self._extensions = array("l")
        self._offsets = array("q")
        self._sizes = array("q")
        self._scan(file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def header(self, entry: int) -> int:
        """Offset of the sample's first header."""
        return self._headers[entry]

    def members(self, entry: int) -> list[tuple[str, int, int]]:
        """(extension in lower case, offset, size in bytes) of the sample's members."""
        numbers = range(self._starts[entry], self._starts[entry + 1])
        return [(self._names[self._extensions[i]], self._offsets[i], self._sizes[i]) for i in numbers]

    def _scan(self, file: BinaryIO) -> None:
        codes: dict[str, int] = {}
        key, seen = None, set[str]()
        try:
            for name, header, offset, size in _walk(file):
                prefix, extension = base_plus_ext(name)
                if prefix is None or _META.match(name):
                    continue
                extension = extension.lower()
                if prefix != key or extension in seen:
                    if key is not None:
                        self._starts.append(len(self._offsets))
                    self._headers.append(header)
                    key, seen = prefix, set()
                seen.add(extension)
                if extension not in codes:
                    codes[extension] = len(self._names)
                    self._names.append(extension)
                self._extensions.append(codes[extension])
                self._offsets.append(offset)
                self._sizes.append(size)
            if key is not None:
                self._starts.append(len(self._offsets))
        except _TruncatedError as error:
            self.truncated = str(error)


class _TruncatedError(Exception):
    pass


def _walk(file: BinaryIO, at: int = 0) -> Iterator[tuple[str, int, int, int]]:
    """(name, header offset, data offset, size) of the regular members from offset `at` on."""
    end = file.seek(0, os.SEEK_END)
    first = None
    extra: dict[str, str] = {}
    while True:
        file.seek(at)
        block = file.read(_BLOCK)
        if len(block) < _BLOCK:
            raise _TruncatedError(f"it ends at byte {end} without an end mark")
        if not any(block):
            return
        size = _size(block)
        if size is None:
            raise _TruncatedError(f"byte {at} is not a tar header")
        first = at if first is None else first
        kind, data = block[156:157], at + _BLOCK
        if kind in _REGULAR and extra.get("size", "").isdecimal():
            size = int(extra["size"])
        at = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if data + size > end:
            raise _TruncatedError(f"the member at byte {data} needs {size} bytes, the file ends at {end}")
        if kind in (b"x", b"L"):
            body = file.read(size)
            extra |= _pax_records(body) if kind == b"x" else {"path": body.rstrip(b"\0").decode("utf-8", "replace")}
        elif kind not in (b"g", b"K"):
            if kind in _REGULAR:
                yield extra.get("path") or _name(block), first, data, size
            extra, first = {}, None


def _size(block: bytes) -> int | None:
    """The member's size, or None when the header's checksum (by some old tars over signed bytes) is wrong."""
    try:
        size, checksum = (
            int(field.split(b"\0", 1)[0].strip() or b"0", 8) for field in (block[124:136], block[148:156])
        )
    except ValueError:
        return None
    rest = block[:148] + b" " * 8 + block[156:]
    total = sum(rest)
    agrees = checksum == total or checksum == total - 256 * sum(byte > 127 for byte in rest)
    return size if agrees and size >= 0 else None


def _name(block: bytes) -> str:
    name, prefix = block[:100].split(b"\0", 1)[0], block[345:500].split(b"\0", 1)[0]
    if prefix and block[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    return name.decode("utf-8", "replace")


def _pax_records(body: bytes) -> dict[str, str]:
    """`length key=value` lines; a value may hold line breaks, so the lengths lead."""
    records, at = {}, 0
    while match := _PAX_RECORD.match(body, at):
        at += int(match[1])
        records[match[2].decode("utf-8", "replace")] = body[match.end() : at - 1].decode("utf-8", "replace")
    return records


class TarReader:
    """Samples of a folder's shards by (shard, entry); not for several threads at once.

    Args:    names: the shards in the manifest's order; num_indices: shard indices kept, the least recently used goes.
    """

    def __init__(self, folder: Path, names: list[str], num_indices: int) -> None:
        self._folder = folder
        self._names = names
        self._num_indices = num_indices
        self._indices: OrderedDict[int, TarIndex] = OrderedDict()
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def read(self, shard: int, entry: int, wanted: Collection[str] | None = None) -> dict[str, bytes]:
        """The members of a sample by extension, or those of `wanted`.

        Raises:  BrokenSample when the tar ends before the sample; OSError naming a shard that cannot be read.
        """
        try:
            index, file = self._index(shard), self._file(shard)
            if entry >= len(index):
                reason = index.truncated or "fewer than its manifest says"
                raise BrokenSample(f"the tar has {len(index)} complete samples: {reason}")
            sample = {}
            for extension, offset, size in index.members(entry):
                if wanted is None or extension in wanted:
                    sample[extension] = os.pread(file.fileno(), size, offset)
                    if len(sample[extension]) < size:
                        raise BrokenSample(f"its {extension} member has {len(sample[extension])} of {size} bytes")
            return sample
        except OSError as error:
            # A failing read does not say of which file.
            raise OSError(error.errno, error.strerror, str(self._folder / self._names[shard])) from None

    def name(self, shard: int, entry: int) -> str:
        """`shard/key` for messages."""
        index = self._index(shard)
        with suppress(_TruncatedError):
            if entry < len(index):
                member, *_ = next(_walk(self._file(shard), index.header(entry)))
                return f"{self._names[shard]}/{base_plus_ext(member)[0]}"
        return f"{self._names[shard]}/entry {entry}"

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._indices.clear()

    def _index(self, shard: int) -> TarIndex:
        if shard not in self._indices:
            self._indices[shard] = TarIndex(self._file(shard))
            if len(self._indices) > self._num_indices:
                self._indices.popitem(last=False)
        self._indices.move_to_end(shard)
        return self._indices[shard]

    def _file(self, shard: int) -> BinaryIO:
        if shard not in self._files:
            # Unbuffered: a buffer would read 8 KiB for a header of 512 bytes.
            self._files[shard] = open(self._folder / self._names[shard], "rb", buffering=0)  # noqa: SIM115
            if len(self._files) > _FILES_KEPT:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(shard)
        return self._files[shard]
