"""Color jitter and conversion to grayscale on the device where the batch is. The options are the same as open_clip's.

torchvision draws from the process's global random generator and processes one image at a time. Here each image
has random numbers keyed by (seed, epoch, sample id). The whole batch is processed together, and nothing is read
back to the host.
"""

# Symbols in shapes: m images of H x W pixels.

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from disco_ds.config.data import AugmentSettings

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = tuple(permutations(range(4)))
"""All orders in which the four color changes can be applied. Each image draws one of these orders at random."""
COLUMNS = 7
"""Number of random numbers per image for colors: whether to jitter, four strengths, the order, whether to turn gray."""


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
