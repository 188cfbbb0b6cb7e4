"""The interface of a source of samples, and the decoding of its samples into an image and a caption.

A source divides its samples into shards. A custom source is a class derived from Source that

- sets `sizes`, the number of samples in each shard, which determines the data order and the sample ids;
- sets `fingerprint`, a text that changes when samples are added, removed, replaced or reordered: a run can only be
  resumed while it stays the same;
- has a method `open` that returns a Reader of samples by (shard, entry);
- takes the recipe's `data.options` as keyword arguments of its constructor.

Every rank constructs the source and sends it to its workers, so it must pickle. A Reader stays in the process that
opened it. docs/extending.md has an example. load.py builds the sources that a recipe names.
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
    ImageSpec,
    decode_image,
    decode_pixels,
    find_image,
    pick_caption,
    resize_for_evaluation,
    resize_random_crop,
    shorten_caption,
)
from disco_ds.data.order.counter_rng import CAPTION_COLUMN, CROP_COLUMN, keyed_row

Tokenize = Callable[[list[str]], Tensor]
"""Maps captions to [n, L] int64. It is sent to the workers, so it must pickle."""

Decode = Callable[[], Tensor]
"""Returns the image of one sample, [3, H, W] uint8, the same at every call. It holds the compressed bytes."""


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
        """Return the members of a sample; data.image_key and data.captions refer to them by name.

        Raises:
            BrokenSample: To skip the sample for the given reason. Any other exception also skips it.
            OSError: If the shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """Return the sample's name for messages."""

    def close(self) -> None:
        """Close all files."""


class Samples(Protocol):
    """Access to the samples of a source as images and tokens, which a worker writes into a batch.

    What `read` returns depends only on the sample's id, the epoch and the settings.
    """

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        """Read the sample with id `index`.

        Returns:
            A function that decodes the image, and the text [L] int64.

        Raises:
            BrokenSample: If the sample cannot be used. The first decoding may also raise it.
            OSError: If the shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """Return the sample's name for messages."""

    def close(self) -> None:
        """Close all files."""


class Source:
    """Base class of data sets that can be trained on; the top of this file explains what a subclass defines."""

    # A subclass may also set these two in its constructor.
    @cached_property
    def sizes(self) -> list[int]:
        """Number of samples in each shard."""
        raise NotImplementedError("the class defines no sizes")

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the samples and their order."""
        raise NotImplementedError("the class defines no fingerprint")

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(self.sizes)

    def open(self, num_slots: int, window: int) -> Reader:
        """Open the source for reading in one process. The arguments determine how many shards are in use at a time.

        Args:
            num_slots: Number of streams that the process reads in turn.
            window: Number of consecutive entries that a stream shuffles together.
        """
        raise NotImplementedError("the class defines no open")

    def open_fetcher(self) -> Callable[[int], None] | None:
        """Return a function that fetches a shard before it is read, or None if shards need no fetching.

        Threads call it while the Reader is in use. It does nothing if the shard is already there. It may raise any
        exception: the Reader then fetches the shard itself or reports the error.
        """
        return None

    def label(self, shard: int, entry: int) -> str:
        """Return a name for a sample without reading anything."""
        return f"shard {shard}, entry {entry}"

    def open_samples(
        self, settings: DataSettings, form: SampleForm, seed: int, num_slots: int
    ) -> Samples:
        """Return the samples in the model's form. Sources that generate images and tokens override this."""
        return DecodedSamples(self, settings, form, seed, num_slots)


@dataclass(frozen=True)
class DecodedSamples:
    """Samples decoded from the members that a source's Reader returns. The first read opens the source."""

    source: Source
    settings: DataSettings
    form: SampleForm
    seed: int
    num_slots: int

    @cached_property
    def _reader(self) -> Reader:
        return self.source.open(self.num_slots, self.settings.window)

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        """Read a sample, see Samples."""
        with breaks_sample(OSError):
            members = self._reader.read(shard, entry)
        # The row begins with the numbers of the crop and ends with that of the caption.
        numbers = keyed_row(self.seed, epoch, index, CAPTION_COLUMN + 1, CROP_COLUMN)
        with breaks_sample():
            caption = pick_caption(self.settings.captions, members, numbers[CAPTION_COLUMN])
            data = find_image(members, self.settings.image_key)
            text = self.form.tokenize([shorten_caption(caption)])
        if text.shape != (1, self.form.context_length):
            raise DataError(
                f"the tokenizer returned shape {tuple(text.shape)} for one caption, but the model expects "
                f"{(1, self.form.context_length)}; build both from the same model config"
            )
        # Only compressed bytes are kept, so a worker can hold all samples of a step and decode them a second time.
        return partial(self._decode, data, numbers[:NUM_CROP_NUMBERS]), text[0]

    def _decode(self, data: bytes, uniform: Sequence[float]) -> Tensor:
        settings, spec = self.settings, self.form.image
        with breaks_sample():
            if settings.crop_scale is None:
                return resize_for_evaluation(decode_image(data, settings.max_pixels), spec)
            pixels = decode_pixels(data, settings.max_pixels)
            return resize_random_crop(
                pixels, spec, settings.crop_scale, settings.crop_ratio, uniform
            )

    def name(self, shard: int, entry: int) -> str:
        """Return the sample's name for messages."""
        return self._reader.name(shard, entry)

    def close(self) -> None:
        """Close all files."""
        if "_reader" in vars(self):  # the cached property was used, so the source is open
            self._reader.close()
