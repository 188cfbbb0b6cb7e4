"""Random augmentation of a batch of images, on the device that holds it.

The random numbers are keyed by (seed, epoch, sample id), so both passes of GradAccum see the same pixels, at any number
of ranks. Cropping is not done here but by the workers, as they decode.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from disco_ds.config.data import AugmentSettings
from disco_ds.data.images.color import BOX_COLUMNS, COLUMNS, change_colors, erase_boxes
from disco_ds.data.order.counter_rng import AUGMENT_COLUMN, COLOR_COLUMN, keyed_uniform

_NUM_COLUMNS = 10
_NUM_COLOR_COLUMNS = 64


def augment(
    image: Tensor, epoch: Tensor, index: Tensor, seed: int, settings: AugmentSettings, view: int = 0
) -> Tensor:
    """Rotate, zoom and shift each image, change gain and offset of its channels, jitter its colors, and erase boxes.

    Args:    image [m, 3, H, W] uint8; epoch, index [m] int64, all on one device; view: number of the view; each has
             random numbers of its own.
    Returns: [m, 3, H, W] fp32 in [0, 1], also under autocast; pixels from outside the image are white. `image` itself,
             in uint8, if the settings change nothing.
    """
    moves = settings.rotate_degrees or settings.zoom or settings.shift
    colors = settings.color_scale or settings.color_offset
    jitter = any(settings.color_jitter) or settings.gray_scale_prob
    if not (moves or colors or jitter or settings.re_prob):
        return image
    with torch.autocast(device_type=image.device.type, enabled=False):
        pixels = image.to(torch.float32) / 255
        # [m, 10] in [-1, 1): rotation, zoom, shift x and y, gains, offsets.
        drawn = (
            2
            * keyed_uniform(seed, epoch, index, _NUM_COLUMNS, AUGMENT_COLUMN + view * _NUM_COLUMNS)
            - 1
        )
        if moves:
            grid = _grid(drawn, settings, image.shape[2], image.shape[3])
            # grid_sample returns 0 outside of its input, which is white in the inverted image.
            pixels = 1 - F.grid_sample(
                1 - pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False
            )
        if colors:
            gain = 1 + settings.color_scale * drawn[:, 4:7, None, None]
            pixels = pixels * gain + settings.color_offset * drawn[:, 7:10, None, None]
        pixels = pixels.clamp(0, 1)
        if jitter or settings.re_prob:
            first = COLOR_COLUMN + view * _NUM_COLOR_COLUMNS
            drawn = keyed_uniform(seed, epoch, index, COLUMNS + BOX_COLUMNS, first)
            pixels = change_colors(pixels, drawn, settings)
            if settings.re_prob:
                pixels = erase_boxes(pixels, drawn[:, COLUMNS:], epoch, index, seed, settings, view)
        return pixels


def _grid(drawn: Tensor, settings: AugmentSettings, height: int, width: int) -> Tensor:
    """Where every output pixel comes from, [m, H, W, 2] in grid_sample's coordinates (align_corners False).

    Computed elementwise: affine_grid is a matrix product, which TF32 would round to a tenth of a pixel.
    """
    angle = math.radians(settings.rotate_degrees) * drawn[:, 0]
    zoom = 1 + settings.zoom * drawn[:, 1]
    cos, sin = (torch.cos(angle) / zoom)[:, None, None], (torch.sin(angle) / zoom)[:, None, None]
    # A coordinate runs over [-1, 1] along a side, so a fraction of the side is twice as many units.
    x = _centers(width, drawn)[None, None, :] - 2 * settings.shift * drawn[:, 2, None, None]
    y = _centers(height, drawn)[None, :, None] - 2 * settings.shift * drawn[:, 3, None, None]
    return torch.stack(
        [cos * x + sin * (height / width) * y, cos * y - sin * (width / height) * x], dim=-1
    )


def _centers(side: int, like: Tensor) -> Tensor:
    return (2 * torch.arange(side, device=like.device, dtype=like.dtype) + 1) / side - 1
