"""Random access to the samples of a tar shard: one scan of the headers, then one read for each member of a sample.

Before the scan, TarReader reads a shard once from start to end, which loads it into the page cache. The disk therefore
serves only sequential reads.

Members are grouped into samples as in webdataset. Consecutive members with the same key form a sample; the key is the
path up to the first dot of the file name. A repeated extension begins a new sample. Hidden files are skipped. A
sample's entry is its index among the samples of the tar. Tars must be uncompressed. Nothing is decoded here.
"""

import io
import os
import re
import sys
import tarfile
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from disco_ds.data.errors import MAX_BYTES, BrokenSample, CacheFullError, DroppedSample, LostSample
from disco_ds.data.sources.base import Shard
from disco_ds.data.sources.fetching import progress

_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset skips."""
_MAX_HEADER = 2**16
"""Maximum size in bytes of a header with a long name or pax records. Real headers are much smaller, because a path
has at most 4,096 bytes."""
_FILES_KEPT = 64
"""Maximum number of local shards that stay open."""
_MAX_READ_AHEAD = 2 * 2**30
"""Shards with more bytes are not read whole before the scan, because the page cache might not keep them for long."""
_BLOCK = 2**20
_SPARSE = -2
"""Recorded as the size of a sparse member, whose data are not consecutive bytes of the tar."""


class TarIndex:
    """Offsets of the members of every complete sample of a tar.

    A sample is complete if another one or the tar's end mark follows it, so a truncated tar loses its last sample. The
    offsets are stored compactly, because a worker holds hundreds of indices.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.truncated: str | None = None
        """Why the tar is truncated, damaged or not a tar, for messages. None if it is intact."""
        self.end = 0
        """Offset of the end mark in bytes. It is known only if `truncated` is None."""
        self.headers = array("q")
        """Offset of each sample's first header."""
        self._starts = array("q")
        """Number of each sample's first member. If the tar is intact, the number of members follows."""
        self._extensions: list[str] = []
        self._offsets = array("q")
        self._sizes = array("q")
        try:
            self._scan(file)
            self._starts.append(len(self._offsets))
            self.end = file.tell() - tarfile.BLOCKSIZE
        except tarfile.ReadError as error:
            self.truncated = str(error)

    def __len__(self) -> int:
        return max(len(self._starts) - 1, 0)

    def members(self, entry: int) -> list[tuple[str, int, int]]:
        """Return (lower-case extension, offset, size in bytes) of the sample's members."""
        numbers = range(self._starts[entry], self._starts[entry + 1])
        return [(self._extensions[i], self._offsets[i], self._sizes[i]) for i in numbers]

    def _scan(self, file: BinaryIO) -> None:
        key, seen = None, set[str]()
        for member in _walk(file):
            parts = split_name(member.name)
            if parts is None or _META.match(member.name):
                continue
            # Intern the extension, so that all members with it share one string object.
            prefix, extension = parts[0], sys.intern(parts[1].lower())
            if prefix != key or extension in seen:
                self._starts.append(len(self._offsets))
                self.headers.append(member.offset)
                key, seen = prefix, set()
            seen.add(extension)
            self._extensions.append(extension)
            self._offsets.append(member.offset_data)
            # A damaged header may contain any size. _read_member refuses sizes that are out of range.
            size = min(max(member.size, -1), MAX_BYTES + 1)
            self._sizes.append(_SPARSE if member.issparse() else size)


def split_name(path: str) -> tuple[str, str] | None:
    """Split a member's name into key and extension; return None if the file is hidden or has no extension."""
    folder, slash, name = path.rpartition("/")
    stem, dot, extension = name.partition(".")
    return (folder + slash + stem, extension) if stem and dot else None


class _Headers(io.FileIO):
    """The file of a shard for tarfile, which reads only headers. Their size is limited.

    A damaged header can contain any size. tarfile would allocate that much memory, seek that far, or spend hours on a
    large pax header, whose text it searches in quadratic time.
    """

    def read(self, size: Any = -1, /) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"the header at byte {self.tell()} claims to have {size} bytes")
        return super().read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if not 0 <= offset < os.fstat(self.fileno()).st_size:
            raise tarfile.ReadError("unexpected end of data")
        return super().seek(offset)


def _walk(file: BinaryIO, at: int = 0) -> Iterator[tarfile.TarInfo]:
    """Yield the regular members from offset `at` on.

    Afterwards, the position of the file is one block after the start of the end mark.

    Raises:
        tarfile.ReadError: Where the tar is truncated or damaged.
    """
    file.seek(at)
    headers = _Headers(file.fileno(), closefd=False)
    try:
        with tarfile.open(fileobj=headers, mode="r:", errorlevel=0) as tar:
            while (member := tar.next()) is not None:
                # tarfile would otherwise keep all members in memory.
                tar.members.clear()  # type: ignore[attr-defined]
                if member.isfile():
                    yield member
                # A damaged header may contain a negative size, which would send tarfile into an infinite loop.
                if tar.offset <= member.offset:
                    raise tarfile.ReadError(
                        f"the member at byte {member.offset} has a size of {member.size} bytes"
                    )
            # tarfile treats a damaged or missing header as the end of the tar.
            file.seek(tar.offset)
            mark = file.read(tarfile.BLOCKSIZE)
            if len(mark) < tarfile.BLOCKSIZE or any(mark):
                raise tarfile.ReadError(f"no end mark at byte {tar.offset}")
    except (OSError, MemoryError, tarfile.ReadError):
        raise
    except Exception as error:  # tarfile raises many types for damaged headers
        raise tarfile.ReadError(f"{type(error).__name__}: {error}") from None


class TarReader:
    """Reads the samples of a folder's shards by (shard, entry). It is not thread-safe.

    Args:
        folder: Folder of the shards.
        shards: The shards in the manifest's order. The number of samples of a shard is 0 if it is unknown.
        num_indices: Maximum number of shard indices to keep; the least recently used one is dropped.
        fetch: Opens a remote shard by its number; None if the shards are in the folder.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        num_indices: int,
        fetch: Callable[[int], BinaryIO] | None = None,
    ) -> None:
        self._folder = folder
        self._shards = shards
        self._open = fetch or self._open_local
        # Remote shards stay open as long as their index is kept: an open shard is locked against eviction.
        self._num_files = _FILES_KEPT if fetch is None else num_indices
        self._index = lru_cache(num_indices)(self._index_shard)
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def read(
        self, shard: int, entry: int, wanted: Collection[str] | None = None
    ) -> dict[str, bytes]:
        """Return the members of a sample by extension.

        Args:
            shard: Number of the shard.
            entry: Position of the sample in the shard.
            wanted: The extensions to read; None reads all.

        Raises:
            DroppedSample: If the tar is intact, but has fewer samples than the manifest says.
            LostSample: If the tar is damaged before the sample.
            BrokenSample: If a member cannot be read completely.
            OSError: If the shard itself cannot be read; the error names it.
        """
        try:
            index, file = self._index(shard), self._file(shard)
            if entry >= len(index):
                if index.truncated is None:
                    # _index_shard has warned about this shard. The manifest was wrong, but no sample is damaged.
                    raise DroppedSample(f"the tar has only {len(index)} samples")
                raise LostSample(
                    f"the shard is damaged after {len(index)} samples, and the rest is lost: {index.truncated}"
                )
            return {
                extension: _read_member(file, extension, offset, size)
                for extension, offset, size in index.members(entry)
                if wanted is None or extension in wanted
            }
        except OSError as error:
            if shard in self._files:  # a later attempt must not use a stale handle
                self._files.pop(shard).close()
            # The error of a read does not name the file.
            path = str(self._folder / self._shards[shard].name)
            raise OSError(error.errno, error.strerror, path) from None

    def count(self, shard: int) -> int:
        """Return the number of samples in a shard. Raises OSError like `read`."""
        return len(self._index(shard))

    def name(self, shard: int, entry: int) -> str:
        """Return `shard/key`, for messages."""
        key = f"entry {entry}"
        index = self._index(shard)
        if entry < len(index):
            # The shard may have been truncated since it was indexed.
            with suppress(tarfile.ReadError, StopIteration):
                member = next(_walk(self._file(shard), index.headers[entry]))
                key, _ = split_name(member.name) or (key, "")
        return f"{self._shards[shard].name}/{key}"

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._index.cache_clear()

    def _index_shard(self, shard: int) -> TarIndex:
        file = self._file(shard)
        # Fill the page cache. Otherwise, the disk would serve one small read per header and one per member.
        if os.fstat(file.fileno()).st_size <= _MAX_READ_AHEAD:
            while file.read(_BLOCK):
                progress.add()
        index = TarIndex(file)
        name, expected, *_ = self._shards[shard]
        if index.truncated is not None:
            if not expected:
                warnings.warn(
                    f"shard {name} is truncated after {len(index):,} samples: {index.truncated}",
                    stacklevel=2,
                )
        elif expected not in (0, len(index)):
            warnings.warn(
                f"shard {name} has {len(index):,} samples, but the manifest says {expected:,}; remove the manifest and "
                "any wrong sizes.json or stats file, and run disco-ds index again",
                stacklevel=2,
            )
        return index

    def _file(self, shard: int) -> BinaryIO:
        while shard not in self._files:
            try:
                self._files[shard] = self._open(shard)
            except CacheFullError:
                if not self._files:
                    raise
                warnings.warn(
                    "data.remote.cache_gb is small: some shards may be fetched repeatedly",
                    stacklevel=2,
                )
                # The cache can evict a shard that is closed.
                self._close_oldest()
        self._files.move_to_end(shard)
        if len(self._files) > self._num_files:
            self._close_oldest()
        return self._files[shard]

    def _close_oldest(self) -> None:
        """Close the least recently used shard."""
        self._files.popitem(last=False)[1].close()

    def _open_local(self, shard: int) -> BinaryIO:
        # Unbuffered: a buffer would read 8 KiB for a header of 512 bytes.
        return open(self._folder / self._shards[shard].name, "rb", buffering=0)


def _read_member(file: BinaryIO, extension: str, offset: int, size: int) -> bytes:
    if size == _SPARSE:
        raise BrokenSample(f"its {extension} member is stored as a sparse file; use tar without -S")
    if not 0 <= size <= MAX_BYTES:
        raise BrokenSample(f"the size of its {extension} member is not in 0 .. {MAX_BYTES:,} bytes")
    data = os.pread(file.fileno(), size, offset)
    if len(data) < size:
        raise BrokenSample(f"its {extension} member has {len(data):,} of {size:,} bytes")
    return data
