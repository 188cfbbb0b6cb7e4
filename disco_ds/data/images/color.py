"""Color jitter, gray scale and random erasing of a batch on its device, by open_clip's names.

torchvision and timm draw from the process's generator and change one image at a time. Here every image has random
numbers of its own, keyed by (seed, epoch, sample id), and a batch is changed in one go, without waiting for the device.
augment.py calls it.
"""

from __future__ import annotations

import math
from itertools import permutations

import torch
from torch import Tensor

from disco_ds.config.data import AugmentSettings
from disco_ds.data.order.counter_rng import NOISE_COLUMN, keyed_bits

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = list(permutations(range(4)))
"""The orders in which an image's colors are changed; all are equally likely."""
COLUMNS = 7
"""Random numbers that an image's colors take: whether, four factors, order, gray scale."""
LUMA = (0.2989, 0.587, 0.114)
MAX_BOXES = 8
BOX_COLUMNS = 2 + 4 * MAX_BOXES
"""Random numbers that an image's boxes take: whether, how many, and for each area, aspect, top and left."""
_BOX_AREA = (0.02, 1 / 3)
_BOX_ASPECT = 0.3


def change_colors(pixels: Tensor, drawn: Tensor, settings: AugmentSettings) -> Tensor:
    """Jitter as torchvision.transforms.ColorJitter does, in a random order for each image, then gray scale.

    Args:    pixels [m, 3, H, W] fp32 in [0, 1]; drawn [m, COLUMNS] uniform in [0, 1).
    Returns: [m, 3, H, W] fp32 in [0, 1].
    """
    if any(settings.color_jitter):
        pixels = _jitter(pixels, drawn, settings)
    if settings.gray_scale_prob:
        pixels = torch.where(
            _per_image(drawn[:, 6] < settings.gray_scale_prob), _gray(pixels), pixels
        )
    return pixels


def _jitter(pixels: Tensor, drawn: Tensor, settings: AugmentSettings) -> Tensor:
    ranges = torch.tensor(settings.color_jitter, device=drawn.device)
    # A range above 1 would make negative factors, which torchvision cuts off too.
    low, high = (1 - ranges).clamp(min=0), 1 + ranges
    applied = drawn[:, 0] < settings.color_jitter_prob
    factors = low + (high - low) * drawn[:, 1:5]
    turns = settings.color_jitter[HUE] * (2 * drawn[:, 4] - 1)
    order = torch.tensor(ORDERS, device=drawn.device)[(len(ORDERS) * drawn[:, 5]).long()]
    for kind in order.unbind(1):
        # Brightness, contrast and saturation are one mix, of the image with black, its mean gray, or its grays.
        mixed = applied & (kind != HUE)
        factor = _per_image(torch.where(mixed, factors.gather(1, kind[:, None])[:, 0], 1))
        gray = _gray(pixels)
        # In fp64, so that the sum does not depend on how many images are summed beside each other.
        mean = gray.mean((1, 2, 3), keepdim=True, dtype=torch.float64).to(gray.dtype)
        other = torch.where(
            _per_image(kind == SATURATION), gray, _per_image(kind == CONTRAST) * mean
        )
        pixels = (factor * pixels + (1 - factor) * other).clamp(0, 1)
        if settings.color_jitter[HUE]:
            turned = _per_image(applied & (kind == HUE))
            pixels = torch.where(turned, _turn_hue(pixels, turns[:, None, None]), pixels)
    return pixels


def _turn_hue(pixels: Tensor, turns: Tensor) -> Tensor:
    """RGB to HSV, the hue moved by so many turns of the color circle, and back to RGB."""
    red, green, blue = pixels.unbind(1)
    value = pixels.amax(1)
    chroma = value - pixels.amin(1)
    some = torch.where(chroma > 0, chroma, 1)
    # In sixths of a turn: red is 0, green 2, blue 4.
    from_green = torch.where(value == green, 2 + (blue - red) / some, 4 + (red - green) / some)
    hue = torch.where(value == red, (green - blue) / some, from_green) + 6 * turns
    offset = torch.tensor([5.0, 3.0, 1.0], device=pixels.device)[:, None, None]
    k = (hue[:, None] + offset) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


def erase_boxes(
    pixels: Tensor,
    drawn: Tensor,
    epoch: Tensor,
    index: Tensor,
    seed: int,
    settings: AugmentSettings,
    view: int,
) -> Tensor:
    """Fill one to re_count boxes with noise, of the sizes that timm's RandomErasing takes.

    timm's noise is normal in normalized pixels. This one is uniform in [0, 1), whose mean and deviation (0.5, 0.29) are
    close to CLIP's (0.46, 0.27), so that pixels stay in [0, 1].

    Args:    pixels [m, 3, H, W] fp32; drawn [m, BOX_COLUMNS] uniform in [0, 1); epoch, index [m] int64.
    """
    height, width = pixels.shape[2:]
    number = torch.where(
        drawn[:, 0] < settings.re_prob, 1 + (settings.re_count * drawn[:, 1]).long(), 0
    )
    smallest, largest = _BOX_AREA
    inside = torch.zeros(len(pixels), height, width, dtype=torch.bool, device=pixels.device)
    for box in range(settings.re_count):
        u = drawn[:, 2 + 4 * box : 6 + 4 * box]
        area = (smallest + (largest - smallest) * u[:, 0]) * height * width / number.clamp(min=1)
        root = torch.exp((0.5 - u[:, 1]) * math.log(_BOX_ASPECT))
        rows = _within(height, (area.sqrt() * root).round(), u[:, 2])
        columns = _within(width, (area.sqrt() / root).round(), u[:, 3])
        inside |= (box < number)[:, None, None] & rows[:, :, None] & columns[:, None, :]
    return torch.where(inside[:, None], _noise(pixels.shape, epoch, index, seed, view), pixels)


def _within(side: int, length: Tensor, place: Tensor) -> Tensor:
    """Which of `side` rows or columns a box of so many, at `place` in [0, 1), covers; [m, side] bool."""
    length = length.clamp(1, side - 1)
    first = (place * (side - length + 1)).floor()[:, None]
    line = torch.arange(side, device=length.device)
    return (line >= first) & (line < first + length[:, None])


def _noise(shape: torch.Size, epoch: Tensor, index: Tensor, seed: int, view: int) -> Tensor:
    """Uniform noise in [0, 1) for every pixel; 21 of its 64 random bits for each channel."""
    num, _, height, width = shape
    bits = keyed_bits(seed, epoch, index, height * width, NOISE_COLUMN + view * height * width)
    parts = [(bits >> first & (1 << 21) - 1).to(torch.float32) for first in (0, 21, 42)]
    return torch.stack(parts, dim=1).reshape(num, 3, height, width) * 2.0**-21


def _gray(pixels: Tensor) -> Tensor:
    """[m, 1, H, W], with torchvision's weights."""
    red, green, blue = pixels.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]
