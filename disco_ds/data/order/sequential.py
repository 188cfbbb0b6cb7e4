"""Reads every sample of a data set once, in the order of its id, for evaluation: no augmentation, no shuffling."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice

from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.images.broken import BrokenSample, breaks_sample, name_broken
from disco_ds.data.images.decode import (
    ImageSpec,
    decode_image,
    fill_template,
    find_image,
    list_fields,
    resize_for_evaluation,
)
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.manifest import Manifest

THREADS = 4
"""PIL releases the interpreter's lock while it decodes and resizes."""
_AHEAD = 16

logger = logging.getLogger(__name__)


def read_all(
    source: Source,
    settings: DataSettings,
    image: ImageSpec,
    rank: int,
    size: int,
    label_template: str,
    on_broken: Callable[[str], None] = logger.warning,
) -> Iterator[tuple[Tensor, str, int]]:
    """(image [3, H, W] uint8, label, id) of the samples with id % size == rank, in order.

    Args:    label_template: filled like a caption, e.g. {json[label]}; on_broken: called with `shard/key: reason` for
             each sample that cannot be read, which is skipped.
    Raises:  OSError naming a shard that cannot be read.
    """

    def decode(members: dict[str, bytes]) -> tuple[Tensor, str]:
        with breaks_sample():
            label = fill_template(label_template, members)
            picture = decode_image(find_image(members, settings.image_key), settings.max_pixels)
            return resize_for_evaluation(picture, image), label

    with closing(source.open(num_slots=1, window=1)) as reader, ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[int, int, int, Future[tuple[Tensor, str]]]] = deque()

        def finish() -> Iterator[tuple[Tensor, str, int]]:
            shard, entry, index, future = waiting.popleft()
            try:
                yield *future.result(), index
            except BrokenSample as error:
                on_broken(name_broken(reader.name, shard, entry, error))

        # Reading is sequential in this thread, decoding parallel; a short queue keeps the order and bounds memory.
        for shard, entry, index in islice(_places(source), rank, None, size):
            try:
                with breaks_sample(OSError):
                    members = reader.read(shard, entry)
            except BrokenSample as error:
                on_broken(name_broken(reader.name, shard, entry, error))
                continue
            waiting.append((shard, entry, index, pool.submit(decode, members)))
            if len(waiting) > _AHEAD:
                yield from finish()
        while waiting:
            yield from finish()


def read_labels(manifest: Manifest, label_template: str) -> list[str | None]:
    """The label of every sample in the order of its id, without reading images; None for a sample without label.

    Raises:  OSError naming a shard that cannot be read.
    """
    wanted = list_fields(label_template)
    labels: list[str | None] = []
    with closing(manifest.open()) as reader:
        for shard, entry, _ in _places(manifest):
            try:
                with breaks_sample(OSError):
                    labels.append(fill_template(label_template, reader.read(shard, entry, wanted)))
            except BrokenSample:
                labels.append(None)
    return labels


def _places(source: Source) -> Iterator[tuple[int, int, int]]:
    """(shard, entry, id) of every sample."""
    index = 0
    for shard, samples in enumerate(source.sizes):
        for entry in range(samples):
            yield shard, entry, index
            index += 1
