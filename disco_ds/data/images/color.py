"""Color jitter, conversion to grayscale, and random erasing, with open_clip's options, for a batch on its device.

torchvision and timm draw from the process's global random generator and process one image at a time. Here each image
has random numbers keyed by (seed, epoch, sample id). The whole batch is processed at once, without synchronizing with
the device.
"""

from __future__ import annotations

import math
from itertools import permutations

import torch
from torch import Tensor

from disco_ds.config.data import AugmentSettings

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = list(permutations(range(4)))
"""All orders in which the four color changes can be applied. Each image draws one of these orders at random."""
COLUMNS = 7
"""Random numbers per image for colors: whether to jitter, four strengths, the order, whether to convert to gray."""
_MAX_BOXES = 8
BOX_COLUMNS = 2 + 4 * _MAX_BOXES
"""Random numbers per image for random erasing: whether to erase, the number of boxes, and then for each box its area,
aspect ratio, top and left."""
_BOX_AREA = (0.02, 1 / 3)
_BOX_ASPECT = 0.3


def jitter_colors(pixels: Tensor, drawn: Tensor, settings: AugmentSettings) -> Tensor:
    """Jitter the colors of each image like torchvision.transforms.ColorJitter, and convert some images to gray.

    Args:
        pixels: [m, 3, H, W] fp32 in [0, 1].
        drawn: Random numbers, [m, COLUMNS or more], uniform in [0, 1).
        settings: Strengths and probabilities.

    Returns:
        [m, 3, H, W] fp32 in [0, 1].
    """
    # One random number per image, in a shape that broadcasts over its pixels.
    columns = drawn[:, :COLUMNS, None, None, None]
    if any(settings.color_jitter):
        applied = columns[:, 0] < settings.color_jitter_prob
        strength = torch.tensor(settings.color_jitter, device=drawn.device).view(-1, 1, 1, 1)
        # As in torchvision, the factor is never negative, even if the strength is above 1.
        low = (1 - strength).clamp(min=0)
        factors = low + (1 + strength - low) * columns[:, 1:5]
        factors = torch.where(applied[:, None], factors, 1)
        orders = torch.tensor(ORDERS, device=drawn.device)
        for kind in orders[(len(ORDERS) * columns[:, 5]).long()].unbind(-1):
            pixels = _change(pixels, kind, factors.gather(1, kind[:, None])[:, 0])
    return torch.where(columns[:, 6] < settings.gray_scale_prob, _gray(pixels), pixels)


def _change(pixels: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Change the brightness, contrast, saturation or hue of each image.

    Args:
        pixels: [m, 3, H, W] fp32 in [0, 1].
        kind: Which property to change in each image, such as BRIGHTNESS, [m, 1, 1, 1].
        factor: How much to change it, [m, 1, 1, 1]. A factor of 1 changes nothing.
    """
    gray = _gray(pixels)
    # The mean is computed in fp64, so that its fp32 value does not depend on the number of images in the batch.
    mean = gray.mean((1, 2, 3), keepdim=True, dtype=torch.float64).to(gray.dtype)
    # Brightness mixes the image with black, contrast with its mean gray, and saturation with its grayscale version.
    other = torch.where(kind == SATURATION, gray, (kind == CONTRAST) * mean)
    mixed = (factor * pixels + (1 - factor) * other).clamp(0, 1)
    return torch.where(kind == HUE, _turn_hue(pixels, factor[:, 0] - 1), mixed)


def _turn_hue(pixels: Tensor, turns: Tensor) -> Tensor:
    """Rotate the hue by `turns`, where 1 is a full turn of the color circle, by way of HSV."""
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
    offset = torch.tensor([5.0, 3.0, 1.0], device=pixels.device)[:, None, None]
    k = (hue[:, None] + offset) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


def erase_boxes(pixels: Tensor, noise: Tensor, drawn: Tensor, settings: AugmentSettings) -> Tensor:
    """Fill random boxes of some images with noise. The box sizes are distributed as in timm's RandomErasing.

    Args:
        pixels: [m, 3, H, W] fp32.
        noise: [m, 3, H, W] fp32.
        drawn: Random numbers, [m, BOX_COLUMNS], uniform in [0, 1).
        settings: The probability that an image is changed (re_prob), and its maximum number of boxes (re_count).
    """
    height, width = pixels.shape[2:]
    erased = drawn[:, 0] < settings.re_prob
    number = torch.where(erased, 1 + (settings.re_count * drawn[:, 1]).long(), 0)
    smallest, largest = _BOX_AREA
    inside = torch.zeros(len(pixels), height, width, dtype=torch.bool, device=pixels.device)
    for box in range(settings.re_count):
        area, aspect, top, left = drawn[:, 2 + 4 * box : 6 + 4 * box].unbind(1)
        # If an image has several boxes, each is smaller, so that their total area is about that of a single box.
        area = (smallest + (largest - smallest) * area) * height * width / number.clamp(min=1)
        root = torch.exp((0.5 - aspect) * math.log(_BOX_ASPECT))
        rows = _within(height, (area.sqrt() * root).round(), top)
        columns = _within(width, (area.sqrt() / root).round(), left)
        inside |= (box < number)[:, None, None] & rows[:, :, None] & columns[:, None, :]
    return torch.where(inside[:, None], noise, pixels)


def _within(side: int, length: Tensor, place: Tensor) -> Tensor:
    """Return which rows (or columns) of each image its box covers, [m, side] bool.

    Args:
        side: Number of rows (or columns) of an image.
        length: Number of rows (or columns) that the box covers, [m].
        place: Relative position of the box, [m] in [0, 1): 0 puts it at the top (or left).
    """
    length = length.clamp(1, side - 1)
    first = (place * (side - length + 1)).floor()[:, None]
    line = torch.arange(side, device=length.device)
    return (line >= first) & (line < first + length[:, None])


def _gray(pixels: Tensor) -> Tensor:
    """Convert to grayscale with torchvision's channel weights; return [m, 1, H, W]."""
    red, green, blue = pixels.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]
