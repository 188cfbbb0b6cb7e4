"""Teachers' embeddings that are stored with the samples, and the augmentations for which they were computed.

The members that contain embeddings may be `.npy`, `.npz`, `.pth` or `.pth.gz`. The last two contain a dictionary of
tensors, as in Apple's DataCompDR. In this file, a view is one augmentation of an image.
"""

# Symbols in shapes: m samples in a micro-batch; D is the width of an embedding; H x W pixels.

from __future__ import annotations

import json
from dataclasses import dataclass
from gzip import GzipFile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.data.captions import KEYS, Members, find_group, number_caption
from disco_ds.data.errors import MAX_BYTES, BrokenSample, DataError
from disco_ds.data.images.decode import ImageSpec
from disco_ds.data.order.counter_rng import keyed_int

VIEW_SEED = 0
"""Seed of the augmentations for which `disco-ds embed` stores embeddings. It is the same in every run."""
RECORD = "embed.json"
"""File next to the shards in which `disco-ds embed` records what the embeddings were computed from."""
OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
"""Names of RandAugment's operations by their number in DataCompDR's `param_aug`."""


@dataclass(frozen=True)
class StoredEmbeddings:
    """Where a sample's embeddings are stored."""

    image: str
    """Field of the image embeddings, such as img.npy or npz[image_emb] (teacher.image)."""
    text: str
    """Field of the text embeddings (teacher.text)."""
    replay: str | None
    """Field of the recorded augmentations (teacher.replay). None: the augmentations are those of `disco-ds embed`."""
    width: int
    """Width of an embedding; for several teachers, the sum of their widths."""


@dataclass(frozen=True)
class StoredView:
    """The stored embeddings for one use of a sample, and the keys of the random numbers of its augmentation."""

    number: int
    """Key of the augmentation's random numbers, in place of the epoch. If the sample has an image embedding for each
    augmentation, this is the row of the embedding. If one image embedding serves all augmentations, this is the epoch
    itself."""
    key: int
    """Key of the augmentation's random numbers, in place of the sample's id. It fits into int64."""
    embeddings: Tensor
    """[2, D] fp32: the embeddings of the image and of the caption."""
    replayed: list[Any] | None
    """The recorded augmentation to repeat, an entry of DataCompDR's `param_aug`. None: draw one as the settings say."""

    def pack(self) -> Tensor:
        """Return [1, 2 + D] int64: number, key, and the bits of the two embeddings of width D in fp32."""
        head = torch.tensor([self.number, self.key])
        return torch.cat([head, self.embeddings.flatten().view(torch.int64)])[None]


def unpack(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undo StoredView.pack for m rows of width D, [m, 2 + D]: return numbers [m], keys [m], embeddings [m, 2, D]."""
    bits = rows[:, 2:].contiguous().view(torch.float32)
    return rows[:, 0], rows[:, 1], bits.view(len(rows), 2, -1)


def read_view(
    stored: StoredEmbeddings,
    members: Members,
    captions: dict[str, float],
    drawn: tuple[float, float],
    image: Any,
    place: tuple[int, int, int],
) -> StoredView:
    """Read the stored embeddings for the augmentation and caption that a sample has in this epoch.

    Args:
        stored: Where the embeddings are.
        members: The sample's members.
        captions: The weight of each template, from data.captions.
        drawn: The two random numbers that were passed to pick_caption.
        image: The encoded image, or the decoded one if data.transforms decoded it.
        place: (seed of the run, epoch, id of the sample).

    Raises:
        BrokenSample: If a field is missing, an array is not finite or has the wrong shape, or the numbers of rows,
            captions and recorded augmentations do not match.
        DataError: If the width differs from that of the other samples.
    """
    parsed: dict[str, Any] = {}
    images = read_array(stored.image, members, parsed, stored.width)
    texts = read_array(stored.text, members, parsed, stored.width).view(-1, stored.width)
    number, count = number_caption(captions, members, *drawn)
    if len(texts) != count:
        raise BrokenSample(
            f"{stored.text} has {len(texts)} rows, but data.captions can produce {count} captions of this sample"
        )
    text = texts[number]
    seed, epoch, index = place
    if images.ndim == 1:  # one embedding for all augmentations
        if stored.replay:
            raise BrokenSample(
                f"{stored.image} has one row, but teacher.replay needs one per augmentation"
            )
        key = keyed_int(seed, index) - 2**63
        return StoredView(epoch, key, torch.stack([images, text]), None)
    view = epoch % len(images)  # the epochs use the rows in turn
    entry = None
    if stored.replay:
        entries = read_field(stored.replay, members, parsed)
        entries = json.loads(entries) if isinstance(entries, str) else entries
        if len(entries) != len(images):
            raise BrokenSample(
                f"{stored.replay} has {len(entries)} entries, but {stored.image} has {len(images)} rows"
            )
        entry = entries[view]
        if not entry:
            raise BrokenSample(f"entry {view} of {stored.replay} is {entry}")
    # `disco-ds embed` uses the same key. Unlike a sample id, a hash of the image does not depend on the set of shards.
    key = find_group("image", members, "", image)
    return StoredView(view, key, torch.stack([images[view], text]), entry)


def read_array(
    field: str, members: Members, parsed: dict[str, Any], width: int | None = None
) -> Tensor:
    """Return the array that a field names, in fp32: [D] or, for n embeddings, [n, D].

    Args:
        field: As for read_field.
        members: As for read_field.
        parsed: As for read_field.
        width: Expected D. None: any.

    Raises:
        DataError: If the width is not the expected one.
        BrokenSample: If the field is missing, or if the array is empty, has another number of dimensions, or has a row
            that is zero or not finite.
    """
    value = read_field(field, members, parsed)
    rows = torch.as_tensor(value).float()
    if rows.ndim not in (1, 2) or not rows.numel():
        raise BrokenSample(f"{field} has the shape {list(rows.shape)}, expected [D] or [n, D]")
    norms = rows.norm(dim=-1)
    if not (norms.isfinite() & (norms > 0)).all():
        raise BrokenSample(f"{field} has a row that is not finite or is zero")
    if width not in (None, rows.shape[-1]):
        raise DataError(
            f"teacher: {field} has a width of {rows.shape[-1]}, but the width of the other samples, or the sum of "
            f"teacher.widths, is {width}"
        )
    return rows


def read_field(field: str, members: Members, parsed: dict[str, Any]) -> Any:
    """Return the value of a field such as img.npy, npz[image_emb] or paug.json[param_aug].

    Args:
        field: The name of a member, followed by keys in brackets.
        members: The sample's members.
        parsed: The members that have been parsed so far, by name. This function adds to it.

    Raises:
        BrokenSample: If the member or a key is missing.
    """
    member, *keys = KEYS.findall(field)
    try:
        if member not in parsed:
            parsed[member] = _parse(member, members[member])
        value = parsed[member]
        for key in keys:
            value = value[key]
    except LookupError:
        raise BrokenSample(f"teacher: no {field}; the sample has {', '.join(members)}") from None
    return value


def _parse(member: str, value: Any) -> Any:
    if not isinstance(value, bytes):  # data.transforms has parsed it
        return value
    kind = member.rpartition(".")[2]
    if kind == "json":
        return json.loads(value)
    if kind in ("npy", "npz"):
        return np.load(BytesIO(value), allow_pickle=False)
    if kind == "gz":
        value = GzipFile(fileobj=BytesIO(value)).read(MAX_BYTES)
    return torch.load(BytesIO(value), map_location="cpu", weights_only=True)


def replay(image: Image.Image, spec: ImageSpec, entry: list[Any]) -> Tensor:
    """Repeat an augmentation that DataCompDR recorded: torchvision's random resized crop and RandAugment.

    Args:
        image: The decoded image.
        spec: The model's image size. DataCompDR used 224 x 224 pixels. The recorded magnitudes are used unchanged at
            other sizes, even those of translations, which are in pixels.
        entry: [[top, left, height, width], [[operation, magnitude], ...]]. A part that is null is skipped.

    Returns:
        [3, H, W] uint8.

    Raises:
        BrokenSample: If the crop exceeds the image, so the augmentation was recorded for another image or size.
    """
    # Imported here, because the import takes seconds and few runs need it.
    from torchvision.transforms import InterpolationMode, functional
    from torchvision.transforms.autoaugment import _apply_op

    crop, operations = entry
    top, left, height, width = crop or (0, 0, image.height, image.width)
    if not (0 <= top <= image.height - height and 0 <= left <= image.width - width):
        raise BrokenSample(
            f"the recorded crop {crop} exceeds the image of {image.width} x {image.height} pixels; the image may have "
            "been resized since it was recorded"
        )
    image = functional.resized_crop(
        image, top, left, height, width, list(spec.size), InterpolationMode.BICUBIC
    )
    for number, magnitude in operations or ():
        name = OPERATIONS[number]
        image = _apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)
    return functional.pil_to_tensor(image)


def describe_views(settings: DataSettings, views: int) -> dict[str, Any]:
    """Return the settings that stored embeddings depend on: the caption templates and, with views, the augmentation.

    Args:
        settings: Settings of the data.
        views: Number of views of each image. 0: each image has one embedding, that of the image without augmentation.
    """
    found: dict[str, Any] = {"captions": list(settings.captions), "views": views}
    if views:
        keys = {"crop_scale", "crop_ratio", "augment"}
        found |= settings.model_dump(mode="json", include=keys)
    return found


def check_record(folder: Path, settings: DataSettings) -> None:
    """Check that a run has the settings for which `disco-ds embed` wrote the shards in a folder.

    If another program wrote the shards, nothing is checked.

    Raises:
        ValueError: If the stored embeddings belong to other captions or augmentations.
    """
    path = folder / RECORD
    if not path.exists():
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    for key, value in describe_views(settings, record["views"]).items():
        if record[key] != value:
            raise ValueError(
                f"teacher: the embeddings in {folder} were computed with data.{key} {record[key]}, but this run has "
                f"{value}; use the same setting, or run disco-ds embed again"
            )
