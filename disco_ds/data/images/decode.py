"""Turns the bytes of a sample into an image tensor and a caption.

Every function here depends only on the bytes, settings and random numbers it is given. Whatever is wrong with a sample
becomes a BrokenSample that states the reason.
"""

from __future__ import annotations

import json
import math
import re
import string
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from disco_ds.data.images.broken import BrokenSample

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that PIL may open; the others start programs (EPS) or do not hold photographs."""
_JPEG = b"\xff\xd8"
# decode_image applies the limit of the settings; PIL's is fixed, and it warns of images that it then decodes anyway.
Image.MAX_IMAGE_PIXELS = None
_TILE = (322, 323)
"""TIFF tags of the width and height of a tile."""
_TRIES = 10
NUM_CROP_NUMBERS = 2 * _TRIES + 2
_LONGEST = 64
"""Aspect ratio up to which the pixels in evaluation are identical to open_clip's."""
_MAX_DEPTH = 200
"""Levels of nested JSON. Python's own limit depends on its version and on how deep the caller is in its stack."""
_MAX_FIELD = 10_000
"""Width and precision of a field, which a template may take from the sample."""
_MAX_CAPTION, _MAX_WORD = 2**14, 2**11
"""Bytes of a caption and of a word that the tokenizer gets."""


@dataclass(frozen=True)
class ImageSpec:
    """Size and resizing of the images that a model takes."""

    size: tuple[int, int]
    """Height and width."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest"
    """How evaluation resizes: fill the size and crop, fit into it and pad with black, or ignore the aspect ratio."""

    @property
    def filter(self) -> Image.Resampling:
        return (
            Image.Resampling.BILINEAR
            if self.interpolation == "bilinear"
            else Image.Resampling.BICUBIC
        )


def find_image(members: dict[str, bytes], image_key: str) -> bytes:
    """The first member that is named in data.image_key (`jpg;png`).

    Raises:  BrokenSample naming the members seen.
    """
    for key in image_key.split(";"):
        if key in members:
            return members[key]
    raise BrokenSample(f"no image under {image_key}; the sample has {', '.join(members)}")


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """An RGB image; transparency is dropped, as open_clip does.

    Raises:  BrokenSample, before anything is decoded when the image has more than max_pixels.
    """
    stream = BytesIO(data)
    try:
        image: Image.Image = Image.open(stream, formats=_FORMATS)
        # A TIFF's tile is decoded whole, and can be far larger than the image.
        tile = (
            [image.tag_v2.get(tag, 1) for tag in _TILE] if isinstance(image, TiffImageFile) else [1]
        )
        width, height = image.size
        if 0 < width * height <= max_pixels and math.prod(tile) <= max_pixels:
            image.load()
            if image.mode == "P" and "transparency" in image.info:
                # PIL warns about alpha values of a palette unless they go through RGBA.
                image = image.convert("RGBA")
            return image if image.mode == "RGB" else image.convert("RGB")
    except MemoryError:  # depends on the machine, not on the sample alone
        raise
    except Exception as error:
        # PIL's decoders raise exceptions of many types: OSError, SyntaxError, struct.error, IndexError, ...
        reason = str(error).replace(f" {stream!r}", "")  # its address differs from run to run
        raise BrokenSample(f"image: {type(error).__name__}: {reason}") from None
    tiles = f" in tiles of {tile[0]} x {tile[1]}" if math.prod(tile) > 1 else ""
    raise BrokenSample(f"image: {width} x {height} pixels{tiles}, data.max_pixels is {max_pixels}")


def decode_pixels(data: bytes, max_pixels: int) -> Tensor:
    """The pixels of decode_image, [3, H, W] uint8. JPEGs go to torchvision, which needs little more than half the time.

    Raises:  as decode_image.
    """
    if data.startswith(_JPEG):
        # Whatever fails here is left to decode_image, which reads the image nevertheless or explains what is wrong.
        with suppress(Exception), Image.open(BytesIO(data), formats=("JPEG",)) as header:
            if header.mode in ("RGB", "L") and header.width * header.height <= max_pixels:
                return decode_jpeg(
                    torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB
                )
    return _to_tensor(decode_image(data, max_pixels))


def resize_for_evaluation(image: Image.Image, spec: ImageSpec) -> Tensor:
    """Resize and crop or pad as open_clip's evaluation transform does, [3, H, W] uint8."""
    height, width = spec.size
    if spec.resize_mode == "squash":
        return _to_tensor(image.resize((width, height), spec.filter))
    w, h = image.size
    if spec.resize_mode == "longest":
        ratio = max(w / width, h / height)
        image = image.resize((max(1, round(w / ratio)), max(1, round(h / ratio))), spec.filter)
        # PIL's crop is black outside of the image.
        left, top = -((width - image.size[0]) // 2), -((height - image.size[1]) // 2)
        return _to_tensor(image.crop((left, top, left + width, top + height)))
    if height == width:
        resample, short = spec.filter, min(w, h)
        full_w, full_h = (width if side == short else int(width * side / short) for side in (w, h))
    else:
        # open_clip always uses this filter for images that are not square.
        resample, ratio = Image.Resampling.BICUBIC, min(w / width, h / height)
        full_w, full_h = round(w / ratio), round(h / ratio)
    left, top = round((full_w - width) / 2), round((full_h - height) / 2)
    if full_w * full_h <= _LONGEST * width * height:
        image = image.resize((full_w, full_h), resample)
        return _to_tensor(image.crop((left, top, left + width, top + height)))
    # A very long image would be huge once resized, so only what the crop keeps is resized. It is a level or two off
    # where PIL rounds the box to single precision.
    box = (
        left * w / full_w,
        top * h / full_h,
        (left + width) * w / full_w,
        (top + height) * h / full_h,
    )
    return _to_tensor(
        image.resize((width, height), resample, (box[0], box[1], min(box[2], w), min(box[3], h)))
    )


def resize_random_crop(
    image: Tensor,
    spec: ImageSpec,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    uniform: Sequence[float],
) -> Tensor:
    """A random crop resized to the model's size, [3, H, W] uint8.

    Args:    image [3, h, w] uint8; scale, ratio: ranges of the crop's area (as a fraction) and aspect ratio; uniform:
             NUM_CROP_NUMBERS random numbers in [0, 1).
    Source:  torchvision.transforms.RandomResizedCrop, with given random numbers.
    """
    left, top, width, height = _crop_box(image.shape[2], image.shape[1], scale, ratio, uniform)
    crop = image[None, :, top : top + height, left : left + width]
    # Same filters as PIL, on uint8: some pixels differ by one level, in less than half of PIL's time.
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
    # As torchvision: the area is uniform, the aspect ratio log-uniform; a box that does not fit is drawn again.
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for i in range(_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * uniform[2 * i])
        aspect = math.exp(low + (high - low) * uniform[2 * i + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            # All attempts share the two numbers that place the box: only one attempt uses them.
            return int(uniform[-1] * (width - w + 1)), int(uniform[-2] * (height - h + 1)), w, h
    # None of the boxes fitted: take the largest one in the center with an aspect ratio in range.
    w, h = width, height
    if width / height < ratio[0]:
        h = round(w / ratio[0])
    elif width / height > ratio[1]:
        w = round(h * ratio[1])
    return (width - w) // 2, (height - h) // 2, w, h


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Captions:
    """The caption templates of data.captions, of which one is drawn by weight and filled with the sample's members.

    A field names a member: {txt} stands for its text, {json[key]} for an entry of the parsed JSON, and {json[key][0]}
    for the first of a list. A whole list is refused.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._templates = [template for template, weight in weights.items() if weight > 0]
        ends = list(accumulate(weights[template] for template in self._templates))
        # The last end is left out: it is 1, up to rounding, and `uniform` is always below it.
        self._ends = [end / ends[-1] for end in ends[:-1]]

    def pick(self, members: dict[str, bytes], uniform: float) -> str:
        """One caption; `uniform` in [0, 1) selects the template. Raises: as fill_template."""
        return fill_template(self._templates[bisect_right(self._ends, uniform)], members)


def list_fields(template: str) -> set[str]:
    """The members that a template refers to."""
    # "json[label]" refers to the member json.
    return {name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(template) if name}


def fill_template(template: str, members: dict[str, bytes]) -> str:
    """Fill a template with the sample's members and strip the result.

    Raises:  BrokenSample if a field is missing or the result is empty, naming the members seen.
    """
    seen = f"; the sample has {', '.join(members)}"
    try:
        text = _FORMATTER.vformat(template, (), _Fields(members)).strip()
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BrokenSample(f"caption {template!r}: {type(error).__name__}: {error}{seen}") from None
    if not text:
        raise BrokenSample(f"caption {template!r} is empty{seen}")
    return text


class _Fields(dict[str, Any]):
    """The members by name, decoded when a template refers to them."""

    def __getitem__(self, name: str) -> Any:
        data: bytes = super().__getitem__(name)
        return _parse_json(data) if name.rpartition(".")[2] == "json" else data.decode("utf-8")


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if isinstance(value, list):
            entry = f"{{{field_name}[0]}} is the first"
            raise ValueError(f"{{{field_name}}} is a list of {len(value)} entries; {entry}")
        return value, first

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise LookupError("a field is null")
        if any(int(number) > _MAX_FIELD for number in re.findall(r"\d+", format_spec)):
            raise ValueError(f"a width or precision above {_MAX_FIELD}")
        return format(value, format_spec)


_FORMATTER = _Formatter()


def _parse_json(data: bytes) -> Any:
    """As json.loads. Raises: ValueError for what is no JSON or nested too deeply."""
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        depth = 0
        # Brackets within strings do not nest.
        for bracket in re.findall(
            r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text, flags=re.DOTALL)
        ):
            depth += 1 if bracket in "[{" else -1
            if depth > _MAX_DEPTH:
                raise ValueError(f"JSON nested in more than {_MAX_DEPTH} levels")
    return json.loads(text)


def shorten_caption(text: str) -> str:
    """The part of a caption that a tokenizer can use up, so that its time is bounded.

    CLIP's byte pair encoding takes quadratic time for a word: 10 s for 16,000 letters. A caption of at most 2,048 bytes
    is left as it is. Of a longer one, its first 16,384 bytes are kept and of each run without a space its first 2,048.
    A token of CLIP's vocabulary stands for some 5 bytes on average, so the context, 77 tokens, is full long before.
    Text without spaces, as in Chinese or Thai, is cut like a word, after 682 characters.
    """
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _MAX_WORD:
        return text
    # Only these spaces: tokenizers' cleaning removes others, such as control characters, and would join the words.
    data = re.sub(rb"([^ \t\r\n]{%d})[^ \t\r\n]+" % _MAX_WORD, rb"\1", data[:_MAX_CAPTION])
    return data.decode("utf-8", "ignore")  # what a cut has left of a character is dropped
