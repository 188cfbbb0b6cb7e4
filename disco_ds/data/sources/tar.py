"""Random access to the samples of a tar shard: one scan of its headers, then one read per sample member.

Members are grouped into samples as webdataset does: consecutive members with the same key, which is the path up to the
first dot of the basename; a repeated extension begins a new sample. A sample's entry is its position in the tar. Tars
must be uncompressed. Nothing is decoded here.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from disco_ds.data.images.broken import MAX_BYTES, BrokenSample, CacheFullError

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset skips."""
_FILES_KEPT = 64
_MAX_HEADER = 2**16
"""Bytes of a header that holds a long name or pax records. A path of the file system has at most 4096."""
_MAX_READS = 64
"""Reads that belong to one member: its header, and those of its long name, pax records and map of a sparse file."""
_REFUSED = -1
"""Size of a member that is not read: too large, below 0, or of a sparse file, whose bytes are not those stored."""


class TarIndex:
    """Offsets of the members of every complete sample of a tar, stored compactly: a worker holds hundreds of indices.

    A sample is complete if another one or the tar's end mark follows it, so a truncated tar loses its last sample.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.truncated: str | None = None
        """What is wrong with the end of the tar, or None."""
        self.end = 0
        """Offset of the end mark, if the tar is not truncated."""
        self._headers = array("q")
        self._starts = array("q", [0])
        self._extensions: list[str] = []
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
        return [(self._extensions[i], self._offsets[i], self._sizes[i]) for i in numbers]

    def _scan(self, file: BinaryIO) -> None:
        key, seen = None, set[str]()
        walk = _Walk(file)
        try:
            for member in walk:
                prefix, extension = split_name(member.name)
                if prefix is None or extension is None or _META.match(member.name):
                    continue
                extension = sys.intern(
                    extension.lower()
                )  # one object for all members with this extension
                # The sample before ends here, and is known to be complete.
                if prefix != key or extension in seen:
                    if key is not None:
                        self._starts.append(len(self._offsets))
                    self._headers.append(member.offset)
                    key, seen = prefix, set()
                seen.add(extension)
                self._extensions.append(extension)
                self._offsets.append(member.offset_data)
                self._sizes.append(member.size if _is_plain(member) else _REFUSED)
            if key is not None:
                self._starts.append(len(self._offsets))
            self.end = walk.end
        except tarfile.ReadError as error:
            self.truncated = str(error)


def split_name(path: str) -> tuple[str, str] | tuple[None, None]:
    """The key and the extension of a member's name: webdataset's base_plus_ext, `^((?:.*/|)[^.]+)[.]([^/]*)$`.

    That expression takes quadratic time for a name of many slashes; this takes linear time.
    """
    # Its dot does not match a newline, so that the folder ends before the first one.
    newline = path.find("\n")
    start = path.rfind("/", 0, newline if newline >= 0 else None) + 1
    if path.startswith(".", start):
        # There is no key between the folder and the dot, so the folder's last part becomes the key.
        start = path.rfind("/", 0, max(0, start - 1)) + 1
    dot = path.find(".", start)
    if dot <= start or dot < path.rfind("/"):
        return None, None
    return path[:dot], path[dot + 1 :]


def find_leftover(file: BinaryIO, index: TarIndex) -> int | None:
    """Offset of the first byte after the end mark that is not 0, which tar pads with; None if there is none."""
    if index.truncated is not None:
        return None
    offset = file.seek(index.end)
    while block := file.read(2**20):
        if any(block):
            return offset + len(block) - len(block.lstrip(b"\0"))
        offset += len(block)
    return None


def _is_plain(member: tarfile.TarInfo) -> bool:
    return not member.issparse() and 0 <= member.size <= MAX_BYTES


class _Headers:
    """The part of a tar that tarfile may read: headers of a sound size, forwards, and not endlessly many.

    Sizes in a damaged header are any number. tarfile would allocate them, seek there, and go in circles if they are
    negative.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = os.fstat(file.fileno()).st_size
        self.reads = 0
        """Since the last member."""

    def read(self, size: int) -> bytes:
        self.reads += 1
        if not 0 <= size <= _MAX_HEADER or self.reads > _MAX_READS:
            raise tarfile.ReadError(
                f"header number {self.reads} of a member, at byte {self.tell()}, has {size} bytes"
            )
        return self._file.read(size)

    def seek(self, offset: int) -> int:
        if not 0 <= offset < self._end:
            raise tarfile.ReadError("unexpected end of data")
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()


class _Walk:
    """The regular members from offset `at` on. Raises: tarfile.ReadError where the tar is truncated or damaged."""

    def __init__(self, file: BinaryIO, at: int = 0) -> None:
        self._file = file
        self._at = at
        self.end = 0
        """Offset of the end mark, known at the end."""

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        try:
            yield from self._members()
        except (OSError, MemoryError, tarfile.ReadError):
            raise
        except (
            Exception
        ) as error:  # tarfile's for damaged headers: ValueError, OverflowError, UnicodeError, ...
            raise tarfile.ReadError(f"{type(error).__name__}: {error}") from None

    def _members(self) -> Iterator[tarfile.TarInfo]:
        self._file.seek(self._at)
        headers = _Headers(self._file)
        with tarfile.open(fileobj=headers, mode="r:", errorlevel=0) as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                headers.reads = 0
                tar.members.clear()  # tarfile would keep all of them
                if member.isfile():
                    yield member
                if tar.offset <= member.offset:
                    raise tarfile.ReadError(
                        f"the member at byte {member.offset} has {member.size} bytes"
                    )
            # tarfile treats a damaged or missing header as the end of the tar.
            self._file.seek(tar.offset)
            mark = self._file.read(tarfile.BLOCKSIZE)
            if len(mark) < tarfile.BLOCKSIZE or any(mark):
                raise tarfile.ReadError(f"no end mark at byte {tar.offset}")
            self.end = tar.offset


class TarReader:
    """Samples of a folder's shards by (shard, entry); not thread-safe.

    Args:    names: the shards in the manifest's order; num_indices: number of shard indices to keep, of which the least
             recently used is dropped; fetch: opens a remote shard by its number, None: shards are in the folder.
    """

    def __init__(
        self,
        folder: Path,
        names: list[str],
        num_indices: int,
        fetch: Callable[[int], BinaryIO] | None = None,
    ) -> None:
        self._folder = folder
        self._names = names
        self._fetch = fetch
        # Remote shards stay open as long as their index is kept: an open one is locked against eviction.
        self._num_files = _FILES_KEPT if fetch is None else num_indices
        self._index = lru_cache(num_indices)(lambda shard: TarIndex(self._file(shard)))
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def read(
        self, shard: int, entry: int, wanted: Collection[str] | None = None
    ) -> dict[str, bytes]:
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
                    if size == _REFUSED:
                        raise BrokenSample(
                            f"its {extension} member is sparse, or its size not in 0 .. {MAX_BYTES:,}"
                        )
                    sample[extension] = os.pread(file.fileno(), size, offset)
                    if len(sample[extension]) < size:
                        raise BrokenSample(
                            f"its {extension} member has {len(sample[extension])} of {size} bytes"
                        )
            return sample
        except OSError as error:
            if (
                opened := self._files.pop(shard, None)
            ) is not None:  # a later attempt must not use a stale handle
                opened.close()
            # The error of a read does not name the file.
            raise OSError(
                error.errno, error.strerror, str(self._folder / self._names[shard])
            ) from None

    def name(self, shard: int, entry: int) -> str:
        """`shard/key`, for messages."""
        index = self._index(shard)
        if entry < len(index):
            with suppress(tarfile.ReadError, StopIteration):  # the shard has been truncated since
                member = next(iter(_Walk(self._file(shard), index.header(entry))))
                return f"{self._names[shard]}/{split_name(member.name)[0]}"
        return f"{self._names[shard]}/entry {entry}"

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._index.cache_clear()

    def _file(self, shard: int) -> BinaryIO:
        if shard not in self._files:
            self._files[shard] = self._open(shard)
            if len(self._files) > self._num_files:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(shard)
        return self._files[shard]

    def _open(self, shard: int) -> BinaryIO:
        while self._fetch is not None:
            try:
                return self._fetch(shard)
            except CacheFullError:
                if not self._files:
                    raise
                # Closing the shard that was read longest ago allows the cache to evict it.
                warnings.warn(
                    "data.remote.cache_gb is small: some shards may be fetched again and again",
                    stacklevel=2,
                )
                self._files.popitem(last=False)[1].close()
        # Unbuffered: a buffer would read 8 KiB for a header of 512 bytes.
        return open(self._folder / self._names[shard], "rb", buffering=0)
