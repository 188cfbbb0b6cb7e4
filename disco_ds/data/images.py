"""Images: decoding and resizing on the host, and random augmentation of a batch on the device where the batch is.

The result of every function here depends only on the bytes, settings and random numbers that are passed to it. Callers
of the decoding functions wrap the calls in errors.breaks_sample, which turns the decoders' errors into BrokenSample.

Alternatives considered for augmentation: torchvision. It draws from the process's global random generator and processes
one image at a time. Here, each image has its own random numbers, the whole batch is processed together, and nothing is
read back to the host. Both passes of GradAccum (training/grad_accum.py) see the same pixels.
"""

# Symbols in shapes: m images of H x W pixels.

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from itertools import permutations
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError, features
from torch import Tensor
from torch.nn import functional as F

from disco_ds.config.data import AugmentSettings
from disco_ds.data.captions import Members, Picture
from disco_ds.data.counter_rng import AUGMENT_COLUMN, COLOR_COLUMN, CROP_COLUMN, keyed_uniform
from disco_ds.data.errors import BrokenSample

_FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP"]
"""Formats that PIL may open. Of the other formats, EPS starts an external program, a tile of a TIFF can be far larger
than the image, and the rest are rare for photos."""
if features.check("avif"):  # Pillow 11.3 and later
    _FORMATS.append("AVIF")
_JPEG_COLORS = ("YCbCr", "RGB", "Gray")
"""Color spaces of JPEGs for which simplejpeg returns the same colors as PIL."""
# Disable PIL's limit on the number of pixels, because PIL decodes images of up to twice its limit with only a warning.
# decode_image checks data.max_pixels instead.
Image.MAX_IMAGE_PIXELS = None
_TRIES = 10
"""Number of attempts to draw a crop. Each draws an area and an aspect ratio; two more numbers place the crop."""
_MAX_ASPECT = 64
"""Maximum ratio of the long side to the short side in evaluation. An image with a larger ratio could become huge when
its short side is resized to the model's size."""

_NUM_COLUMNS = 10
"""Number of random numbers per image and view for rotation, zoom, shift, and the scale and offset of each channel."""
_NUM_COLOR_COLUMNS = 64
"""Number of random numbers per image and view that are reserved for color jitter."""
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = tuple(permutations(range(4)))
"""All orders in which the four color changes can be applied. Each image draws one of these orders at random."""
COLUMNS = 7
"""Number of random numbers per image for colors: whether to jitter, four strengths, the order, whether to turn gray."""


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
            if its pixels are floating-point numbers or 32-bit integers.
        Exception: PIL's decoders raise many types: OSError, SyntaxError, struct.error, IndexError and others.
    """
    if isinstance(data, bytes):
        try:
            image: Image.Image = Image.open(BytesIO(data), formats=_FORMATS)
        except UnidentifiedImageError:
            raise BrokenSample(
                f"cannot be read as an image: it begins with {data[:16]!r}"
            ) from None
    else:
        image = data
    width, height = image.size
    if width * height > max_pixels:
        raise BrokenSample(
            f"an image of {width} x {height} pixels exceeds data.max_pixels={max_pixels}"
        )
    image.load()
    return image if image.mode == "RGB" else _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded image of any mode to RGB.

    Raises:
        BrokenSample: If the pixels are floating-point numbers or 32-bit integers, for which it is not defined which
            value is white.
    """
    if image.mode in ("F", "I"):
        raise BrokenSample(
            f"an image of mode {image.mode} (floating-point or 32-bit pixels) has no known range of brightness; "
            "convert it to 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        # PIL would clip all values above 255.
        gray = np.asarray(image) * np.float32(255 / 65_535)
        return Image.fromarray(gray.round().astype(np.uint8)).convert("RGB")
    # PIL warns if a palette with alpha values is converted directly to RGB.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def decode_pixels(data: Picture, max_pixels: int) -> Tensor:
    """Decode an image to [3, H, W] uint8. JPEGs are decoded by simplejpeg, which takes 55 to 70% of PIL's time.

    Raises:
        BrokenSample: If the bytes are not an image that can be used.
        Exception: Any exception of PIL's decoders, as in decode_image.
    """
    if isinstance(data, bytes) and data.startswith(b"\xff\xd8"):
        # If simplejpeg refuses the data, decode_image below either succeeds or explains the problem.
        with suppress(ValueError):
            height, width, color, _ = simplejpeg.decode_jpeg_header(data)
            if color in _JPEG_COLORS and width * height <= max_pixels:
                return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)
    return torch.from_numpy(np.array(decode_image(data, max_pixels))).permute(2, 0, 1)


def decode_for_evaluation(data: Picture, max_pixels: int, spec: ImageSpec) -> Tensor:
    """Decode an image, and resize it with open_clip's evaluation transform, which crops or pads it if necessary.

    Returns:
        [3, H, W] uint8.

    Raises:
        BrokenSample: If decode_image refuses the image, or if the long side is more than 64 times the short side.
        Exception: Any exception of PIL's decoders, as in decode_image.
    """
    image = decode_image(data, max_pixels)
    if max(image.size) > _MAX_ASPECT * min(image.size):
        raise BrokenSample(
            f"an image of {image.width} x {image.height} pixels: one side is over {_MAX_ASPECT} times the other"
        )
    pixels: Tensor = _evaluation_transform(spec)(image)
    return (255 * pixels).round().to(torch.uint8)


@lru_cache
def _evaluation_transform(spec: ImageSpec) -> Any:
    # Imported here, because the import takes seconds and only evaluation needs it.
    from open_clip import image_transform

    return image_transform(
        spec.size,
        is_train=False,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        resize_mode=spec.resize_mode,
        interpolation=spec.interpolation,
    )


def resize_crop(image: Tensor, spec: ImageSpec, box: tuple[int, int, int, int]) -> Tensor:
    """Crop an image and resize the crop to the model's size.

    Args:
        image: [3, h, w] uint8, as decode_pixels returns it.
        spec: The model's size and interpolation.
        box: (left, top, width, height) of the crop.

    Returns:
        [3, H, W] uint8, stored as [H, W, 3].
    """
    left, top, width, height = box
    crop = image[None, :, top : top + height, left : left + width]
    # torch has a fast path for this layout, in which images are decoded. Only a copy of the crop has it.
    crop = crop.contiguous(memory_format=torch.channels_last)
    # The filters are the same as PIL's, but applied to uint8 tensors: this takes less than half of PIL's time. Most
    # pixels that differ from PIL's differ by one level, but next to sharp edges differences of up to 26 occur.
    return F.interpolate(
        crop, spec.size, mode=spec.interpolation, align_corners=False, antialias=True
    )[0]


def draw_crop(
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    uniform: Callable[[int], float],
) -> tuple[int, int, int, int]:
    """Draw a random crop.

    Args:
        width: Width of the image.
        height: Height of the image.
        scale: Range of the crop's area, as a fraction of the image's area.
        ratio: Range of the crop's aspect ratio.
        uniform: Function that returns the sample's random number in a column, in [0, 1) (counter_rng.keyed_float).

    Returns:
        (left, top, width, height) of the crop.

    Source: torchvision.transforms.RandomResizedCrop, but with random numbers that the caller passes.
    """
    # As in torchvision: the area is drawn uniformly and the aspect ratio log-uniformly. If the box does not fit into
    # the image, both are drawn again.
    low, high = math.log(ratio[0]), math.log(ratio[1])
    last = CROP_COLUMN + 2 * _TRIES
    for column in range(CROP_COLUMN, last, 2):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * uniform(column))
        aspect = math.exp(low + (high - low) * uniform(column + 1))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            # All attempts share the two numbers that place the box, because only one attempt succeeds.
            top, left = uniform(last), uniform(last + 1)
            return int(left * (width - w + 1)), int(top * (height - h + 1)), w, h
    # All attempts have failed. Take the largest centered box whose aspect ratio is in the range.
    w = min(width, round(height * ratio[1]))
    h = min(height, round(width / ratio[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def augment(image: Tensor, key: Tensor, settings: AugmentSettings, view: int = 0) -> Tensor:
    """Rotate, zoom and shift each image, scale and offset its channels, and jitter its colors.

    Args:
        image: [m, 3, H, W] uint8.
        key: Keys of the random numbers (counter_rng.random_key), [m] int64, on the same device as `image`.
        settings: Which augmentations to apply, and how strongly.
        view: Index of the view that is augmented. Each view uses different random numbers.

    Returns:
        [m, 3, H, W] fp32 in [0, 1], even under autocast. Areas that were outside the original image are white. If the
        settings enable no augmentation, returns `image` itself, in uint8.
    """
    if settings == AugmentSettings():
        return image
    height, width = image.shape[2:]
    with torch.autocast(device_type=image.device.type, enabled=False):
        # The changes below are fastest, and summed in the same order as ever, if each channel is stored in one piece.
        pixels = image.to(torch.float32, memory_format=torch.contiguous_format) / 255
        # [m, 10] in [-1, 1): rotation, zoom, shift in x and y, three channel factors, three channel offsets.
        drawn = 2 * keyed_uniform(key, _NUM_COLUMNS, AUGMENT_COLUMN + view * _NUM_COLUMNS) - 1
        if settings.rotate_degrees or settings.zoom or settings.shift:
            grid = _grid(drawn, settings, height, width)
            # grid_sample fills areas outside its input with 0. Inverting the image before and after makes them white.
            pixels = 1 - F.grid_sample(1 - pixels, grid, padding_mode="zeros", align_corners=False)
        factor = 1 + settings.color_scale * drawn[:, 4:7, None, None]
        offset = settings.color_offset * drawn[:, 7:10, None, None]
        pixels = (pixels * factor + offset).clamp(0, 1)
        drawn = keyed_uniform(key, COLUMNS, COLOR_COLUMN + view * _NUM_COLOR_COLUMNS)
        return jitter_colors(pixels, drawn, settings)


def _grid(drawn: Tensor, settings: AugmentSettings, height: int, width: int) -> Tensor:
    """Return the input position of each output pixel, [m, H, W, 2] in grid_sample's coordinates (align_corners=False).

    This does not use affine_grid, which is a matrix multiplication: with TF32, its rounding errors reach a tenth of a
    pixel.
    """
    angle = math.radians(settings.rotate_degrees) * drawn[:, 0]
    zoom = 1 + settings.zoom * drawn[:, 1]
    cos = (torch.cos(angle) / zoom)[:, None, None]
    sin = (torch.sin(angle) / zoom)[:, None, None]
    # The image is 2 units wide and 2 units high in these coordinates, so a shift, given as a fraction, is doubled.
    shift = 2 * settings.shift * drawn[:, 2:4, None, None]
    x = _centers(width, drawn)[None, None, :] - shift[:, 0]
    y = _centers(height, drawn)[None, :, None] - shift[:, 1]
    from_x = cos * x + sin * (height / width) * y
    from_y = cos * y - sin * (width / height) * x
    return torch.stack([from_x, from_y], dim=-1)


def _centers(side: int, like: Tensor) -> Tensor:
    return (2 * torch.arange(side, device=like.device, dtype=like.dtype) + 1) / side - 1


def jitter_colors(pixels: Tensor, drawn: Tensor, settings: AugmentSettings) -> Tensor:
    """Jitter the colors of each image like torchvision.transforms.ColorJitter, and convert some images to gray.

    Args:
        pixels: [m, 3, H, W] fp32 in [0, 1].
        drawn: Random numbers, [m, COLUMNS], uniform in [0, 1).
        settings: Strengths and probabilities.

    Returns:
        [m, 3, H, W] fp32 in [0, 1].
    """
    # columns[:, k] has the shape [m, 1, 1, 1], which broadcasts over the pixels of each image.
    columns = drawn[:, :, None, None, None]
    if any(settings.color_jitter):
        applied = columns[:, 0] < settings.color_jitter_prob
        strength = _constant(settings.color_jitter, drawn.device).view(-1, 1, 1, 1)
        # As in torchvision, the factor is never negative, even if the strength is above 1.
        low = (1 - strength).clamp(min=0)
        factors = low + (1 + strength - low) * columns[:, 1:5]
        factors = torch.where(applied[:, None], factors, 1)
        orders = _constant(ORDERS, drawn.device)
        for change in orders[(len(ORDERS) * columns[:, 5]).long()].unbind(-1):
            pixels = _change(pixels, change, factors.gather(1, change[:, None])[:, 0])
    return torch.where(columns[:, 6] < settings.gray_scale_prob, _gray(pixels), pixels)


def _change(pixels: Tensor, change: Tensor, factor: Tensor) -> Tensor:
    """Change the brightness, contrast, saturation or hue of each image.

    Args:
        pixels: [m, 3, H, W] fp32 in [0, 1].
        change: Which property to change in each image, such as BRIGHTNESS, [m, 1, 1, 1].
        factor: How much to change it, [m, 1, 1, 1]. A factor of 1 changes nothing.
    """
    gray = _gray(pixels)
    # The mean is computed in fp64, so that its fp32 value does not depend on the number of images in the batch.
    mean = gray.mean((1, 2, 3), keepdim=True, dtype=torch.float64).to(gray.dtype)
    # Brightness mixes the image with black, contrast with its mean gray, and saturation with its grayscale version.
    other = torch.where(change == SATURATION, gray, (change == CONTRAST) * mean)
    mixed = (factor * pixels + (1 - factor) * other).clamp(0, 1)
    return torch.where(change == HUE, _turn_hue(pixels, factor[:, 0] - 1), mixed)


def _turn_hue(pixels: Tensor, turns: Tensor) -> Tensor:
    """Rotate the hue of each image in HSV space.

    Args:
        pixels: [m, 3, H, W] fp32 in [0, 1].
        turns: Angles as fractions of the full color circle, [m, 1, 1].
    """
    red, green, blue = pixels.unbind(1)
    value = pixels.amax(1)
    chroma = value - pixels.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1)
    # The hue is measured in sixths of a turn: red is 0, green 2, blue 4.
    from_blue = 4 + (red - green) / divisor
    from_green = 2 + (blue - red) / divisor
    from_red = (green - blue) / divisor
    hue = torch.where(value == green, from_green, from_blue)
    hue = torch.where(value == red, from_red, hue) + 6 * turns
    offset = _constant((5.0, 3.0, 1.0), pixels.device)[:, None, None]
    k = (hue[:, None] + offset) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


@cache
def _constant(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """Return the values as a tensor. It is cached, because copying values to the device makes the host wait."""
    return torch.tensor(values, device=device)


def _gray(pixels: Tensor) -> Tensor:
    """Convert to grayscale with torchvision's channel weights; return [m, 1, H, W]."""
    red, green, blue = pixels.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]
