"""The interface of a source of samples, and the description of a tar shard.

A source divides its samples into shards. A custom source is a class derived from Source that

- sets `sizes`, a list with the number of samples in each shard, which determines the data order and the sample ids;
- sets `fingerprint`, a string that changes when samples are added, removed, replaced or reordered. A run can be
  resumed only if the fingerprint has not changed;
- defines a method `open` that returns a Reader, which looks up samples by (shard, entry), or has the method `read` of a
  Reader itself;
- takes the recipe's `data.options` as keyword arguments of its constructor.

Every rank constructs the source and sends it to its data workers, so the source must be picklable. A Reader is never
sent to another process. docs/extending.md has an example. load.py builds the sources that a recipe names.
"""

import hashlib
import json
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol


class Reader(Protocol):
    """Reads the samples of a source as named byte strings, such as {"jpg": ..., "txt": ...}."""

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return the members of a sample by name. data.image_key and data.captions refer to these names.

        Raises:
            BrokenSample: If the sample must be skipped; the message is the reason. Any other exception also skips the
                sample, except OSError, MemoryError and DataError.
            OSError: If the shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """Return the sample's name for messages."""

    def close(self) -> None:
        """Close all files."""


# A tuple, because a data worker would take twice as long to unpickle 140,000 dataclass objects.
class Shard(NamedTuple):
    """A tar file and its number of samples."""

    name: str
    samples: int
    """Number of complete samples; 0 also if samples are not counted (data.index=none)."""
    bytes: int
    """Size in bytes; 0 if unknown."""
    tag: str = ""
    """ETag or time of the last modification when the shard was counted; "" if unknown."""


class Source:
    """Base class of all data sources. The docstring of this module explains what a subclass defines."""

    # A subclass may override `sizes` and `fingerprint`, or set them as attributes in its constructor.
    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples in each shard."""
        raise NotImplementedError("the class defines no sizes")

    @cached_property
    def fingerprint(self) -> str:
        """A string that identifies the samples and their order."""
        raise NotImplementedError("the class defines no fingerprint")

    @property
    def num_samples(self) -> int:
        """Total number of samples in all shards."""
        return sum(self.sizes)

    def open(self, num_slots: int = 1, window: int = 1) -> Any:
        """Open the source for reading in one process, and return its Reader. By default, the source is the Reader.

        The arguments let a source estimate how many shards are in use at a time.

        Args:
            num_slots: Number of slots that the process reads in turn.
            window: Number of consecutive entries that a slot shuffles together.
        """
        return self

    def close(self) -> None:
        """Close all files that the source has opened as a Reader."""

    def open_fetcher(self) -> Callable[[int], None] | None:
        """Return a function that fetches a shard before it is read, or None if shards need no fetching.

        Background threads call the returned function with a shard number while the Reader is in use. The function does
        nothing if the shard has already been fetched. It may raise any exception. If it does, the Reader later fetches
        the shard itself or reports the error.
        """
        return None

    def label(self, shard: int, entry: int) -> str:
        """Return a name for a sample without reading the sample."""
        return f"shard {shard}, entry {entry}"

    name = label
    """The name for messages, for a source that is its own Reader."""


def digest(tree: Any) -> str:
    """Return the fingerprint of names and numbers that can be written as JSON."""
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16]
