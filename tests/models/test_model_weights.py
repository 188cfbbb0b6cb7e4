"""Model weights, keys and configs, including files that do not fit."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import nn
from torchvision import transforms

from disco_ds.models.clip import read_preprocessing, read_text_size
from disco_ds.models.convnet import ConvNet
from helpers.models import build, one_batch, write_resnet
from helpers.towers import IMAGE_SIZE, TINY

# Weights


def test_state_dict_has_open_clips_keys_and_loads_there(tiny: str, tmp_path: Path) -> None:
    model = build(tiny, initial_bias=-10.0, token_embedding_std=0.3).eval()
    path = tmp_path / "saved.pt"
    torch.save(model.state_dict(), path)
    theirs = open_clip.create_model(
        Path(tiny).stem, pretrained=str(path), nonscalar_logit_scale=True, init_logit_bias=0.0
    ).eval()
    assert list(model.state_dict()) == list(theirs.state_dict())
    image, text = one_batch()
    preprocessing = read_preprocessing(model)
    pixels = transforms.Normalize(preprocessing.mean, preprocessing.std)(image.float() / 255)
    rows, columns, scale, bias = model(image, text)
    torch.testing.assert_close(
        rows, theirs.encode_image(pixels, normalize=True), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        columns, theirs.encode_text(text, normalize=True), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(scale, theirs.logit_scale.exp())
    assert torch.equal(bias, theirs.logit_bias)


@pytest.mark.parametrize("scalar", [False, True])
def test_pretrained_weights_are_loaded_over_every_option(
    scalar: bool, tiny: str, tmp_path: Path
) -> None:
    source = build(tiny, seed=1, initial_scale=33.0).eval()
    state = source.state_dict()
    if scalar:  # as every published open_clip model has it
        state["logit_scale"] = state["logit_scale"].squeeze()
    path = tmp_path / "saved.pt"
    torch.save(state, path)
    model = build(tiny, seed=2, pretrained=path, token_embedding_std=3.0, initial_scale=5.0).eval()
    assert model.logit_scale.shape == (1,)
    for got, true in zip(model(*one_batch())[:3], source(*one_batch())[:3], strict=True):
        assert torch.equal(got, true)


@pytest.mark.parametrize("wants_bias", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_with_and_without_a_bias_fit_every_loss(
    has_bias: bool, wants_bias: bool, tiny: str, tmp_path: Path
) -> None:
    source = build(tiny, seed=1, initial_bias=-7.0 if has_bias else None).eval()
    path = tmp_path / "saved.pt"
    torch.save(source.state_dict(), path)
    model = build(tiny, pretrained=path, initial_bias=-10.0 if wants_bias else None).eval()
    *got, bias = model(*one_batch())
    for value, true in zip(got, source(*one_batch())[:3], strict=True):
        assert torch.equal(value, true)
    assert ("logit_bias" in model.state_dict()) == wants_bias
    assert (bias is None) if not wants_bias else bias.item() == (-7.0 if has_bias else -10.0)


@pytest.mark.parametrize(
    ("start", "loads", "expected"),
    [
        ({"initial_bias": -10.0}, False, (math.exp(3), -4.0)),
        ({}, False, (math.exp(3), None)),
        ({"initial_bias": -10.0, "learns_scale": False}, False, (10.0, -4.0)),
        ({"initial_bias": -10.0}, True, (33.0, -7.0)),
        # A constant scale comes from the loss, even if the weights contain another one.
        ({"learns_scale": False}, True, (10.0, None)),
    ],
)
def test_scale_and_bias_start_at_the_weights_else_at_the_config_else_at_the_loss(
    start: dict[str, Any],
    loads: bool,
    expected: tuple[float, float | None],
    tiny: str,
    tmp_path: Path,
) -> None:
    weights = tmp_path / "saved.pt"
    torch.save(build(tiny, initial_scale=33.0, initial_bias=-7.0).state_dict(), weights)
    path = tmp_path / "starts.json"
    path.write_text(json.dumps(TINY | {"init_logit_scale": 3.0, "init_logit_bias": -4}))
    _, _, scale, bias = build(
        str(path), initial_scale=10.0, pretrained=weights if loads else None, **start
    )()
    assert scale.item() == pytest.approx(expected[0])
    assert (None if bias is None else bias.item()) == expected[1]


def test_pretrained_missing_file_is_named(tiny: str, tmp_path: Path) -> None:
    for value in (tmp_path / "missing.pt", tmp_path, Path("laion2b_s34b_b79k")):
        with pytest.raises(
            ValueError, match=f"model.pretrained: {value} is not a file, a folder with weights"
        ):
            build(tiny, pretrained=value)


@pytest.mark.parametrize(
    "kind",
    [
        "other keys",
        "other shape",
        "one missing",
        "empty",
        "not weights",
        "a list",
    ],
)
def test_pretrained_that_does_not_fit_is_refused(kind: str, tiny: str, tmp_path: Path) -> None:
    state = build(tiny).state_dict()
    path = tmp_path / "weights.pt"
    contents = {
        "other keys": {"a": torch.zeros(1)},
        "other shape": state | {"text_projection": torch.zeros(3, 3)},
        "one missing": {key: value for key, value in state.items() if key != "text_projection"},
        "a list": [1, 2],
    }
    if kind in contents:
        torch.save(contents[kind], path)
    else:
        path.write_bytes(b"" if kind == "empty" else b"no weights at all")
    with pytest.raises(ValueError, match=r"model .*tiny.json: open_clip could not build it"):
        build(tiny, pretrained=path)
    assert logging.root.manager.disable == logging.NOTSET


# Names


def test_quickstart_model_builds_without_batch_statistics(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = build("quickstart")
    assert not caplog.records
    assert not [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert isinstance(model.visual.trunk, ConvNet)
    assert model(torch.zeros(2, 3, IMAGE_SIZE, IMAGE_SIZE))[0].shape == (2, 128)
    assert sum(p.numel() for p in model.visual.parameters()) == pytest.approx(0.5e6, rel=0.1)
    assert read_text_size(model) == (20, 49408)


def test_gradient_of_the_quickstart_model_does_not_depend_on_the_cut() -> None:
    model = build("quickstart").train()
    image = one_batch(8)[0]
    whole = model(image)[0]
    parts = torch.cat([model(part)[0] for part in image.chunk(4)])
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_batch_norm_model_is_warned_of_naming_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = build(write_resnet(tmp_path))
    count = sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert count > 3
    (record,) = caplog.records
    assert f"visual.bn1 and the other BatchNorm layers ({count} in total)" in record.getMessage()


def test_model_without_batch_norm_is_not_warned_of(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build(tiny)
    assert not caplog.records


def test_unknown_model_lists_the_nearest_and_ours() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown model 'ViT-B/32'; did you mean ViT-B-32\?; .* disco_ds \(quickstart",
    ):
        build("ViT-B/32")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "unknown model .*odd.json"),
        ("{", "odd.json is not valid JSON"),
        ("{}", "open_clip could not build it"),
        (json.dumps(TINY | {"vision_cfg": {"layrs": 3}}), "layrs"),
        pytest.param(
            json.dumps(TINY | {"text_cfg": {"width": 30, "heads": 4, "layers": 1}}),
            "open_clip could not build it",
        ),
    ],
)
def test_model_config_file_malformed_is_refused(
    text: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        build(str(path))


def test_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "captioner.json"
    path.write_text(
        json.dumps(
            TINY
            | {
                "custom_text": True,
                "multimodal_cfg": {"width": 32, "heads": 2, "layers": 1, "context_length": 12},
            }
        )
    )
    with pytest.raises(ValueError, match="disco_ds trains two-tower CLIP models"):
        build(str(path))
