"""Where training samples come from: tar shards, or random pixels and tokens.

A source says how its samples are divided into shards and reads one by (shard, entry); what it returns is a function of
the sample's id, the epoch and the settings. Sources are sent to the worker processes, so they pickle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from disco_ds.config import DataSettings
from disco_ds.data.decode import (
    NUM_CROP_NUMBERS,
    Captions,
    ImageSpec,
    decode_image,
    find_image,
    resize_for_evaluation,
    resize_random_crop,
)
from disco_ds.data.keyed import CAPTION_COLUMN, CROP_COLUMN, keyed_bits, keyed_row
from disco_ds.data.manifest import Manifest
from disco_ds.data.order import SLOTS
from disco_ds.data.tar import TarReader

Tokenize = Callable[[list[str]], Tensor]
"""Captions -> [n, L] int64; it is sent to the workers, so it pickles."""

_CELLS = 8
"""A synthetic image is this many cells high and wide, each of one colour."""


class Source(Protocol):
    sizes: list[int]
    """Samples per shard."""
    fingerprint: str

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """(image [3, H, W] uint8, text [L] int64) of a sample; index is its id.

        Raises:  BrokenSample; OSError when the shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """The sample, for messages."""

    def close(self) -> None:
        """Close its files."""


class ShardSource:
    """Samples of the tar shards of a manifest.

    Args:    num_slots: slots that one process reads in turn, which says how many shards it needs at hand.
    """

    def __init__(
        self,
        settings: DataSettings,
        manifest: Manifest,
        image: ImageSpec,
        tokenize: Tokenize,
        context_length: int,
        seed: int,
        num_slots: int,
    ) -> None:
        self.sizes = manifest.sizes
        self.fingerprint = manifest.fingerprint
        self._settings = settings
        self._image = image
        self._tokenize = tokenize
        self._context_length = context_length
        self._seed = seed
        self._captions = Captions(settings.captions)
        per_window = math.ceil(settings.window * len(manifest.shards) / manifest.num_samples) + 1
        self._reader = TarReader(manifest.folder, [shard.name for shard in manifest.shards], num_slots * per_window)

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        members = self._reader.read(shard, entry)
        numbers = keyed_row(self._seed, epoch, index, CAPTION_COLUMN + 1, CROP_COLUMN)
        caption = self._captions.pick(members, numbers[CAPTION_COLUMN])
        picture = decode_image(find_image(members, self._settings.image_key), self._settings.max_pixels)
        if self._settings.crop_scale is None:
            image = resize_for_evaluation(picture, self._image)
        else:
            image = resize_random_crop(
                picture, self._image, self._settings.crop_scale, self._settings.crop_ratio, numbers[:NUM_CROP_NUMBERS]
            )
        text = self._tokenize([caption])
        if text.shape != (1, self._context_length):
            raise ValueError(
                f"the tokenizer returned {tuple(text.shape)} for one caption, the model takes "
                f"{(1, self._context_length)}: build both from one model config"
            )
        return image, text[0]

    def name(self, shard: int, entry: int) -> str:
        return self._reader.name(shard, entry)

    def close(self) -> None:
        self._reader.close()


class SyntheticSource:
    """Random pixels and tokens, a function of the id: to try a model or a cluster without data."""

    def __init__(self, num_samples: int, image: ImageSpec, context_length: int, vocab_size: int, seed: int) -> None:
        self.sizes = self.divide(num_samples)
        self.fingerprint = f"synthetic-{num_samples}"
        self._image = image
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._seed = seed

    @staticmethod
    def divide(num_samples: int) -> list[int]:
        """Sizes of the pretended shards, enough for the largest default number of slots."""
        num_shards = min(SLOTS[0], num_samples)
        return [(i + 1) * num_samples // num_shards - i * num_samples // num_shards for i in range(num_shards)]

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        height, width = self._image.size
        num_cells = 3 * _CELLS * _CELLS
        # The epoch stays out of the key: a sample has one image and one caption.
        bits = keyed_bits(self._seed, torch.tensor([0]), torch.tensor([index]), num_cells + self._context_length)[0]
        cells = (bits[:num_cells] & 255).to(torch.uint8).view(3, _CELLS, _CELLS)
        rows, columns = torch.arange(height) * _CELLS // height, torch.arange(width) * _CELLS // width
        text = (bits[num_cells:] & 0xFFFF_FFFF) % (self._vocab_size - 2)
        # As open_clip's tokenizer ends: its text towers pool at the largest token.
        text[0], text[-1] = self._vocab_size - 2, self._vocab_size - 1
        # Columns first: the rows are then copied whole.
        return cells.index_select(2, columns).index_select(1, rows), text

    def name(self, shard: int, entry: int) -> str:
        return f"synthetic {shard}/{entry}"

    def close(self) -> None:
        pass
