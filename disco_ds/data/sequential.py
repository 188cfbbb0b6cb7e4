"""Sequential reading: every sample is read once, in the order of sample ids. For evaluation and `disco-ds embed`."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache
from itertools import count, islice
from typing import TypeVar

from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import Members, fill_template, list_fields
from disco_ds.data.errors import BrokenSample, breaks_sample, name_broken
from disco_ds.data.images import ImageSpec, decode_for_evaluation, find_image
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.shards import Manifest

logger = logging.getLogger(__name__)
_THREADS = 4
"""Number of decoding threads. Threads help because the decoders release the GIL."""


R = TypeVar("R")


def read_in_threads(
    source: Source,
    positions: Iterable[tuple[int, int]],
    threads: int,
    prepare: Callable[[Members, str], R],
) -> Generator[R | BrokenSample, None, None]:
    """Read and prepare samples, in order. Only `prepare` runs in parallel, a few samples ahead.

    Args:
        source: The source.
        positions: The shard and entry of each sample.
        threads: Number of threads.
        prepare: Prepares a sample, given its members and its name.

    Yields:
        What `prepare` returns. For a sample that cannot be used, a BrokenSample whose message begins with its name.

    Raises:
        OSError: If a shard cannot be read. The message names the shard.
    """
    # A reader is not thread-safe. Decoding takes much longer than reading, so the threads seldom wait for the lock.
    lock = threading.Lock()

    def load(position: tuple[int, int]) -> R | BrokenSample:
        try:
            with lock, breaks_sample(OSError):
                members = reader.read(*position)
                name = reader.name(*position)
            with breaks_sample():
                return prepare(members, name)
        except BrokenSample as error:
            with lock:
                return type(error)(name_broken(reader.name, *position, error))

    with closing(source.open(num_slots=1, window=1)) as reader, ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[R | BrokenSample]] = deque()
        for position in positions:
            waiting.append(pool.submit(load, position))
            # A short queue limits memory.
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def read_all(
    source: Source,
    settings: DataSettings,
    image: ImageSpec,
    rank: int,
    size: int,
    label_template: str,
) -> Iterator[tuple[Tensor, str, int]]:
    """Read the samples with id % size == rank, in the order of their ids. Skip broken samples with a warning.

    Args:
        source: The data set.
        settings: Settings of the data; only image_key and max_pixels are used.
        image: The image size that the model expects.
        rank: Rank of this process.
        size: Number of ranks.
        label_template: Template of the label, such as {json[label]}. It is filled like a caption template.

    Yields:
        (image [3, H, W] uint8, label, sample id).

    Raises:
        OSError: If a shard cannot be read. The message names the shard.
    """

    def prepare(members: Members, name: str) -> tuple[Tensor, str]:
        label = fill_template(label_template, members)
        picture = find_image(members, settings.image_key)
        return decode_for_evaluation(picture, settings.max_pixels, image), label

    positions = islice(_list_positions(source), rank, None, size)
    with closing(read_in_threads(source, positions, _THREADS, prepare)) as samples:
        for index, sample in zip(count(rank, size), samples):
            if isinstance(sample, BrokenSample):
                _warn_once(id(source), str(sample))
            else:
                yield *sample, index


def read_labels(manifest: Manifest, label_template: str) -> list[str | None]:
    """Read the label of every sample, in the order of ids, without reading images.

    Returns:
        One label per sample, or None if the sample has no readable label.

    Raises:
        OSError: If a shard cannot be read. The message names the shard.
    """
    wanted = list_fields(label_template)
    labels: list[str | None] = []
    with closing(manifest.open()) as reader:
        for shard, entry in _list_positions(manifest):
            try:
                with breaks_sample(OSError):
                    labels.append(fill_template(label_template, reader.read(shard, entry, wanted)))
            except BrokenSample:
                labels.append(None)
    return labels


@cache
def _warn_once(source: int, text: str) -> None:
    """Log a message once per source: lost samples of a shard have the same text, and evaluations are repeated."""
    logger.warning("%s", text)


def _list_positions(source: Source) -> Iterator[tuple[int, int]]:
    """Yield the shard and entry of every sample, in the order of sample ids."""
    return ((shard, entry) for shard, size in enumerate(source.sizes) for entry in range(size))
