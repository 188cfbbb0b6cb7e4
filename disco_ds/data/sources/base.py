"""The interface of a source of samples, and the decoding of each sample into an image and a caption.

A source divides its samples into shards. A custom source is a class derived from Source that

- sets `sizes`, a list with the number of samples in each shard, which determines the data order and the sample ids;
- sets `fingerprint`, a string that changes when samples are added, removed, replaced or reordered. A run can be
  resumed only if the fingerprint has not changed;
- defines a method `open` that returns a Reader, which looks up samples by (shard, entry);
- takes the recipe's `data.options` as keyword arguments of its constructor.

Every rank constructs the source and sends it to its data workers, so the source must be picklable. A Reader is never
sent to another process. docs/extending.md has an example. load.py builds the sources that a recipe names.
"""

# Symbols in shapes: n captions of L tokens; H x W pixels.

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import Members, Picture, find_group, pick_caption, shorten_caption
from disco_ds.data.errors import DataError, breaks_sample
from disco_ds.data.images.decode import (
    NUM_CROP_NUMBERS,
    ImageSpec,
    decode_image,
    decode_pixels,
    find_image,
    resize_for_evaluation,
    resize_random_crop,
)
from disco_ds.data.order.counter_rng import CAPTION_COLUMN, CROP_COLUMN, keyed_row
from disco_ds.data.sources.selection import Selection
from disco_ds.data.sources.tar import TarReader
from disco_ds.data.stored import VIEW_SEED, StoredEmbeddings, read_view, replay

Tokenize = Callable[[list[str]], Tensor]
"""Converts n captions into tokens [n, L] int64. It is sent to the data workers, so it must be picklable."""

Decode = Callable[[], Tensor]
"""Decodes one sample's image to [3, H, W] uint8. It holds the compressed bytes, so it can be called again."""


@dataclass(frozen=True)
class SampleForm:
    """The image format and tokenization that the model expects of a sample."""

    image: ImageSpec
    tokenize: Tokenize
    context_length: int
    """Number of tokens per caption, including padding."""
    vocab_size: int
    teacher_tokenize: Tokenize | None = None
    """The tokenizer of a teacher that differs from the model's; None if there is none. The teacher's tokens follow the
    model's tokens in the same row of a micro-batch."""
    teacher_length: int = 0
    """Number of tokens per caption of teacher_tokenize."""
    stored: StoredEmbeddings | None = None
    """Location of the teachers' embeddings that are stored with the samples, or None. The embeddings of a sample are
    packed by StoredView.pack and follow its tokens."""

    @property
    def row_length(self) -> int:
        """Number of int64 values of a sample's row of tokens."""
        packed = 2 + self.stored.width if self.stored else 0
        return self.context_length + self.teacher_length + packed


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

    def open(self, num_slots: int, window: int) -> Reader:
        """Open the source for reading in one process.

        The arguments let a source estimate how many shards are in use at a time.

        Args:
            num_slots: Number of slots that the process reads in turn.
            window: Number of consecutive entries that a slot shuffles together.
        """
        raise NotImplementedError("the class defines no open")

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

    def open_samples(
        self, settings: DataSettings, form: SampleForm, seed: int, num_slots: int
    ) -> Samples:
        """Return the samples as images and tokens. A source that generates images and tokens overrides this method."""
        return Samples(self, settings, form, seed, num_slots)


def digest(tree: Any) -> str:
    """Return the fingerprint of names and numbers that can be written as JSON."""
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Samples:
    """The samples of a source as images and tokens, which a data worker writes into a batch.

    They are decoded from the members that the source's Reader returns. The source is opened when it is first read or
    counted.
    """

    source: Source
    settings: DataSettings
    form: SampleForm
    seed: int
    num_slots: int

    @cached_property
    def reader(self) -> Reader:
        """Reads the members of the samples."""
        return self.source.open(self.num_slots, self.settings.window)

    @cached_property
    def _selection(self) -> Selection:
        return Selection.load(self.settings)

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor, int]:
        """Read the sample with id `index`. The result depends only on the sample, the epoch, the settings and the seed.

        Returns:
            Three values: a function that decodes the image; the row of tokens, [form.row_length] int64; and the number
            of the sample's group (data.group_by), which fits into int64.

        Raises:
            BrokenSample: If the sample cannot be used. The returned function may also raise it.
            OSError: If the shard itself cannot be read.
            DataError: If the tokenizer returns the wrong shape.
            Exception: Any other exception of a custom Reader. The caller treats it like BrokenSample.
        """
        members = self.read_members(shard, entry)
        replayed = None
        with breaks_sample():
            # The first random numbers of the row determine the crop; the last two select the caption.
            numbers = keyed_row(self.seed, epoch, index, CAPTION_COLUMN + 2, CROP_COLUMN)
            template, item = numbers[CAPTION_COLUMN:]
            captions = self.settings.captions
            caption = pick_caption(captions, members, template, item)
            data = find_image(members, self.settings.image_key)
            group_id = find_group(self.settings.group_by, members, caption, data)
            short = [shorten_caption(caption)]
            text = self.form.tokenize(short)
            if self.form.teacher_tokenize:
                text = torch.cat([text, self.form.teacher_tokenize(short)], 1)
            if self.form.stored:
                place = self.seed, epoch, index
                try:
                    view = read_view(
                        self.form.stored, members, captions, (template, item), data, place
                    )
                except DataError as error:
                    raise DataError(f"{self.name(shard, entry)}: {error}") from None
                text = torch.cat([text, view.pack()], 1)
                replayed = view.replayed
                numbers = keyed_row(VIEW_SEED, view.number, view.key, NUM_CROP_NUMBERS)
        expected = 1, self.form.row_length
        if text.shape != expected:
            raise DataError(
                f"the tokenizer returned shape {tuple(text.shape)} for one caption, but the model expects "
                f"{expected}; build the tokenizer and the model from the same config"
            )
        # Keep only the compressed bytes, so that a worker can hold all samples of a step and decode them again.
        decode = partial(self.decode, data, numbers[:NUM_CROP_NUMBERS], replayed)
        return decode, text[0], group_id

    def read_members(self, shard: int, entry: int) -> Members:
        """Return a sample's members, with data.uids, data.filter and data.transforms applied. Raises like `read`."""
        members: Members = self.reader.read(shard, entry)
        with breaks_sample():
            return self.select(members, shard, entry)

    def select(self, members: Members, shard: int, entry: int) -> Members:
        """Apply data.uids, data.filter and data.transforms to the members of a sample."""
        return self._selection.apply(members, lambda: self.name(shard, entry))

    def count(self, shard: int) -> int:
        """Open a tar shard, and return its number of samples."""
        assert isinstance(self.reader, TarReader)
        return self.reader.count(shard)

    def decode(
        self, data: Picture, uniform: Sequence[float], replayed: list[Any] | None = None
    ) -> Tensor:
        """Decode an image to [3, H, W] uint8, with a random crop or the recorded augmentation."""
        settings, spec = self.settings, self.form.image
        with breaks_sample():
            if replayed:
                return replay(decode_image(data, settings.max_pixels), spec, replayed)
            if settings.crop_scale is None:
                return resize_for_evaluation(decode_image(data, settings.max_pixels), spec)
            pixels = decode_pixels(data, settings.max_pixels)
            return resize_random_crop(
                pixels, spec, settings.crop_scale, settings.crop_ratio, uniform
            )

    def name(self, shard: int, entry: int) -> str:
        """Return the sample's name for messages."""
        return self.reader.name(shard, entry)

    def close(self) -> None:
        """Close all files."""
        if "reader" in vars(self):  # the cached property was read, so the source is open
            self.reader.close()
