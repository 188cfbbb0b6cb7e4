"""Conversion of a sample's bytes into an image tensor and a caption.

The result of every function here depends only on the bytes, settings and random numbers that are passed to it. Callers
wrap the calls in broken.breaks_sample, which turns the decoders' errors into BrokenSample.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError, features
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from torch import Tensor
from torch.nn import functional as F

from disco_ds.data.images.broken import BrokenSample

Members = Mapping[str, Any]
"""A sample's members by extension. They are bytes, unless data.stages replaced them with text, parsed JSON or PIL
images."""
Picture = bytes | Image.Image
"""An encoded image, or a decoded one if data.stages decoded it."""
_FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
"""Formats that PIL may open. Of the other formats, EPS starts an external program and the rest are rare for photos."""
if features.check("avif"):  # Pillow 11.3 and later
    _FORMATS.append("AVIF")
_JPEG = b"\xff\xd8"
_JPEG_COLORS = ("YCbCr", "RGB", "Gray")
"""Color spaces of JPEGs for which simplejpeg returns the same colors as PIL."""
_SIGNATURES = {
    _JPEG: "a JPEG",
    b"\x89PNG": "a PNG",
    b"RIFF": "a WebP",
    b"GIF8": "a GIF",
    b"BM": "a BMP",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
}
"""First bytes of the formats that PIL may open."""
# Disable PIL's limit on the number of pixels, because PIL decodes images of up to twice its limit with only a warning.
# decode_image checks data.max_pixels instead.
Image.MAX_IMAGE_PIXELS = None
_TILE = (322, 323)
"""The TIFF tags for tile width and tile height."""
_TRIES = 10
NUM_CROP_NUMBERS = 2 * _TRIES + 2
"""Random numbers for a crop: area and aspect ratio for each of _TRIES attempts, and two for the position."""
_MAX_ASPECT = 64
"""Maximum ratio of the long side to the short side in evaluation. An image with a larger ratio could become huge when
its short side is resized to the model's size."""
_KEYS = re.compile(r"[^\[\]]+")
"""Matches each part of a template field: the name of the member, and the keys in brackets."""
_MAX_CAPTION = 2**14
"""Maximum number of bytes of a caption that are passed to the tokenizer."""
_MAX_WORD = 2**11
"""Maximum number of bytes of a word that are passed to the tokenizer."""


@dataclass(frozen=True)
class ImageSpec:
    """The image size that a model expects, and how images are resized to it."""

    size: tuple[int, int]
    """Height and width."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest"
    """How evaluation resizes an image. "shortest": scale it to cover the size, then crop. "longest": scale it to fit
    into the size, then pad with black. "squash": ignore the aspect ratio."""


def find_image(members: Members, image_key: str) -> Picture:
    """Return the image of a sample: the member under the first key in data.image_key (such as `jpg;png`) that exists.

    Raises:
        BrokenSample: If the sample has none of the keys. The message lists the sample's members.
    """
    for key in image_key.split(";"):
        if key in members:
            return members[key]
    raise BrokenSample(f"no image under {image_key}; the sample has {', '.join(members)}")


def decode_image(data: Picture, max_pixels: int) -> Image.Image:
    """Decode an image and convert it to RGB. Transparency is dropped, as in open_clip.

    Raises:
        BrokenSample: If the bytes are not an image, if the image has more than max_pixels (checked before decoding), or
            if the range of its brightness is unknown.
        Exception: PIL's decoders raise many types: OSError, SyntaxError, struct.error, IndexError and others.
    """
    if isinstance(data, bytes):
        try:
            image: Image.Image = Image.open(BytesIO(data), formats=_FORMATS)
        except UnidentifiedImageError:
            raise BrokenSample(f"cannot be read as an image: {_describe(data)}") from None
    else:
        image = data
    width, height = image.size
    if isinstance(image, TiffImageFile):
        # PIL decodes whole tiles of a TIFF, and a tile can be far larger than the image.
        tile_width, tile_height = (image.tag_v2.get(tag, 1) for tag in _TILE)
        width, height = max(width, tile_width), max(height, tile_height)
    if width * height > max_pixels:
        raise BrokenSample(
            f"an image of {width} x {height} pixels exceeds data.max_pixels={max_pixels}"
        )
    image.load()
    return image if image.mode == "RGB" else _to_rgb(image)


def _describe(data: bytes) -> str:
    """Describe data that PIL cannot identify as an image, based on its first bytes."""
    start = data[:1024].lstrip().lower()
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return f"it begins like {name}, but is cut off or damaged"
    if not data:
        return "it is empty"
    if data[4:8] == b"ftyp":
        return f"it is HEIC, AVIF or a video (brand {data[8:12]!r}), which this Pillow cannot read"
    if start.startswith((b"<!doctype html", b"<html")):
        return "it is HTML, such as an error page"
    if b"<svg" in start:
        return "it is SVG, which has no pixels"
    return f"unknown format, the first bytes are {data[:8]!r}"


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded image of any mode to RGB.

    Raises:
        BrokenSample: If its pixels are floating-point numbers or 32-bit integers. For such images, it is not defined
            which value is white.
    """
    if image.mode in ("F", "I"):
        raise BrokenSample(
            f"an image of mode {image.mode} (floating-point or 32-bit pixels) has no known range of brightness; "
            "convert it to 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        # PIL would clip all values above 255.
        bits, is_inverted = 16, False
        if isinstance(image, TiffImageFile):
            bits = image.tag_v2.get(BITSPERSAMPLE, (bits,))[0]  # PIL also reads 12 bits as I;16
            is_inverted = image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0
        gray = (np.asarray(image) * np.float32(255 / (2**bits - 1))).round().astype(np.uint8)
        image = Image.fromarray(255 - gray if is_inverted else gray)
    # PIL cannot convert La directly, and warns if a palette with alpha values is converted directly to RGB.
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def decode_pixels(data: Picture, max_pixels: int) -> Tensor:
    """Decode an image to [3, H, W] uint8. JPEGs are decoded by simplejpeg, which takes 55 to 70% of PIL's time.

    Raises:
        BrokenSample: See decode_image.
    """
    if isinstance(data, bytes) and data.startswith(_JPEG):
        # If simplejpeg refuses the data, decode_image below either succeeds or explains the problem.
        with suppress(ValueError):
            height, width, color, _ = simplejpeg.decode_jpeg_header(data)
            if color in _JPEG_COLORS and width * height <= max_pixels:
                return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
    return _to_tensor(decode_image(data, max_pixels))


def resize_for_evaluation(image: Image.Image, spec: ImageSpec) -> Tensor:
    """Resize an image with open_clip's evaluation transform, which also crops or pads it if necessary.

    Returns:
        [3, H, W] uint8.

    Raises:
        BrokenSample: If the long side is more than 64 times the short side.
    """
    if max(image.size) > _MAX_ASPECT * min(image.size):
        raise BrokenSample(
            f"an image of {image.width} x {image.height} pixels: one side is over {_MAX_ASPECT} times the other"
        )
    shrink = max(image.height / spec.size[0], image.width / spec.size[1])
    if spec.resize_mode == "longest" and round(min(image.size) / shrink) == 0:
        # open_clip would round the short side to 0 pixels and fail.
        width, height = (max(1, round(side / shrink)) for side in image.size)
        image = image.resize((width, height), Image.Resampling[spec.interpolation.upper()])
    pixels: Tensor = _evaluation_transform(spec)(image)
    return (255 * pixels).round().to(torch.uint8)


@lru_cache
def _evaluation_transform(spec: ImageSpec) -> Any:
    # Imported here, because the import takes seconds and only evaluation needs it.
    from open_clip import image_transform

    return image_transform(
        spec.size,
        is_train=False,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        resize_mode=spec.resize_mode,
        interpolation=spec.interpolation,
    )


def resize_random_crop(
    image: Tensor,
    spec: ImageSpec,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    uniform: Sequence[float],
) -> Tensor:
    """Take a random crop of an image and resize it to the model's size.

    Args:
        image: [3, h, w] uint8.
        spec: The model's size and interpolation.
        scale: Range of the crop's area, as a fraction of the image's area.
        ratio: Range of the crop's aspect ratio.
        uniform: NUM_CROP_NUMBERS random numbers in [0, 1).

    Returns:
        [3, H, W] uint8.

    Source: torchvision.transforms.RandomResizedCrop, but with random numbers that the caller passes.
    """
    left, top, width, height = _crop_box(image.shape[2], image.shape[1], scale, ratio, uniform)
    crop = image[None, :, top : top + height, left : left + width]
    # The filters are the same as PIL's, but applied to uint8 tensors: this takes less than half of PIL's time. Most
    # pixels that differ from PIL's differ by one level, but next to sharp edges differences of up to 26 occur.
    return F.interpolate(
        crop, spec.size, mode=spec.interpolation, align_corners=False, antialias=True
    )[0]


def _crop_box(
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    uniform: Sequence[float],
) -> tuple[int, int, int, int]:
    """Return (left, top, width, height) of a random crop."""
    # As in torchvision: the area is drawn uniformly and the aspect ratio log-uniformly. If the box does not fit into
    # the image, both are drawn again.
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for i in range(_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * uniform[2 * i])
        aspect = math.exp(low + (high - low) * uniform[2 * i + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            # The last two random numbers place the box. All attempts can share them, because only one attempt succeeds.
            return int(uniform[-1] * (width - w + 1)), int(uniform[-2] * (height - h + 1)), w, h
    # All attempts have failed. Take the largest centered box whose aspect ratio is in the range.
    w = min(width, round(height * ratio[1]))
    h = min(height, round(width / ratio[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def pick_caption(
    weights: dict[str, float], members: Members, uniform: float, item: float = 0.0
) -> str:
    """Choose one of the caption templates at random, according to their weights, and fill it.

    A field in a template names a member of the sample: {txt} is the text of the member txt, {json[key]} is an entry of
    the parsed member json, {json[key][0]} is the first item of a list, and {json[key][*]} is a random item of it. A
    field must not be a whole list. {json[key]|txt} is the first of the alternatives that the sample has.

    Args:
        weights: The weight of each template, from data.captions.
        members: The sample's members by extension.
        uniform: Random number in [0, 1) that selects the template.
        item: Random number in [0, 1) that selects the items of lists.

    Raises:
        BrokenSample: See fill_template.
    """
    ends = list(accumulate(weights.values()))
    number = bisect_right(ends, uniform * ends[-1])
    return fill_template(list(weights)[number], members, item)


def list_fields(template: str) -> set[str]:
    """Return the names of the members that a template refers to."""
    # For example, the field "json[label]" refers to the member json.
    fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    return {name.partition("[")[0] for field in fields for name in field.split("|")}


def fill_template(template: str, members: Members, item: float = 0.0, what: str = "caption") -> str:
    """Fill a template with the sample's members, and strip whitespace from both ends.

    Args:
        template: The template. It must have passed check_template.
        members: The sample's members.
        item: Random number in [0, 1) that selects the items of lists.
        what: What the filled template is called in messages.

    Raises:
        BrokenSample: If a field is missing or cannot be used, or if the result is empty. The message lists the sample's
            members.
    """
    seen = f"; the sample has {', '.join(members)}"
    try:
        text, draws = "", [item]
        for literal, field, _, _ in string.Formatter().parse(template):
            text += literal
            if field is not None:
                text += _fill_field(field, members, draws)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BrokenSample(f"{what} {template!r}: {type(error).__name__}: {error}{seen}") from None
    if not text.strip():
        raise BrokenSample(f"{what} {template!r} is empty{seen}")
    return text.strip()


def _fill_field(field: str, members: Members, draws: list[float]) -> str:
    """Return the text of the first alternative of a field that is not missing, null, NaN or blank.

    `draws` is explained in _look_up.
    """
    *others, last = field.split("|")
    for name in others:
        # Ignore only missing values. Any other error makes the sample broken.
        with suppress(LookupError):
            text = _look_up(name, members, draws)
            if text.strip():
                return text
    return _look_up(last, members, draws)


def _look_up(name: str, members: Members, draws: list[float]) -> str:
    """Return the text of a member, such as txt, or of an entry of a JSON member, such as json[captions][0].

    draws[0] is the random number for the next `[*]`. Each `[*]` replaces it.

    Raises:
        LookupError: If it is missing, null, NaN or infinite.
        ValueError: If it is a list, an object or a boolean.
    """
    member, *keys = _KEYS.findall(name)
    value = members[member]
    if isinstance(value, bytes):
        value = json.loads(value) if member.rpartition(".")[2] == "json" else value.decode("utf-8")
    for key in keys:
        if value is None:
            break
        if key == "*":
            if not isinstance(value, list):
                raise ValueError(f"{{{name}}} is not a list")
            # If the list is empty, this raises IndexError, which is a LookupError.
            place = draws[0] * len(value)
            value = value[int(place)]
            # For any drawn item, the fractional part is again uniform in [0, 1), so the next `[*]` is independent.
            draws[0] = place % 1
        else:
            value = value[int(key) if isinstance(value, list) else key]
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise LookupError(f"{{{name}}} is {value or 'null'}")
    if isinstance(value, (bool, dict)):
        raise ValueError(
            f"{{{name}}} is of the type {type(value).__name__}, not a text or a number"
        )
    if isinstance(value, list):
        raise ValueError(
            f"{{{name}}} is a list of {len(value)} items; write {{{name}[0]}} for the first, "
            f"{{{name}[*]}} for a random one"
        )
    return str(value)


def find_group(group_by: str | None, members: Members, caption: str, image: Picture) -> int:
    """Return a 64-bit hash of the value that data.group_by names. Samples with equal values share a group.

    Args:
        group_by: See data.group_by; if it is None, the result is 0.
        members: The sample's members.
        caption: The caption that was chosen for this epoch.
        image: The encoded image, or the decoded one if data.stages decoded it.

    Raises:
        BrokenSample: See fill_template.
    """
    if group_by is None:
        return 0
    if group_by == "image":
        value = image if isinstance(image, bytes) else image.tobytes()
    else:
        text = caption if group_by == "caption" else fill_template(group_by, members, what="group")
        value = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(value, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def shorten_caption(text: str) -> str:
    """Shorten a very long caption, to limit the time that the tokenizer takes.

    CLIP's byte pair encoding takes time quadratic in the length of a word: 10 s for 16,000 letters. A caption of at
    most 2,048 bytes is not changed. A longer caption is cut to 16,384 bytes, and each of its words to 2,048 bytes. This
    rarely affects the tokens: one token of CLIP's vocabulary stands for about 5 bytes on average, so CLIP's context of
    77 tokens is usually full much earlier. Text without spaces, such as Chinese or Thai, is treated as one word, so it
    is cut after 682 characters.
    """
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _MAX_WORD:
        return text
    # Only these characters count as separators. Tokenizers remove other separators, such as control characters, and
    # would thereby join the words around them.
    data = re.sub(rb"([^ \t\r\n]{%d})[^ \t\r\n]+" % _MAX_WORD, rb"\1", data[:_MAX_CAPTION])
    return data.decode(
        "utf-8", "ignore"
    )  # drops the bytes of a character that was cut in the middle
