"""Decoding of images, choice of captions, and the sequential reader that `disco-ds eval` uses."""

import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image, features
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from disco_ds.data import BrokenSample, ImageSpec, read_all, read_labels
from disco_ds.data.captions import fill_template, pick_caption
from disco_ds.data.errors import breaks_sample
from disco_ds.data.images import (
    decode_for_evaluation,
    decode_image,
    decode_pixels,
    draw_crop,
    find_image,
    resize_crop,
)
from disco_ds.models.clip import register_config
from helpers.shards import SPEC, bomb, encode, noise, settings, write_shards

MAX_PIXELS = 10**8


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("target", [(32, 32), (24, 40)])
def test_evaluation_resize_equals_open_clip(
    mode: str, interpolation: str, target: tuple[int, int]
) -> None:
    transform = open_clip.image_transform(
        target,
        is_train=False,
        mean=(0,) * 3,
        std=(1,) * 3,
        resize_mode=mode,
        interpolation=interpolation,
    )
    spec = ImageSpec(target, interpolation, mode)  # type: ignore[arg-type]
    for size in [(100, 75), (75, 101), (64, 64), (20, 17), (13, 300), (32, 32)]:
        image = noise(*size)
        ours = decode_for_evaluation(image, MAX_PIXELS, spec)
        assert ours.shape == (3, *target)
        assert ours.dtype == torch.uint8
        assert (ours - 255 * transform(image)).abs().max() < 0.01, size


@pytest.mark.parametrize("name", ["ViT-B-32", "quickstart"])
def test_evaluation_pixels_are_those_of_the_model_s_own_preprocessing(name: str) -> None:
    side = open_clip.get_model_config(register_config(name))["vision_cfg"]["image_size"]
    transform = open_clip.image_transform(side, is_train=False, mean=(0,) * 3, std=(1,) * 3)
    for mode, size in [
        ("RGB", (300, 231)),
        ("L", (231, 300)),
        ("RGBA", (side, side)),
        ("P", (side - 1, 2 * side)),
    ]:
        data = encode(noise(*size).convert(mode))
        # webdataset and torchvision's image folders convert to RGB before the transform.
        expected = transform(Image.open(io.BytesIO(data)).convert("RGB"))
        ours = decode_for_evaluation(data, MAX_PIXELS, ImageSpec((side, side)))
        assert torch.equal(ours.float() / 255, expected), mode


def test_evaluation_of_a_very_long_image_does_not_fill_the_memory() -> None:
    image = Image.new("RGB", (2, 1_000_000), (9, 9, 9))
    with pytest.raises(BrokenSample, match="2 x 1000000"):
        decode_for_evaluation(image, MAX_PIXELS, ImageSpec((224, 224)))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_random_crop_resizes_its_box_as_pil(interpolation: Literal["bicubic", "bilinear"]) -> None:
    image, numbers = (
        noise(90, 60),
        torch.rand(22, generator=torch.Generator().manual_seed(0)).tolist().__getitem__,
    )
    box = draw_crop(90, 60, (0.2, 0.6), (0.75, 4 / 3), numbers)
    left, top, width, height = box
    expected = TF.resized_crop(
        image, top, left, height, width, [16, 24], InterpolationMode(interpolation)
    )
    pixels, spec = TF.pil_to_tensor(image), ImageSpec((16, 24), interpolation)
    difference = resize_crop(pixels, spec, box) - TF.pil_to_tensor(expected).int()
    assert difference.abs().max() <= 1
    assert difference.abs().float().mean() < 0.1


def test_random_crop_does_not_depend_on_the_layout_of_the_image() -> None:
    image = TF.pil_to_tensor(noise(90, 60))
    for interpolation in ("bicubic", "bilinear"):
        for number in range(20):
            uniform = torch.rand(22, generator=torch.Generator().manual_seed(number)).tolist()
            box = draw_crop(90, 60, (0.2, 1.0), (0.75, 4 / 3), uniform.__getitem__)
            left, top, width, height = box
            crop = image[None, :, top : top + height, left : left + width]
            expected = F.interpolate(
                crop, (16, 24), mode=interpolation, align_corners=False, antialias=True
            )[0]
            interleaved = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
            spec = ImageSpec((16, 24), interpolation)
            for each in (image, interleaved):
                found = resize_crop(each, spec, box)
                assert torch.equal(found, expected)
                assert found.permute(1, 2, 0).is_contiguous()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_pixels_are_those_of_pil(kind: str, mode: str) -> None:
    if mode == "CMYK" and kind != "JPEG":
        return
    data = encode(noise(70, 50).convert(mode), kind)
    expected = TF.pil_to_tensor(decode_image(data, MAX_PIXELS)).int()
    difference = decode_pixels(data, MAX_PIXELS) - expected
    assert difference.abs().max() <= 4
    assert difference.abs().float().mean() < 0.1


def test_crop_boxes_follow_area_and_ratio() -> None:
    numbers = torch.rand(2000, 22, generator=torch.Generator().manual_seed(1)).tolist()
    boxes = [draw_crop(300, 200, (0.3, 0.5), (0.75, 4 / 3), row.__getitem__) for row in numbers]
    areas = torch.tensor([w * h / 60_000 for _, _, w, h in boxes])
    ratios = torch.tensor([math.log(w / h) for _, _, w, h in boxes])
    assert 0.295 < areas.min() < 0.305
    assert 0.495 < areas.max() < 0.505
    assert abs(areas.mean() - 0.4) < 0.01
    assert abs(ratios.mean()) < 0.02
    assert abs(ratios.abs().max() - math.log(4 / 3)) < 0.02
    assert all(x >= 0 and y >= 0 and x + w <= 300 and y + h <= 200 for x, y, w, h in boxes)
    assert min(x for x, _, _, _ in boxes) == 0
    assert any(x + w == 300 for x, _, w, _ in boxes)


@pytest.mark.parametrize(
    ("size", "box"), [((1000, 10), (493, 0, 13, 10)), ((10, 1000), (0, 493, 10, 13))]
)
def test_crop_of_a_shape_that_never_fits_is_the_centre(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    assert draw_crop(*size, (0.9, 1.0), (0.75, 4 / 3), lambda column: 0.5) == box


@pytest.mark.parametrize(
    ("mode", "kind", "value", "expected"),
    [
        ("1", "PNG", 1, (255, 255, 255)),
        ("L", "PNG", 128, (128, 128, 128)),
        ("LA", "PNG", (128, 7), (128, 128, 128)),
        ("P", "PNG", 3, (128, 64, 32)),
        ("P", "GIF", 3, (128, 64, 32)),
        ("RGB", "PNG", (128, 64, 32), (128, 64, 32)),
        ("RGBA", "PNG", (128, 64, 32, 7), (128, 64, 32)),
        ("CMYK", "JPEG", (127, 191, 223, 0), (128, 64, 32)),
        ("HSV", None, (0, 255, 128), (128, 0, 0)),
        ("RGBa", None, (64, 32, 16, 128), (128, 64, 32)),
        ("I;16", "PNG", 0x8012, (128, 128, 128)),
        ("I;16", "PNG", 65_535, (255, 255, 255)),
        ("I;16", "PNG", 255, (1, 1, 1)),
        ("I;16N", None, 0x8012, (128, 128, 128)),
    ],
)
def test_every_mode_becomes_rgb(
    mode: str, kind: str | None, value: int | tuple[int, ...], expected: tuple[int, ...]
) -> None:
    source = Image.new(mode, (6, 4), value)
    if mode == "P":
        source.putpalette([0, 0, 0] * 3 + [128, 64, 32])
    image = decode_image(encode(source, kind) if kind else source, MAX_PIXELS)
    assert (image.mode, image.size) == ("RGB", (6, 4))
    pixel = image.getpixel((3, 2))
    assert isinstance(pixel, tuple)
    assert max(abs(a - b) for a, b in zip(pixel, expected, strict=True)) <= 1, pixel


def test_gray_of_16_bits_keeps_its_brightness() -> None:
    wide = np.random.default_rng(0).integers(0, 65_536, (64, 64)).astype(np.uint16)
    pixels = np.asarray(decode_image(encode(Image.fromarray(wide)), MAX_PIXELS))
    assert abs(pixels[..., 0] - wide / 257).max() <= 0.501
    half = np.asarray(decode_image(encode(Image.fromarray(wide // 2)), MAX_PIXELS))
    assert abs(half.mean() - pixels.mean() / 2) < 0.5


@pytest.mark.parametrize("mode", ["F", "I"])
def test_gray_without_a_known_range_is_broken(mode: str) -> None:
    with pytest.raises(BrokenSample, match=f"mode {mode} .*no known range"):
        decode_image(Image.new(mode, (6, 4)), MAX_PIXELS)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow cannot decode AVIF")
def test_avif_is_read() -> None:
    image = decode_image(encode(Image.new("RGB", (16, 16), (128, 64, 32)), "AVIF"), MAX_PIXELS)
    assert np.abs(np.asarray(image).mean((0, 1)) - (128, 64, 32)).max() < 3
    with pytest.raises(BrokenSample, match=r"16 x 16 pixels exceeds data.max_pixels=255"):
        decode_image(encode(image, "AVIF"), 255)


def test_palette_with_alpha_reads_without_a_warning() -> None:
    buffer = io.BytesIO()
    Image.new("P", (4, 4)).save(buffer, "PNG", transparency=b"\x00\x80\xff")
    assert decode_image(buffer.getvalue(), MAX_PIXELS).mode == "RGB"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it begins with b''"),
        (b"<!DOCTYPE html><html>", "it begins with b'<!DOCTYPE html><'"),
        (encode(noise(9, 9))[:12], "cannot be read as an image"),
        (encode(noise(9, 9), "TIFF"), "cannot be read as an image"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "it begins with b'%!PS-Adobe-3.0 E'",
        ),
        (bomb(), "DecompressionBombError|50000 x 50000"),
        (bomb(12_000), "144000000|12000 x 12000"),
        (encode(noise(40, 40), "JPEG")[:-200], "truncated"),
        (encode(noise(40, 40), "WEBP")[:100], "Error"),
    ],
)
def test_broken_image_says_why(data: bytes, reason: str) -> None:
    for decode in (decode_image, decode_pixels):
        with pytest.raises(BrokenSample) as error, breaks_sample():
            decode(data, MAX_PIXELS)
        assert " at 0x" not in str(error.value)
        assert "BytesIO" not in str(error.value)
    assert any(word in str(error.value) for word in reason.split("|")), error.value


def test_pixels_are_checked_before_decoding() -> None:
    with pytest.raises(BrokenSample, match=r"10 x 11 pixels exceeds data.max_pixels=100"):
        decode_image(encode(noise(10, 11)), 100)
    with pytest.raises(BrokenSample, match=r"10 x 11 pixels exceeds data.max_pixels=100"):
        decode_pixels(encode(noise(10, 11), "JPEG"), 100)


def test_image_keys_are_tried_in_order() -> None:
    assert find_image({"png": b"p", "jpg": b"j"}, "jpg;png") == b"j"
    with pytest.raises(BrokenSample, match=r"no image under webp;gif; the sample has png, jpg"):
        find_image({"png": b"p", "jpg": b"j"}, "webp;gif")


FIELDS = {
    "txt": b" a cat \n",
    "json": json.dumps(
        {
            "n": 3,
            "list": ["a", "b"],
            "none": None,
            "nan": math.nan,
            "infinite": [-math.inf],
            "true": True,
            "object": {"en": "a dog", "de": "ein Hund"},
        }
    ).encode(),
}


@pytest.mark.parametrize(
    ("template", "caption"),
    [
        ("{txt}", "a cat"),
        ("{json[n]}: {json[list][1]}", "3: b"),
        ("photo of {txt}", "photo of  a cat"),
        ("x", "x"),
        ("{json[nan]|txt}", "a cat"),
        ("{json[infinite][*]|json[none]|txt}", "a cat"),
        ("{json[object][de]}", "ein Hund"),
    ],
)
def test_template_is_filled(template: str, caption: str) -> None:
    assert fill_template(template, FIELDS) == caption


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{cap}", "KeyError: 'cap'"),
        ("{json[x]}", "KeyError"),
        ("{json[none]}", "null"),
        ("{json[list]}", "{json[list][0]}"),
        ("{json[list][2]}", "IndexError"),
        ("{json[nan]}", "LookupError: {json[nan]} is nan"),
        ("{json[infinite][0]}", "LookupError: {json[infinite][0]} is -inf"),
        ("{json[true]|txt}", "{json[true]} is a bool"),
        ("{json[object]|txt}", "{json[object]} is a dict"),
        ("{json}", "{json} is a dict"),
        ("", "is empty"),
        ("{}", ""),
    ],
)
def test_template_that_cannot_be_filled_names_the_members(template: str, reason: str) -> None:
    with pytest.raises(BrokenSample, match=r"the sample has txt, json") as error:
        fill_template(template, FIELDS)
    assert reason in str(error.value)


def test_json_is_parsed_only_when_a_template_asks() -> None:
    members = {"txt": b"fine", "json": b"{broken"}
    assert fill_template("{txt}", members) == "fine"
    with pytest.raises(BrokenSample, match="JSONDecodeError"):
        fill_template("{json[n]}", members)


def test_captions_follow_their_weights() -> None:
    weights = {"{txt}": 1.0, "never": 0.0, "b": 2.0, "c": 1.0}
    counts = Counter(pick_caption(weights, FIELDS, (i + 0.5) / 1000) for i in range(1000))
    assert counts == {"a cat": 250, "b": 500, "c": 250}
    assert pick_caption(weights, FIELDS, 0.0) == "a cat"
    assert pick_caption({**weights, "also never": 0.0}, FIELDS, 1 - 2**-24) == "c"


def test_read_all_gives_every_rank_its_samples_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        if index == 7:
            return {**sample, "png": b"?"}
        return {name: data for name, data in sample.items() if index != 11 or name != "json"}

    manifest = write_shards(tmp_path, [20, 30], change)
    for rank in range(3):
        read = list(read_all(manifest, settings(), SPEC, rank, 3, "{json[label]}"))
        assert [index for _, _, index in read] == [
            i for i in range(rank, 50, 3) if i not in (7, 11)
        ]
        for image, label, index in read:
            assert image[:, 3, 3].tolist() == [index, 0, 7]
            assert label == f"label {index % 3}"
    for name in ("00000.tar/0007", "00000.tar/0011"):
        assert sum(name in message for message in caplog.messages) == 1
    labels = read_labels(manifest, "{json[label]}")
    assert labels == [None if index == 11 else f"label {index % 3}" for index in range(50)]


def test_read_all_of_a_truncated_shard_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_shards(tmp_path, [10, 10])
    path = tmp_path / "00000.tar"
    path.write_bytes(path.read_bytes()[:9000])
    read = [index for _, _, index in read_all(manifest, settings(), SPEC, 0, 1, "{txt}")]
    assert read[-10:] == list(range(10, 20))
    assert len(read) < 20
    assert caplog.text.count("00000.tar/0000: the shard is damaged") == 1
