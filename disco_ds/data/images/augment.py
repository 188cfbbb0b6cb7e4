"""Random augmentation of a batch of images, on the device where the batch is.

The random numbers are keyed by (seed, epoch, sample id). Both passes of GradAccum (training/grad_accum.py) therefore
see the same pixels, and the pixels do not depend on the number of ranks. Cropping is not done here: the data workers
crop when they decode.
"""

# Symbols in shapes: m images of H x W pixels.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from disco_ds.config.data import AugmentSettings
from disco_ds.data.images.color import COLUMNS, jitter_colors
from disco_ds.data.order.counter_rng import AUGMENT_COLUMN, COLOR_COLUMN, keyed_uniform

_NUM_COLUMNS = 10
"""Number of random numbers per image and view for rotation, zoom, shift, and the scale and offset of each channel."""
_NUM_COLOR_COLUMNS = 64
"""Number of random numbers per image and view that are reserved for color jitter."""


def augment(
    image: Tensor, epoch: Tensor, index: Tensor, seed: int, settings: AugmentSettings, view: int = 0
) -> Tensor:
    """Rotate, zoom and shift each image, scale and offset its channels, and jitter its colors.

    Args:
        image: [m, 3, H, W] uint8.
        epoch: Epoch of each sample, [m] int64, on the same device as `image`.
        index: Sample ids, [m] int64, on the same device as `image`.
        seed: Seed of the run.
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
        pixels = image.to(torch.float32) / 255
        # [m, 10] in [-1, 1): rotation, zoom, shift in x and y, three channel factors, three channel offsets.
        first = AUGMENT_COLUMN + view * _NUM_COLUMNS
        drawn = 2 * keyed_uniform(seed, epoch, index, _NUM_COLUMNS, first) - 1
        if settings.rotate_degrees or settings.zoom or settings.shift:
            grid = _grid(drawn, settings, height, width)
            # grid_sample fills areas outside its input with 0. Inverting the image before and after makes them white.
            pixels = 1 - F.grid_sample(1 - pixels, grid, padding_mode="zeros", align_corners=False)
        factor = 1 + settings.color_scale * drawn[:, 4:7, None, None]
        offset = settings.color_offset * drawn[:, 7:10, None, None]
        pixels = (pixels * factor + offset).clamp(0, 1)
        first = COLOR_COLUMN + view * _NUM_COLOR_COLUMNS
        drawn = keyed_uniform(seed, epoch, index, COLUMNS, first)
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
