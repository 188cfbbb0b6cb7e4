"""Where training samples come from: tar shards and csv files, one or several, or random pixels and tokens.

A source says how its samples are divided into shards and reads one by (shard, entry); what it returns is a function of
the sample's id, the epoch and the settings. Sources are sent to the worker processes, so they pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from disco_ds.config.data import DataSettings, SourceSettings
from disco_ds.data.decode import (
    NUM_CROP_NUMBERS,
    Captions,
    ImageSpec,
    decode_image,
    decode_pixels,
    find_image,
    resize_for_evaluation,
    resize_random_crop,
)
from disco_ds.data.keyed import CAPTION_COLUMN, CROP_COLUMN, keyed_bits, keyed_row
from disco_ds.data.listing import is_folder, is_table, list_shards, refuse_remote, resolve_shards
from disco_ds.data.manifest import Manifest, load_listed, load_manifest
from disco_ds.data.mixture import Mixture
from disco_ds.data.order import divide
from disco_ds.data.remote import ShardCache
from disco_ds.data.table import Table, TableReader, read_table
from disco_ds.data.tar import TarReader

Tokenize = Callable[[list[str]], Tensor]
"""Captions -> [n, L] int64; it is sent to the workers, so it pickles."""

Decode = Callable[[], Tensor]
"""The image of a sample, [3, H, W] uint8, the same at every call; it holds what it takes, such as compressed bytes."""


@dataclass(frozen=True)
class SampleForm:
    """What the model takes of a sample."""

    image: ImageSpec
    tokenize: Tokenize
    context_length: int
    """Tokens of a caption."""
    vocab_size: int


_CELLS = 8
"""A synthetic image is this many cells high and wide, each of one colour."""


class Source(Protocol):
    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        """What decodes the image, and text [L] int64, of a sample; index is its id.

        Raises:  BrokenSample, as does the first decoding; OSError when the shard itself cannot be read.
        """

    def name(self, shard: int, entry: int) -> str:
        """The sample, for messages."""

    def close(self) -> None:
        """Close its files."""


def load_sources(settings: DataSettings) -> list[Manifest | Table]:
    """What is known of the sources that the settings name, before a sample is read; none if they are synthetic.

    Raises:  ValueError naming the setting: for shards or manifests that are missing or do not fit together, and for
             remote shards that the settings do not allow.
    """
    found = []
    for number, part in enumerate(settings.parts):
        try:
            found.append(_load(part, settings))
        except ValueError as error:
            where = f"data.sources[{number}]" if settings.sources else "data.shards"
            raise ValueError(f"{where}: {error}") from None
    return found


def _load(part: SourceSettings, settings: DataSettings) -> Manifest | Table:
    text, own = part.shards, settings.settings_of(part)
    refuse_remote(text, settings.remote)
    if is_table(text):
        return read_table(Path(text).expanduser(), own.image_key, own.captions, settings.csv_separator)
    if is_folder(text):
        return load_manifest(resolve_shards(text), part.manifest)
    return load_listed(list_shards(text), part.manifest)


def mix(settings: DataSettings, sources: Sequence[Manifest | Table], num_slots: int, seed: int) -> Mixture:
    """The order of the sources' samples; without any, of the synthetic ones."""
    sizes = [data.sizes for data in sources] or [divide(settings.num_samples)]
    replacement = [part.replacement for part in settings.parts] or [False]
    return Mixture(sizes, _weigh(settings, sources) or [1.0], replacement, num_slots, seed, settings.window)


def _weigh(settings: DataSettings, sources: Sequence[Manifest | Table]) -> list[float]:
    """The weight of every source: its own or, where none has one, its samples."""
    return [part.weight or sum(data.sizes) for part, data in zip(settings.parts, sources, strict=True)]


def fingerprint(settings: DataSettings, sources: Sequence[Manifest | Table]) -> str:
    """Of what the data order depends on; a single source is known by its own."""
    if len(sources) == 1 and not settings.parts[0].replacement:
        return sources[0].fingerprint
    parts = zip(sources, _weigh(settings, sources), settings.parts, strict=True)
    text = json.dumps([(data.fingerprint, weight, part.replacement) for data, weight, part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Reader(Protocol):
    """The bytes of samples: TarReader, TableReader."""

    def read(self, shard: int, entry: int) -> dict[str, bytes]: ...

    def name(self, shard: int, entry: int) -> str: ...

    def close(self) -> None: ...


class ShardSource:
    """Samples of the tar shards of a manifest, or of a csv file.

    Args:    num_slots: slots that one process reads in turn, which says how many shards it needs at hand.
    """

    def __init__(
        self,
        settings: DataSettings,
        data: Manifest | Table,
        form: SampleForm,
        seed: int,
        num_slots: int,
    ) -> None:
        self.sizes = data.sizes
        self._settings = settings
        self._form = form
        self._seed = seed
        self._captions = Captions(settings.captions)
        self._reader = _open(data, settings, num_slots)

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        members = self._reader.read(shard, entry)
        numbers = keyed_row(self._seed, epoch, index, CAPTION_COLUMN + 1, CROP_COLUMN)
        caption = self._captions.pick(members, numbers[CAPTION_COLUMN])
        data = find_image(members, self._settings.image_key)
        text = self._form.tokenize([caption])
        if text.shape != (1, self._form.context_length):
            raise ValueError(
                f"the tokenizer returned {tuple(text.shape)} for one caption, the model takes "
                f"{(1, self._form.context_length)}: build both from one model config"
            )
        return partial(self._decode, data, numbers[:NUM_CROP_NUMBERS]), text[0]

    def _decode(self, data: bytes, uniform: Sequence[float]) -> Tensor:
        settings = self._settings
        if settings.crop_scale is None:
            return resize_for_evaluation(decode_image(data, settings.max_pixels), self._form.image)
        pixels = decode_pixels(data, settings.max_pixels)
        return resize_random_crop(pixels, self._form.image, settings.crop_scale, settings.crop_ratio, uniform)

    def name(self, shard: int, entry: int) -> str:
        return self._reader.name(shard, entry)

    def close(self) -> None:
        self._reader.close()


def _open(data: Manifest | Table, settings: DataSettings, num_slots: int) -> Reader:
    if isinstance(data, Table):
        return TableReader(data)
    names = [shard.name for shard in data.shards]
    per_window = math.ceil(settings.window * len(names) / data.num_samples) + 1
    if not data.urls:
        return TarReader(data.folder, names, num_slots * per_window)
    cache = ShardCache(data.urls, names, [shard.bytes for shard in data.shards], settings.remote)
    return TarReader(cache.folder, names, num_slots * per_window, cache.open)


class MixedSource:
    """Several sources as one, their shards numbered through."""

    def __init__(self, sources: Sequence[ShardSource]) -> None:
        self.sizes = [size for source in sources for size in source.sizes]
        self._sources = sources
        self._first = [0, *accumulate(len(source.sizes) for source in sources)]

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        number = self._number(shard)
        return self._sources[number].read(shard - self._first[number], entry, epoch, index)

    def name(self, shard: int, entry: int) -> str:
        number = self._number(shard)
        return self._sources[number].name(shard - self._first[number], entry)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _number(self, shard: int) -> int:
        return bisect_right(self._first, shard) - 1


def open_sources(
    settings: DataSettings,
    sources: Sequence[Manifest | Table],
    form: SampleForm,
    seed: int,
    num_slots: int,
) -> Source:
    """The sources as one, for a process that reads so many slots in turn; without any, the synthetic one."""
    if not sources:
        return SyntheticSource(form, seed)
    opened = [
        ShardSource(settings.settings_of(part), data, form, seed, num_slots)
        for part, data in zip(settings.parts, sources, strict=True)
    ]
    return opened[0] if len(opened) == 1 else MixedSource(opened)


class SyntheticSource:
    """Random pixels and tokens, a function of the id: to try a model or a cluster without data."""

    def __init__(self, form: SampleForm, seed: int) -> None:
        self._form = form
        self._seed = seed

    def read(self, shard: int, entry: int, epoch: int, index: int) -> tuple[Decode, Tensor]:
        height, width = self._form.image.size
        num_cells, num_tokens = 3 * _CELLS * _CELLS, self._form.context_length
        # The epoch stays out of the key: a sample has one image and one caption.
        bits = keyed_bits(self._seed, torch.tensor([0]), torch.tensor([index]), num_cells + num_tokens)[0]
        cells = (bits[:num_cells] & 255).to(torch.uint8).view(3, _CELLS, _CELLS)
        rows, columns = torch.arange(height) * _CELLS // height, torch.arange(width) * _CELLS // width
        text = (bits[num_cells:] & 0xFFFF_FFFF) % (self._form.vocab_size - 2)
        # As open_clip's tokenizer ends: its text towers pool at the largest token.
        text[0], text[-1] = self._form.vocab_size - 2, self._form.vocab_size - 1
        # Columns first: the rows are then copied whole.
        return lambda: cells.index_select(2, columns).index_select(1, rows), text

    def name(self, shard: int, entry: int) -> str:
        return f"synthetic {shard}/{entry}"

    def close(self) -> None:
        pass
