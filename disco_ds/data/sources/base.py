"""The protocol of every source of samples, and how one of its samples becomes an image and a caption.

A source divides its samples into shards. Its class derives from Source and
- has `sizes`, the number of samples in each shard, from which the data order and the sample ids follow;
- has `fingerprint`, a text that changes when samples are added, removed, replaced or reordered: a run is resumed only
  while it stays the same;
- has `open`, which returns a Reader of samples by (shard, entry);
- takes its options, `data.options` of a recipe, as keyword arguments of its constructor.

Every rank constructs the source for itself and sends it to its workers, so a source must pickle. A Reader is used in
the process that opened it. docs/extending.md has an example; source.py finds the source that a recipe names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.images.broken import DataError, breaks_sample
from disco_ds.data.images.decode import (
    NUM_CROP_NUMBERS,
    Captions,
    ImageSpec,
    decode_image,
    decode_pixels,
    find_image,
    resize_for_evaluation,
    resize_random_crop,
    shorten_caption,
)
from disco_ds.data.order.counter_rng import CAPTION_COLUMN, CROP_COLUMN, keyed_row

Tokenize = Callable[[list[str]], Tensor]
"""Captions -> [n, L] int64. It is sent to the workers, so it must pickle."""

Decode = Callable[[], Tensor]
"""Returns a sample's image, [3, H, W] uint8, the same at every call. It holds what that takes, such as the compressed
bytes."""


@dataclass(frozen=True)
class SampleForm:
    """The form in which the model takes a sample."""

    image: ImageSpec
    tokenize: Tokenize
    context_length: int
    """Number of tokens in a caption."""
    vocab_size: int


class Reader(Protocol):
    """Access to the samples of a source as named bytes, such as {"jpg": ..., "txt": ...}."""

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """The members of a sample; data.image_key and data.captions refer to them by name.

        Raises:  BrokenSample to have the sample skipped, with the reason, as any other exception has it; OSError if the
                 shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """How messages refer to the sample."""

    def close(self) -> None:
        """Close all files."""


class Samples(Protocol):
    """Access to the samples of a source as images and tokens, which a worker writes into a batch.

    What `read` returns is a function of the sample's id, the epoch and the settings alone.
    """

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        """What decodes the image, and text [L] int64, of the sample whose id is `index`.

        Raises:  BrokenSample, as does the first decoding; OSError if the shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """How messages refer to the sample."""

    def close(self) -> None:
        """Close all files."""


class Source:
    """A data set that can be trained on; see the top of this file."""

    # A cached_property can also be overridden by an attribute that the constructor sets.
    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples in each shard."""
        raise NotImplementedError(f"{type(self).__name__} has no sizes")

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the samples and their order."""
        raise NotImplementedError(f"{type(self).__name__} has no fingerprint")

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    def open(self, num_slots: int, window: int) -> Reader:
        """Open the source for reading in one process.

        Args:    num_slots: streams that the process reads in turn; window: entries that follow each other in the data
                 set, among which a stream is shuffled. Together they determine how many shards are in use at a time.
        """
        raise NotImplementedError(f"{type(self).__name__} has no open")

    def open_fetcher(self) -> Callable[[int], None] | None:
        """Return a function that fetches a shard before it is read, in threads beside the Reader; or None.

        It does nothing for a shard that is there. It may raise anything: the Reader fetches the shard then, or reports.
        """
        return None

    def label(self, shard: int, entry: int) -> str:
        """How messages refer to a sample when nothing can be read."""
        return f"shard {shard}, entry {entry}"

    def open_samples(
        self, settings: DataSettings, form: SampleForm, seed: int, num_slots: int
    ) -> Samples:
        """Its samples in the model's form; a source that generates images and tokens itself overrides this."""
        return DecodedSamples(self, settings, form, seed, num_slots)


class DecodedSamples:
    """Samples decoded from the members that a source's Reader returns; the source is opened at the first read."""

    def __init__(
        self, source: Source, settings: DataSettings, form: SampleForm, seed: int, num_slots: int
    ) -> None:
        self._source = source
        self._settings = settings
        self._form = form
        self._seed = seed
        self._num_slots = num_slots
        self._captions = Captions(settings.captions)

    @cached_property
    def _reader(self) -> Reader:
        return self._source.open(self._num_slots, self._settings.window)

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        with breaks_sample(OSError):
            members = self._reader.read(shard, entry)
        # The crop's numbers come first in the row, the caption's last.
        numbers = keyed_row(self._seed, epoch, index, CAPTION_COLUMN + 1, CROP_COLUMN)
        with breaks_sample():
            caption = self._captions.pick(members, numbers[CAPTION_COLUMN])
            data = find_image(members, self._settings.image_key)
            text = self._form.tokenize([shorten_caption(caption)])
        if text.shape != (1, self._form.context_length):
            raise DataError(
                f"the tokenizer returned {tuple(text.shape)} for one caption, the model takes "
                f"{(1, self._form.context_length)}: build both from one model config"
            )
        # Only compressed bytes are kept, so that a worker can hold a whole step's samples to decode them a second time.
        return partial(self._decode, data, numbers[:NUM_CROP_NUMBERS]), text[0]

    def _decode(self, data: bytes, uniform: Sequence[float]) -> Tensor:
        settings = self._settings
        with breaks_sample():
            if settings.crop_scale is None:
                return resize_for_evaluation(
                    decode_image(data, settings.max_pixels), self._form.image
                )
            pixels = decode_pixels(data, settings.max_pixels)
            return resize_random_crop(
                pixels, self._form.image, settings.crop_scale, settings.crop_ratio, uniform
            )

    def name(self, shard: int, entry: int) -> str:
        return self._reader.name(shard, entry)

    def close(self) -> None:
        if "_reader" in vars(self):  # cached_property has stored it: the source was opened
            self._reader.close()
