"""Random augmentation does not depend on how a batch is divided. With equal random numbers, it equals torchvision's."""

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from disco_ds.config.data import AugmentSettings
from disco_ds.data import augment
from disco_ds.data.counter_rng import AUGMENT_COLUMN, COLOR_COLUMN, keyed_uniform, random_key
from disco_ds.data.images import ORDERS


def keys(seed: int, num: int, epoch: int = 0) -> Tensor:
    return torch.tensor([random_key(seed, epoch, index) for index in range(num)])


def images(num: int, height: int = 20, width: int = 28) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, 3, height, width), generator=generator, dtype=torch.uint8)


STRONG = AugmentSettings(
    rotate_degrees=14, zoom=0.2, shift=0.12, color_scale=0.25, color_offset=0.1
)
EVERYTHING = AugmentSettings(
    **STRONG.model_dump(include={"rotate_degrees", "zoom", "shift", "color_scale", "color_offset"}),
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    color_jitter_prob=0.8,
    gray_scale_prob=0.2,
)


def test_augment_zero_settings_is_the_image() -> None:
    image = images(3)
    out = augment(image, keys(0, 3), AugmentSettings())
    assert torch.equal(out, image)


COLORS = AugmentSettings(
    color_jitter=(0.4, 0.3, 0.5, 0.2), color_jitter_prob=0.7, gray_scale_prob=0.3
)


@pytest.mark.parametrize("kind", [STRONG, COLORS, EVERYTHING])
def test_augment_does_not_depend_on_the_grouping(kind: AugmentSettings) -> None:
    image, key = images(13), keys(5, 13)
    whole = augment(image, key, kind)
    assert whole.min() >= 0
    assert whole.max() <= 1
    parts = [augment(image[rows], key[rows], kind) for rows in torch.arange(13).split(4)]
    assert torch.equal(torch.cat(parts), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augment(image, key, kind), whole)
    assert not torch.equal(augment(image, keys(6, 13), kind), whole)
    assert not torch.equal(augment(image, keys(5, 13, epoch=1), kind), whole)
    assert not torch.equal(augment(image, key, kind, view=1), whole)


def test_color_jitter_and_gray_scale_equal_torchvision_s() -> None:
    image = images(60)
    drawn = keyed_uniform(keys(3, 60), 7, COLOR_COLUMN)
    adjust = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    ours = augment(image, keys(3, 60), COLORS)
    for i, row in enumerate(drawn.tolist()):
        theirs = image[i].float() / 255
        if row[0] < 0.7:
            mixes = [1 + a * (2 * u - 1) for a, u in zip((0.4, 0.3, 0.5), row[1:4], strict=True)]
            factors = [*mixes, 0.2 * (2 * row[4] - 1)]
            for op in ORDERS[int(24 * row[5])]:
                theirs = adjust[op](theirs, factors[op])
        if row[6] < 0.3:
            theirs = TF.rgb_to_grayscale(theirs, 3)
        assert (ours[i] - theirs).abs().max() < 1e-5, i


def test_color_jitter_takes_every_order_and_each_probability() -> None:
    drawn = keyed_uniform(keys(0, 20_000), 7, COLOR_COLUMN)
    counts = (24 * drawn[:, 5]).long().bincount(minlength=24)
    assert sorted(ORDERS) == sorted(set(ORDERS))
    assert counts.min() > 700
    image = torch.randint(
        0, 256, (2000, 3, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    for settings, share in ((AugmentSettings(gray_scale_prob=0.2), 0.2), (COLORS, 1 - 0.3 * 0.7)):
        out = augment(image, keys(1, 2000), settings)
        changed = (out - image / 255).abs().amax((1, 2, 3)) > 1e-6
        assert abs(changed.float().mean() - share) < 0.03


def test_augment_moves_alone_keep_white_white() -> None:
    white = torch.full((4, 3, 16, 24), 255, dtype=torch.uint8)
    moves = STRONG.model_copy(update={"color_scale": 0.0, "color_offset": 0.0})
    assert torch.allclose(augment(white, keys(0, 4), moves), torch.ones(()))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 40)])
def test_augment_equals_torchvisions_affine(height: int, width: int) -> None:
    coarse = torch.rand(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    image, key = (smooth * 255).byte(), keys(3, 6)
    moves = STRONG.model_copy(update={"color_scale": 0.0, "color_offset": 0.0})
    drawn = 2 * keyed_uniform(key, 4, AUGMENT_COLUMN) - 1
    ours = augment(image, key, moves)
    for i in range(6):
        angle, zoom = 14 * drawn[i, 0].item(), 1 + 0.2 * drawn[i, 1].item()
        shift = [0.12 * drawn[i, 2].item() * width, 0.12 * drawn[i, 3].item() * height]
        # TF.affine translates by whole pixels, so each pixel becomes 8 x 8 pixels.
        padded = torch.nn.functional.interpolate(
            image[i : i + 1].float() / 255, scale_factor=8, mode="nearest"
        )
        theirs = TF.affine(
            padded,
            angle,
            [round(8 * s) for s in shift],
            zoom,
            [0.0, 0.0],
            InterpolationMode.BILINEAR,
            fill=[1.0],
        )
        theirs = torch.nn.functional.avg_pool2d(theirs, 8)[0]
        inner = (slice(None), slice(4, -4), slice(4, -4))
        assert (ours[i] - theirs)[inner].abs().mean() < 0.02


def test_augment_colors_are_gain_and_offset_per_channel() -> None:
    image = torch.full((500, 3, 2, 2), 128, dtype=torch.uint8)
    colors = AugmentSettings(color_scale=0.25, color_offset=0.1)
    out = augment(image, keys(0, 500), colors)
    assert torch.equal(out[:, :, 0, 0], out[:, :, 1, 1])
    values = out[:, :, 0, 0] / (128 / 255)
    assert abs(values.mean() - 1) < 0.02
    expected = math.sqrt(0.25**2 / 3 + (0.1 * 255 / 128) ** 2 / 3)
    assert abs(values.std() - expected) < 0.02
    assert torch.corrcoef(values.T)[0, 1].abs() < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_augment_on_the_gpu_equals_the_cpu() -> None:
    image, key = images(9, 64, 48), keys(5, 9)
    ours = augment(image.cuda(), key.cuda(), EVERYTHING)
    assert torch.allclose(ours.cpu(), augment(image, key, EVERYTHING), atol=1e-4)
