"""Teachers' embeddings that are stored with the samples, and the augmentations for which they were computed.

The members that contain embeddings may be `.npy`, `.npz`, `.pth` or `.pth.gz`. The last two contain a dictionary of
tensors, as in Apple's DataCompDR. In this file, a view is one augmentation of an image.
"""

# Symbols in shapes: m samples in a micro-batch; D is the width of an embedding; H x W pixels.

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from gzip import GzipFile
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from disco_ds.config.data import DataSettings
from disco_ds.config.recipe import TeacherSettings
from disco_ds.data.captions import KEYS, Members, Picture, find_group, list_captions
from disco_ds.data.counter_rng import keyed_int, random_key
from disco_ds.data.errors import MAX_BYTES, BrokenSample, DataError, breaks_sample
from disco_ds.data.images import ImageSpec, decode_image
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.selection import Selection
from disco_ds.data.sources.shards import Manifest

_NUM_MEASURED = 10_000
"""Maximum number of samples that are read to find the width of stored embeddings."""
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


def read_view(
    stored: StoredEmbeddings,
    spec: ImageSpec,
    settings: DataSettings,
    members: Members,
    caption: str,
    image: Picture,
    key: tuple[int, int, int],
) -> dict[str, Any]:
    """Read the stored embeddings for the augmentation and caption that a sample has in this epoch.

    Args:
        stored: Where the embeddings are.
        spec: The image size that the model expects.
        settings: Settings of the sample's source.
        members: The sample's members.
        caption: The caption that was chosen for this epoch.
        image: The encoded image, or the decoded one if data.transforms decoded it.
        key: (seed of the run, epoch, id of the sample).

    Returns:
        The sample's arrays view_key, image_embedding and text_embedding; also image if the augmentation is recorded.

    Raises:
        BrokenSample: If a field is missing, an array is not finite or has the wrong shape, or the numbers of rows,
            captions and recorded augmentations do not match.
        DataError: If the width differs from that of the other samples.
    """
    parsed: dict[str, Any] = {}
    images = read_array(stored.image, members, parsed, stored.width)
    texts = read_array(stored.text, members, parsed, stored.width).view(-1, stored.width)
    captions = list_captions(settings.captions, members)
    if len(texts) != len(captions):
        raise BrokenSample(
            f"{stored.text} has {len(texts)} rows, but data.captions can produce {len(captions)} captions of this "
            "sample"
        )
    # Captions with the same text have the same embedding, so the first of them will do.
    text = texts[captions.index(caption)]
    arrays: dict[str, Any] = {"image_embedding": images, "text_embedding": text}
    seed, epoch, index = key
    if images.ndim == 1:  # one embedding for all augmentations
        if stored.replay:
            raise BrokenSample(
                f"{stored.image} has one row, but teacher.replay needs one per augmentation"
            )
        arrays["view_key"] = random_key(VIEW_SEED, epoch, keyed_int(seed, index) - 2**63)
        return arrays
    view = epoch % len(images)  # the epochs use the rows in turn
    arrays |= {"image_embedding": images[view], "view_key": find_view_key(image, view)}
    if stored.replay:
        entries = read_field(stored.replay, members, parsed)
        entries = json.loads(entries) if isinstance(entries, str) else entries
        if len(entries) != len(images):
            raise BrokenSample(
                f"{stored.replay} has {len(entries)} entries, but {stored.image} has {len(images)} rows"
            )
        arrays["image"] = replay(decode_image(image, settings.max_pixels), spec, entries[view])
    return arrays


def find_view_key(image: Picture, view: int) -> int:
    """Return the key of the random numbers of an image's augmentation number `view`.

    Unlike a sample id, the hash of the image does not depend on the set of shards.
    """
    return random_key(VIEW_SEED, view, find_group("image", {}, "", image))


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
    suffix = member.rpartition(".")[2]
    if suffix == "json":
        return json.loads(value)
    if suffix in ("npy", "npz"):
        return np.load(BytesIO(value), allow_pickle=False)
    if suffix == "gz":
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


def describe_views(settings: DataSettings, views: int | None) -> dict[str, Any]:
    """Return the settings that stored embeddings depend on: those of the captions, the images and their augmentation.

    Args:
        settings: Settings of the data.
        views: Number of views of each image. 0: each image has one embedding, that of the image without augmentation.
            None: there are no embeddings.
    """
    keys = {"image_key", "transforms"}
    if views:
        keys |= {"crop_scale", "crop_ratio", "augment"}
    chosen = settings.model_dump(mode="json", include=keys)
    return {"captions": list(settings.captions), "views": views, **chosen}


def find_stored(
    stages: Sequence[DataSettings], teacher: TeacherSettings, sources: Sequence[Source]
) -> StoredEmbeddings | None:
    """Return where a teacher's embeddings are stored, or None if the teacher is a model.

    If teacher.widths is not set, the width is read from the first sample that has embeddings.

    Args:
        stages: Settings of the data in each stage of the run.
        teacher: Settings of the teacher.
        sources: The sources.

    Raises:
        ValueError: If none of the first samples has embeddings, or if `disco-ds embed` computed the embeddings for
            other settings.
        OSError: If the first shard cannot be read.
    """
    if teacher.image is None or teacher.text is None:
        return None
    for settings in stages:
        for part, source in zip(settings.per_source, sources, strict=True):
            if isinstance(source, Manifest) and not source.urls:
                # The shards of a pattern or of a list may be in several folders.
                for folder in sorted({os.path.dirname(shard.name) for shard in source.shards}):
                    check_record(source.folder / folder, part)
    width = sum(teacher.widths or ())
    width = width or _measure(sources[0], stages[0].per_source[0], teacher.image)
    return StoredEmbeddings(teacher.image, teacher.text, teacher.replay, width)


def check_record(folder: Path, settings: DataSettings) -> None:
    """Check that a run has the settings for which `disco-ds embed` wrote the shards in a folder.

    If another program wrote the shards, nothing is checked.

    Raises:
        ValueError: If the stored embeddings belong to other captions, images or augmentations.
    """
    path = folder / RECORD
    if not path.exists():
        return
    record = json.loads(path.read_bytes())
    for key, value in describe_views(settings, record["views"]).items():
        if record.get(key, value) != value:
            raise ValueError(
                f"teacher: the embeddings in {folder} were computed with data.{key} {record[key]}, but this run has "
                f"{value}; use the same setting in every stage, or run disco-ds embed again"
            )


def _measure(source: Source, settings: DataSettings, image: str) -> int:
    """Return the width of the embeddings of the first sample that has them."""
    reason = "there is no sample"
    # A shard of data.index=none has the size 0. Its first sample is read.
    sizes = enumerate(source.sizes)
    entries = ((shard, entry) for shard, size in sizes for entry in range(size or 1))
    selection = Selection(settings)
    with closing(source.open(1, settings.window)) as reader:
        for shard, entry in islice(entries, _NUM_MEASURED):
            try:
                with breaks_sample(OSError):
                    members = selection.read(reader, shard, entry)
                    return read_array(image, members, {}).shape[-1]
            except BrokenSample as error:
                reason = str(error)
    raise ValueError(f"none of the first samples has stored embeddings: {reason}")
