"""One sample as named arrays: what a model expects of it, and how a data worker prepares it.

`declare_arrays` is the only place that lists the arrays. The workers, the shared buffers and the copies to the device
loop over this list.
"""

# Symbols in shapes: n captions of L tokens; H x W pixels; D is the width of an embedding.

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import Members, Picture, find_group, pick_caption, shorten_caption
from disco_ds.data.counter_rng import CAPTION_COLUMN, keyed_float, keyed_int, random_key
from disco_ds.data.errors import DataError, breaks_sample
from disco_ds.data.images import (
    ImageSpec,
    decode_for_evaluation,
    decode_pixels,
    draw_crop,
    find_image,
    resize_crop,
)
from disco_ds.data.order import divide
from disco_ds.data.sources.base import Source
from disco_ds.data.stored import StoredEmbeddings, read_view

Tokenize = Callable[[list[str]], Tensor]
"""Converts n captions into tokens [n, L] int64. It is sent to the data workers, so it must be picklable."""
Sample = dict[str, Any]
"""The arrays of a sample, by name. A value without dimensions is a Python integer."""
_CELLS = 8
"""A synthetic image is a grid with this many cells per side, each filled with one color."""


@dataclass(frozen=True)
class InputSpec:
    """The image format and tokenization that the model, and the teacher if there is one, expect of a sample."""

    image: ImageSpec
    tokenize: Tokenize
    context_length: int
    """Number of tokens per caption, including padding."""
    vocab_size: int
    teacher_tokenize: Tokenize | None = None
    """The tokenizer of a teacher that differs from the model's; None if there is none."""
    teacher_length: int = 0
    """Number of tokens per caption of teacher_tokenize."""
    stored: StoredEmbeddings | None = None
    """Location of the teachers' embeddings that are stored with the samples, or None."""


class SampleKey(NamedTuple):
    """The key of a sample's random numbers, which depend on nothing else."""

    seed: int
    """Seed of the run."""
    epoch: int
    sample_id: int


def declare_arrays(settings: DataSettings, spec: InputSpec) -> np.dtype:
    """Return the name, type and shape of each array of a sample, as the fields of a dtype.

    - image: pixels before the augmentation on the device, stored as [H, W, 3], as they are decoded and resized;
    - text: tokens of the caption;
    - index: id of the sample;
    - epoch: how often the sample was used before;
    - view_key: key of the random numbers of the augmentation (counter_rng.random_key);
    - group_id: group of the sample, if data.group_by is set;
    - teacher_text: tokens for a teacher with another tokenizer;
    - image_embedding, text_embedding: stored embeddings of the teachers.
    """
    fields: list[Any] = [
        ("image", np.uint8, (*spec.image.size, 3)),
        ("text", np.int64, (spec.context_length,)),
        ("index", np.int64),
        ("epoch", np.int64),
        ("view_key", np.int64),
    ]
    if settings.group_by:
        fields.append(("group_id", np.int64))
    if spec.teacher_tokenize:
        fields.append(("teacher_text", np.int64, (spec.teacher_length,)))
    if spec.stored:
        width = (spec.stored.width,)
        fields += [(f"{side}_embedding", np.float32, width) for side in ("image", "text")]
    return np.dtype(fields)


def prepare(members: Members, key: SampleKey, settings: DataSettings, spec: InputSpec) -> Sample:
    """Choose a sample's caption and crop in this epoch, tokenize the caption and decode the image.

    The result, the arrays that declare_arrays names, depends on nothing but the arguments.

    Args:
        members: The sample's members, with data.uids, data.filter and data.transforms applied.
        key: Determines all random numbers.
        settings: Settings of the sample's source.
        spec: What the model expects.

    Raises:
        BrokenSample: If the sample cannot be used.
        DataError: If the tokenizer returns the wrong shape, or if the width of stored embeddings is wrong.
    """
    sample: Sample = {"index": key.sample_id, "epoch": key.epoch, "view_key": random_key(*key)}
    if settings.source == "synthetic":
        return sample | generate(key, spec)
    with breaks_sample():
        uniform = partial(keyed_float, sample["view_key"])
        drawn, item = uniform(CAPTION_COLUMN), uniform(CAPTION_COLUMN + 1)
        caption = pick_caption(settings.captions, members, drawn, item)
        picture = find_image(members, settings.image_key)
        if settings.group_by:
            sample["group_id"] = find_group(settings.group_by, members, caption, picture)
        short = shorten_caption(caption)
        sample["text"] = _tokenize(spec.tokenize, short, spec.context_length)
        if spec.teacher_tokenize:
            sample["teacher_text"] = _tokenize(spec.teacher_tokenize, short, spec.teacher_length)
        if spec.stored:
            sample |= read_view(spec.stored, spec.image, settings, members, caption, picture, key)
        if "image" not in sample:
            sample["image"] = decode_crop(picture, settings, spec.image, sample["view_key"])
    return sample


def decode_crop(picture: Picture, settings: DataSettings, spec: ImageSpec, key: int) -> Tensor:
    """Decode an image to [3, H, W] uint8, with the random crop that the key of its random numbers determines."""
    if settings.crop_scale is None:
        return decode_for_evaluation(picture, settings.max_pixels, spec)
    pixels = decode_pixels(picture, settings.max_pixels)
    _, height, width = pixels.shape
    uniform = partial(keyed_float, key)
    box = draw_crop(width, height, settings.crop_scale, settings.crop_ratio, uniform)
    return resize_crop(pixels, spec, box)


def _tokenize(tokenize: Tokenize, caption: str, length: int) -> Tensor:
    tokens = tokenize([caption])
    if tokens.shape != (1, length):
        raise DataError(
            f"the tokenizer returned shape {tuple(tokens.shape)} for one caption, but the model expects "
            f"{(1, length)}; build the tokenizer and the model from the same config"
        )
    return tokens[0]


class SyntheticSource(Source):
    """A source of random images and tokens, for testing a model or a cluster without data."""

    def __init__(self, num_samples: int) -> None:
        self.sizes = divide(num_samples)
        self.fingerprint = f"synthetic-{num_samples}"

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        """Return no members, because `generate` needs none."""
        return {}


def generate(key: SampleKey, spec: InputSpec) -> Sample:
    """Generate the image and the tokens of a synthetic sample from its id and the seed. Each sample is a group."""
    # The epoch is not part of the seed, so a sample has the same image and caption in every epoch.
    random = torch.Generator().manual_seed(keyed_int(key.seed, key.sample_id))
    cells = torch.randint(256, (3, _CELLS, _CELLS), dtype=torch.uint8, generator=random)
    # The cell of each row and column of pixels.
    numbers = torch.arange(float(_CELLS))[None, None]
    rows, columns = (F.interpolate(numbers, side)[0, 0].int() for side in spec.image.size)
    image = cells.permute(1, 2, 0).index_select(1, columns).index_select(0, rows)
    text = torch.randint(spec.vocab_size - 2, (spec.context_length,), generator=random)
    # Use the start and end tokens of open_clip's tokenizer. Text towers pool at the largest token, the end token.
    text[0] = spec.vocab_size - 2
    text[-1] = spec.vocab_size - 1
    return {"image": image.permute(2, 0, 1), "text": text, "group_id": key.sample_id}
