"""Loading weights into models: keys, configs, preprocessing, and files that do not fit."""

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

from disco_ds.config import ModelSettings
from disco_ds.models.clip import (
    read_architecture,
    read_preprocessing,
    read_text_size,
    register_config,
)
from disco_ds.models.convnet import ConvNet
from disco_ds.models.pretrained import find_preprocessing
from helpers.models import build, one_batch, write_resnet
from helpers.towers import IMAGE_SIZE, TINY

# Weights


def test_state_dict_has_open_clips_keys_and_loads_there(tiny: str, tmp_path: Path) -> None:
    model = build(tiny, initial_bias=-10.0, token_embedding_std=0.3).eval()
    path = tmp_path / "saved.pt"
    torch.save(model.state_dict(), path)
    theirs = open_clip.create_model(
        register_config(tiny), pretrained=str(path), nonscalar_logit_scale=True, init_logit_bias=0.0
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
    if scalar:  # published open_clip models have a 0-d scale
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


def test_config_without_a_start_for_scale_and_bias_may_contain_null(tmp_path: Path) -> None:
    path = tmp_path / "null.json"
    path.write_text(json.dumps(TINY | {"init_logit_scale": None, "init_logit_bias": None}))
    _, _, scale, bias = build(str(path), initial_scale=10.0, initial_bias=-7.0)()
    assert scale.item() == pytest.approx(10.0)
    assert bias.item() == -7.0


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
    with pytest.raises(
        ValueError, match=r"model.pretrained: .*weights.pt does not fit model .*tiny.json"
    ) as said:
        build(tiny, pretrained=path)
    assert "\n" not in str(said.value)
    assert "\x1b" not in str(said.value)
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_wrappers_of_trainers_are_removed(wrapper: str, tiny: str, tmp_path: Path) -> None:
    source = build(tiny, seed=1)
    path = tmp_path / "saved.pt"
    state = {f"module._orig_mod.{key}": x for key, x in source.state_dict().items()}
    torch.save({wrapper: state, "epoch": 3}, path)
    model = build(tiny, pretrained=path)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    tower = build(tiny, pretrained_image=path)
    assert torch.equal(tower.visual.proj, source.visual.proj)  # type: ignore[operator, union-attr]


def test_weights_that_need_pickle_are_refused(tiny: str, tmp_path: Path) -> None:
    torch.save({"state_dict": build(tiny).state_dict(), "args": Path("a")}, tmp_path / "saved.pt")
    with pytest.raises(ValueError, match=r"saved.pt does not fit .*weights_only=True"):
        build(tiny, pretrained=tmp_path / "saved.pt")


@pytest.mark.parametrize("custom_text", [False, True])
def test_text_positions_of_another_context_length_keep_their_numbers(
    custom_text: bool, tmp_path: Path
) -> None:
    def write(length: int, width: int = 32) -> str:
        path = tmp_path / f"{length}-{width}.json"
        text_cfg = TINY["text_cfg"] | {"context_length": length, "width": width}
        path.write_text(json.dumps(TINY | {"text_cfg": text_cfg, "custom_text": custom_text}))
        return str(path)

    source = build(write(16), seed=1)
    torch.save(source.state_dict(), path := tmp_path / "saved.pt")
    name = "text.positional_embedding" if custom_text else "positional_embedding"
    positions = source.get_parameter(name)
    short = build(write(8), pretrained=path).get_parameter(name)
    assert torch.equal(short, positions[:8])
    long = build(write(20), pretrained=path).get_parameter(name)
    assert torch.equal(long[:16], positions)
    assert 0.005 < long[16:].std() < 0.015, (
        "new positions must be initialized as in open_clip, with a std of 0.01"
    )
    with pytest.raises(ValueError, match="does not fit model"):
        build(write(16, 64), pretrained=path)


# Preprocessing and activation of the weights


def test_local_weights_have_the_preprocessing_of_the_models_tags(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for name, mean, std in (("MobileCLIP-S1", 0.0, 1.0), ("ViT-B-16-SigLIP", 0.5, 0.5)):
        look, warning = find_preprocessing(name, ModelSettings(name=name, pretrained=path))
        assert (look["mean"], look["std"]) == ((mean,) * 3, (std,) * 3)
        assert warning is not None
        assert f"({mean}, " in warning
    for name in ("ViT-L-14", "quickstart"):
        look, warning = find_preprocessing(name, ModelSettings(name=name, pretrained=path))
        assert not look
        assert warning is not None
        assert "set model.image_mean" in warning


def test_a_file_beside_an_open_clip_config_has_its_preprocessing(tmp_path: Path) -> None:
    about = {"model_cfg": TINY, "preprocess_cfg": {"mean": [0.1] * 3}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(about))
    for path in (tmp_path, tmp_path / "open_clip_model.safetensors"):
        look, warning = find_preprocessing("ViT-L-14", ModelSettings(pretrained=path))
        assert look == {"mean": [0.1] * 3, "quick_gelu": False}
        assert warning is None


def test_the_activation_is_that_of_the_weights(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = {"name": "ViT-B-32", "pretrained": Path("openai")}
    assert read_architecture(ModelSettings(**openai))["quick_gelu"] is True
    laion = {"name": "ViT-B-32", "pretrained": Path("laion2b_s34b_b79k")}
    assert not read_architecture(ModelSettings(**laion)).get("quick_gelu")
    for settings in (openai | {"quick_gelu": False}, laion | {"quick_gelu": True}):
        with pytest.raises(ValueError, match=r"model.quick_gelu=.*, but the weights .* remove"):
            read_architecture(ModelSettings(**settings))
    about = {"model_cfg": TINY | {"quick_gelu": True}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(about))
    monkeypatch.chdir(tmp_path)
    assert not read_architecture(ModelSettings(**laion)).get("quick_gelu"), (
        "a tag must not be looked up in open_clip_config.json of the working directory"
    )
    source = build(tiny, quick_gelu=True).eval()
    extra = {"input_resolution": torch.tensor(32)}  # as in OpenAI's files
    torch.save(source.state_dict() | extra, tmp_path / "open_clip_model.pth")
    model = build(tiny, pretrained=tmp_path).eval()
    assert "uses QuickGELU=True, as its weights do" in caplog.text
    batch = one_batch()
    for got, true in zip(model(*batch)[:2], source(*batch)[:2], strict=True):
        assert torch.equal(got, true)


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


def test_model_config_file_does_not_replace_a_model_of_open_clip(tmp_path: Path) -> None:
    before = open_clip.get_model_config("ViT-B-32")
    path = tmp_path / "ViT-B-32.json"
    path.write_text(json.dumps(TINY))
    assert read_architecture(ModelSettings(name=str(path))) == TINY
    assert read_architecture(ModelSettings(name="ViT-B-32")) == before


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
