"""Initial weights, partly trained towers, and the preprocessing that belongs to the weights."""

import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import yaml
from huggingface_hub import constants
from open_clip.tokenizer import SimpleTokenizer

from disco_ds.checkpoints.export import export_run
from disco_ds.checkpoints.weights import build_from, read_weights
from disco_ds.config import ModelSettings, load_config
from disco_ds.distributed.comm import RefusedError
from disco_ds.models.clip import (
    build_model,
    build_tokenizer,
    read_architecture,
    read_preprocessing,
    register_config,
    trained_sides,
)
from disco_ds.models.pretrained import download_weights, read_overrides, warn_of_random_tower
from disco_ds.run import run_training
from helpers.models import write_resnet
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, TINY
from helpers.trained import write_run

TIMM = {
    "timm_model_name": "test_vit",
    "timm_model_pretrained": False,
    "timm_pool": "",
    "timm_proj": "linear",
}


def build(name: str, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return build_model(ModelSettings(name=name, **settings))


def write_timm(folder: Path) -> str:
    path = folder / "small-timm.json"
    text_cfg = TINY["text_cfg"] | {"vocab_size": BPE_SIZE}
    path.write_text(
        json.dumps(TINY | {"vision_cfg": TIMM | {"image_size": 160}, "text_cfg": text_cfg})
    )
    return str(path)


# Weights


def test_a_tag_of_another_model_names_this_models_tags() -> None:
    with pytest.raises(
        ValueError,
        match=r"tag of ViT-B-32; did you mean laion2b_s34b_b79k\?.*its tags: openai, ",
    ):
        build("ViT-B-32", pretrained=Path("laion2b_s34b_b88k"))


def test_a_tag_that_cannot_be_fetched_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"pretrained=laion2b_s34b_b79k,.*not be fetched") as said:
        download_weights("ViT-B-32", ModelSettings(pretrained=Path("laion2b_s34b_b79k")))
    assert "\n" not in str(said.value)
    with pytest.raises(
        RefusedError, match=r"model.*pretrained=laion2b_s34b_b79k.*could not be fetched"
    ):
        run_training(
            load_config(
                recipe(tmp_path),
                ["model={name: ViT-B-32, pretrained: laion2b_s34b_b79k}", "steps=1"],
            )
        )
    assert not (tmp_path / "runs").exists(), "the run must be refused before any work"


def test_a_folder_gives_weights_and_preprocessing(tiny: str, tmp_path: Path) -> None:
    source = build(tiny, seed=1)
    folder = tmp_path / "release"
    folder.mkdir()
    torch.save(source.state_dict(), folder / "open_clip_pytorch_model.bin")
    about = {
        "model_cfg": TINY,
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3, "size": 64},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    model = build(tiny, pretrained=folder)
    assert torch.equal(model.visual.proj, source.visual.proj)
    look = read_preprocessing(model)
    assert look.mean == (0.5, 0.5, 0.5)
    assert look.std == (0.25, 0.25, 0.25)
    assert look.size == (32, 32), (
        "the size must be that of the tower, not of the weights' preprocessing"
    )


def test_the_name_of_a_folder_does_not_choose_the_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "like-siglip"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(
        json.dumps(
            {"model_cfg": {**TINY, "text_cfg": {**TINY["text_cfg"], "vocab_size": BPE_SIZE}}}
        )
    )
    settings = ModelSettings(name=str(folder))
    model = build_model(settings)
    assert isinstance(build_tokenizer(settings, model), SimpleTokenizer)
    write_run(tmp_path / "run", model, str(folder))
    shutil.rmtree(folder)
    weights = read_weights(tmp_path / "run")
    assert isinstance(build_tokenizer(weights.settings, build_from(weights)), SimpleTokenizer)


@torch.no_grad()
def test_a_timm_tower_of_another_image_size_is_read_and_its_open_clip_export_refused(
    tmp_path: Path,
) -> None:
    name = write_timm(tmp_path)
    model: Any = build(name, image_size=96).eval()
    assert len(model.visual.trunk.pos_embed[0]) < len(build(name).visual.trunk.pos_embed[0])
    write_run(tmp_path / "run", model, name, image_size=96)
    read: Any = build_from(read_weights(tmp_path / "run"))
    images = torch.rand(2, 3, 96, 96)
    assert torch.equal(read.encode_image(images), model.encode_image(images))
    with pytest.raises(ValueError, match=r"test_vit for images of 160 x 160 .* 96 x 96"):
        export_run(tmp_path / "run", tmp_path / "export")


def test_image_size_that_the_tower_does_not_take_is_refused_at_the_start(tmp_path: Path) -> None:
    """The tower of timm needs a multiple of 16, the quickstart's one needs 32."""
    for name, size in ((write_timm(tmp_path), 100), ("quickstart", 40)):
        changes = [
            f"model={{name: {name}, image_size: {size}}}",
            "data.source=synthetic",
            "data.shards=null",
        ]
        with pytest.raises(RefusedError, match=rf"model.image_size.*{size} x {size}"):
            run_training(load_config(recipe(tmp_path), changes))
        assert not (tmp_path / "runs").exists(), "the run must be refused before any work"


def test_weights_of_a_timm_tower_are_resized_to_the_image_size(tmp_path: Path) -> None:
    name = write_timm(tmp_path)
    source = build(name, seed=1)
    torch.save(source.state_dict(), tmp_path / "saved.pt")
    model = build(name, image_size=96, pretrained=tmp_path / "saved.pt")
    source.visual.set_input_size(96)
    assert torch.equal(model.visual.trunk.pos_embed, source.visual.trunk.pos_embed)
    assert read_preprocessing(model).size == (96, 96)


def test_a_folder_without_a_model_config_is_refused(tmp_path: Path) -> None:
    for text in ("{", "{}"):
        (tmp_path / "open_clip_config.json").write_text(text)
        with pytest.raises(ValueError, match="is not a complete open_clip folder: "):
            build(str(tmp_path))


@pytest.mark.parametrize("kind", ["whole", "tower"])
def test_an_image_tower_of_its_own_leaves_the_text_tower_alone(
    kind: str, tiny: str, tmp_path: Path
) -> None:
    source = build(tiny, seed=1)
    torch.save((source if kind == "whole" else source.visual).state_dict(), tmp_path / "tower.pt")
    model, plain = build(tiny, pretrained_image=tmp_path / "tower.pt"), build(tiny)
    for name, value in model.state_dict().items():
        expected = source if name.startswith("visual.") else plain
        assert torch.equal(value, expected.state_dict()[name]), name


def test_a_trunk_of_timm_is_loaded_from_timms_own_file(tmp_path: Path) -> None:
    name = write_timm(tmp_path)
    source = build(name, seed=1)
    torch.save(
        source.visual.trunk.state_dict() | {"head.weight": torch.zeros(2, 2)}, tmp_path / "trunk.pt"
    )
    model = build(name, pretrained_image=tmp_path / "trunk.pt")
    assert torch.equal(model.visual.trunk.pos_embed, source.visual.trunk.pos_embed)


def test_an_image_tower_that_does_not_fit_is_refused(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "tower.pt"
    torch.save({"proj": build(tiny).visual.proj}, path)
    with pytest.raises(
        ValueError,
        match=r"model.pretrained_image: .*tower.pt does not fit: .* lacks \d+ tensors of the tower",
    ):
        build(tiny, pretrained_image=path)
    with pytest.raises(ValueError, match=r"model.pretrained_image: no file nowhere.pt"):
        build(tiny, pretrained_image=Path("nowhere.pt"))
    with pytest.raises(ValueError, match=r"model.pretrained_image=timm: the image tower of tiny"):
        build(tiny, pretrained_image=Path("timm"))


def test_a_locked_tower_without_weights_is_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for settings, warned in (
        ({"lock_image": True}, "model.lock_image freezes"),
        ({"lock_text": True, "pretrained_image": tmp_path}, "model.lock_text freezes"),
        ({"lock_image": True, "pretrained_image": tmp_path}, ""),
        ({"lock_text": True, "pretrained": tmp_path}, ""),
        ({}, ""),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_random_tower(ModelSettings(**settings))
        assert warned in caplog.text
        assert bool(caplog.text) == bool(warned)


def test_tokenizer_that_cannot_be_loaded_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError('HTTPFileSystem requires "requests" and "aiohttp" to be installed')

    monkeypatch.setattr("fsspec.open", fail)
    path = tmp_path / "our-SigLIP2.json"
    path.write_text(json.dumps(TINY))
    settings = ModelSettings(name=str(path))
    with pytest.raises(ValueError, match=r"our-SigLIP2.json.*text_cfg.hf_tokenizer_name") as said:
        build_tokenizer(settings, build(str(path)))
    assert "\n" not in str(said.value)
    path.write_text(
        json.dumps(TINY | {"text_cfg": TINY["text_cfg"] | {"hf_tokenizer_name": str(tmp_path)}})
    )
    with pytest.raises(ValueError, match=r"our-SigLIP2.json.*text_cfg.hf_tokenizer_name"):
        build_tokenizer(settings, build(str(path)))


# Partly trained towers


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("side", ["image", "text"])
def test_unlocked_layers_are_those_of_open_clip(side: str, layers: int, tiny: str) -> None:
    model = build(tiny, **{f"lock_{side}": True}, unlocked_layers=layers)
    theirs = open_clip.create_model(register_config(tiny))
    getattr(theirs, f"lock_{side}_tower")(layers)
    names = {name for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    } == names
    assert trained_sides(model) == {"image": True, "text": True}, (
        "a partly trained tower must count as trained"
    )


def test_a_part_without_a_trained_parameter_runs_in_eval_mode(tiny: str) -> None:
    image = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    model = build(tiny, lock_image=True, patch_dropout=0.5)
    model.transformer.resblocks[0].add_module("drop", torch.nn.Dropout(0.5))
    for _ in range(2):
        assert torch.equal(model(image=image)[0], model(image=image)[0])
        assert not any(module.training for module in model.visual.modules())
        assert model.transformer.resblocks[0].drop.training
        model.eval().train()
    part = build(tiny, lock_image=True, unlocked_layers=2, patch_dropout=0.5)
    blocks = part.visual.transformer.resblocks
    assert [block.training for block in blocks] == [False, True]
    assert part.visual.patch_dropout.training, (
        "patch dropout must stay active for the trained layers"
    )
    assert not part.eval().visual.training
    plain = build(tiny)
    assert all(module.training for module in plain.modules())


def test_unlocked_layers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.unlocked_layers needs a locked tower"):
        ModelSettings(unlocked_layers=1)
    resnet = write_resnet(tmp_path)
    if open_clip.__version__ < "4":  # later releases can divide a ResNet
        with pytest.raises(
            ValueError, match=r"model.unlocked_layers=1: .*partial locking not currently supported"
        ):
            build(resnet, lock_image=True, unlocked_layers=1)


# Preprocessing and activation


def test_size_preprocessing_and_activation_are_overridden_as_in_open_clip(tiny: str) -> None:
    look: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    look |= {"interpolation": "bilinear", "resize_mode": "squash"}
    own = {"image_mean": look["mean"], "image_std": look["std"], **dict(list(look.items())[2:])}
    model = build(tiny, image_size=48, quick_gelu=True, **own)
    theirs = open_clip.create_model(
        register_config(tiny), force_image_size=48, force_quick_gelu=True, force_preprocess_cfg=look
    )
    assert open_clip.get_model_preprocess_cfg(model) == open_clip.get_model_preprocess_cfg(theirs)
    assert read_preprocessing(model).size == (48, 48)
    theirs.load_state_dict(model.state_dict() | {"logit_scale": torch.tensor(math.log(1 / 0.07))})
    image = torch.rand(2, 3, 48, 48)
    torch.testing.assert_close(model.eval().encode_image(image), theirs.eval().encode_image(image))
    assert read_architecture(ModelSettings(name=tiny, image_size=48, quick_gelu=True))["quick_gelu"]


@pytest.mark.slow
def test_export_and_evaluation_carry_the_preprocessing(tmp_path: Path) -> None:
    changes = {
        "image_size": 48,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "interpolation": "bilinear",
        "quick_gelu": True,
    }
    path = recipe(tmp_path)
    tree = yaml.safe_load(path.read_text())
    path.write_text(
        yaml.safe_dump(
            tree | {"steps": 1, "model": tree["model"] | changes, "log": {"tensorboard": False}}
        )
    )
    run = run_training(load_config(path))
    weights = read_weights(run)
    look = read_preprocessing(build_from(weights))
    assert (look.size, look.mean, look.std) == ((48, 48), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert look.interpolation == "bilinear"
    assert weights.architecture["quick_gelu"]
    theirs: Any = open_clip.create_model(
        f"local-dir:{export_run(run, tmp_path / 'export', layout='open_clip')}"
    )
    assert read_preprocessing(theirs) == look
    assert "LOCAL_RANK" not in os.environ


def test_locked_tower_keeps_the_activations_of_its_norms(tmp_path: Path) -> None:
    """timm's BatchNormAct2d contains the activation, so freezing the norm must not drop the activation."""
    vision = {"timm_model_name": "mobilenetv2_050", "timm_pool": "avg", "image_size": 32}
    path = tmp_path / "mobile.json"
    path.write_text(json.dumps(TINY | {"vision_cfg": vision}))
    image = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    locked, plain = (build(str(path), lock_image=lock).eval() for lock in (True, False))
    assert torch.equal(locked(image=image)[0], plain(image=image)[0])
    assert torch.equal(locked(image=image)[0], locked.train()(image=image)[0])


def test_timms_weights_bring_their_preprocessing(tmp_path: Path) -> None:
    vision = {"timm_model_name": "vit_tiny_patch16_224", "image_size": 224}
    path = tmp_path / "vit.json"
    path.write_text(json.dumps(TINY | {"vision_cfg": vision}))
    settings = ModelSettings(name=str(path), pretrained_image=Path("timm"))
    assert read_overrides(register_config(str(path)), settings)["mean"] == (0.5, 0.5, 0.5)
