"""Parameter groups of the optimizer for small models of each kind: weight decay, learning rates, layers and Muon."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import nn

from disco_ds.config import ModelSettings, OptimSettings
from disco_ds.models.clip import build_model
from disco_ds.models.param_groups import number_layers, parameter_groups
from helpers.towers import write_tiny


def build(tmp_path: Path, **options: Any) -> Any:
    settings = {name: options.pop(name) for name in list(options) if name.startswith("lock")}
    return build_model(ModelSettings(name=str(write_tiny(tmp_path)), **settings), **options)


def settings(**values: Any) -> OptimSettings:
    return OptimSettings.model_validate({"weight_decay": 0.2, **values})


def test_parameter_groups_decay_matrices_only(tmp_path: Path) -> None:
    model = build(tmp_path, initial_bias=-10.0)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, settings())
    decays = {group["name"]: group["weight_decay"] for group in groups}
    assert decays == {"matrices": 0.2, "vectors": 0.0, "scale": 0.0}
    members = {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert members["scale"] == {"logit_scale", "logit_bias"}
    assert {
        "visual.proj",
        "text_projection",
        "token_embedding.weight",
        "visual.conv1.weight",
    } <= members["matrices"]
    assert {"ln_final.weight", "ln_final.bias", "visual.class_embedding"} <= members["vectors"]
    assert {"positional_embedding", "visual.positional_embedding"} <= members["vectors"]
    assert not [name for name in members["matrices"] if name.endswith("bias") or ".ln_" in name]
    assert sum(len(group["params"]) for group in groups) == len(names), (
        "no parameter may be in two groups"
    )
    assert set().union(*members.values()) == set(names.values())


def test_parameter_groups_hold_no_empty_group_and_nothing_frozen(tmp_path: Path) -> None:
    model = build(tmp_path, lock_image=True, learns_scale=False)
    groups = parameter_groups(model, settings())
    assert [group["name"] for group in groups] == ["matrices", "vectors"]
    assert all(p.requires_grad for group in groups for p in group["params"])
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("positional_embedding"):
            parameter.requires_grad_(False)
    assert [group["name"] for group in parameter_groups(model, settings())] == ["matrices"]


class Block(nn.Module):
    """Parameters with the names and shapes that BEiT, MobileCLIP, T5 and timm's attention pooling use."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.relative_attention_bias = nn.Embedding(9, 2)
        self.gamma = nn.Parameter(torch.zeros(8, 1, 1))
        self.latent = nn.Parameter(torch.zeros(1, 1, 8))
        self.position_embeddings = nn.Embedding(9, 2)
        self.token = nn.Parameter(torch.zeros(2, 8))
        self.proj = nn.Linear(8, 8, bias=False)

    def no_weight_decay(self) -> set[str]:
        return {"token"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_vectors_positions_and_what_a_module_names_have_no_decay(name: str) -> None:
    model: Any = nn.Module()
    model.visual = nn.Module()
    model.visual.blocks = nn.ModuleList([Block()])
    found = table(model, settings(name=name))
    decayed = {name for name, (_, decay) in found.items() if decay}
    assert decayed == {"visual.blocks.0.proj.weight"}
    groups = parameter_groups(model, settings(name=name))
    assert [x for group in groups if group["muon"] for x in group["names"]] == (
        ["visual.blocks.0.proj.weight"] if name == "muon" else []
    )


def table(model: Any, optim: OptimSettings) -> dict[str, tuple[float, float]]:
    """Return name of a parameter -> (factor of its learning rate, weight decay)."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, optim)
    assert len({group["name"] for group in groups}) == len(groups)
    return {
        names[id(p)]: (group["lr_factor"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


def test_tower_has_its_own_rate_and_decay(tmp_path: Path) -> None:
    found = table(build(tmp_path), settings(image={"lr_factor": 0.1, "weight_decay": 0.05}))
    assert found["visual.proj"] == (0.1, 0.05)
    assert found["visual.class_embedding"] == (0.1, 0.0)
    assert found["text_projection"] == (1.0, 0.2)
    assert found["ln_final.bias"] == found["logit_scale"] == (1.0, 0.0)


def test_layers_of_a_tower_slow_down_towards_its_input(tmp_path: Path) -> None:
    model = build(tmp_path)
    found = table(
        model, settings(image={"layer_decay": 0.5}, text={"lr_factor": 3.0, "layer_decay": 0.1})
    )
    blocks = len(model.visual.transformer.resblocks)
    assert found["visual.proj"][0] == found["visual.ln_post.weight"][0] == 1.0
    assert [
        found[f"visual.transformer.resblocks.{k}.attn.in_proj_weight"][0] for k in range(blocks)
    ] == [0.5 ** (blocks - k) for k in range(blocks)]
    stem = ("conv1.weight", "class_embedding", "positional_embedding", "ln_pre.weight")
    assert {found[f"visual.{name}"][0] for name in stem} == {0.5 ** (blocks + 1)}
    assert found["text_projection"][0] == 3.0
    layers = len(model.transformer.resblocks)
    assert found["token_embedding.weight"][0] == found["positional_embedding"][0]
    assert found["token_embedding.weight"][0] == pytest.approx(3.0 * 0.1 ** (layers + 1))
    assert found["logit_scale"] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "side", "stem", "block", "layer", "last"),
    [
        ("RN50", "image", "visual.conv1.weight", "visual.layer2.0.conv1.weight", 4, 17),
        (
            "ViT-B-16-SigLIP",
            "image",
            "visual.trunk.patch_embed.proj.weight",
            "visual.trunk.blocks.3.norm1.weight",
            4,
            13,
        ),
        (
            "ViT-B-16-SigLIP",
            "text",
            "text.token_embedding.weight",
            "text.transformer.resblocks.11.ln_1.bias",
            12,
            13,
        ),
        (
            "convnext_base",
            "image",
            "visual.trunk.stem.0.weight",
            "visual.trunk.stages.0.blocks.0.gamma",
            1,
            37,
        ),
    ],
)
def test_layers_of_models_as_they_are(
    name: str, side: str, stem: str, block: str, layer: int, last: int
) -> None:
    with torch.device("meta"):
        model = open_clip.create_model(name, device="meta")
    layers = number_layers(model, side)
    assert (layers[stem], layers[block], max(layers.values())) == (0, layer, last)


class Towers(torch.nn.Module):
    """A text tower from transformers, with open_clip's names, and an image tower with numbered layers."""

    def __init__(self, text: torch.nn.Module) -> None:
        super().__init__()
        self.text = torch.nn.ModuleDict({"transformer": text})
        blocks = [torch.nn.ModuleList([torch.nn.Linear(4, 4)]) for _ in range(3)]
        layers = [torch.nn.ModuleDict({"blocks": each}) for each in blocks]
        parts = {"conv1": torch.nn.Linear(4, 4), "layers": torch.nn.ModuleList(layers)}
        self.visual = torch.nn.ModuleDict(parts)


def small_towers() -> dict[str, Towers]:
    transformers = pytest.importorskip("transformers")
    size = {"d_model": 8, "vocab_size": 16}
    t5 = transformers.MT5Config(**size, d_kv=4, d_ff=16, num_layers=3, num_heads=2)
    nllb = transformers.M2M100Config(
        **size,
        encoder_layers=3,
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_layers=1,
        decoder_attention_heads=2,
    )
    return {
        "mt5": Towers(transformers.MT5EncoderModel(t5).encoder),
        "nllb": Towers(transformers.M2M100Model(nllb).encoder),
    }


@pytest.mark.parametrize(
    ("name", "block", "inner"),
    [("mt5", "block", "layer.1.layer_norm.weight"), ("nllb", "layers", "fc1.weight")],
)
def test_layers_of_encoder_decoder_towers(name: str, block: str, inner: str) -> None:
    """The first container with numbered children defines the layers. Embeddings belong to the stem, and not to Muon."""
    model = small_towers()[name]
    layers = number_layers(model, "text")
    prefix = "text.transformer"
    assert [layers[f"{prefix}.{block}.{k}.{inner}"] for k in range(3)] == [1, 2, 3]
    assert layers[f"{prefix}.embed_tokens.weight"] == 0
    last = "final_layer_norm" if name == "mt5" else "layer_norm"
    assert layers[f"{prefix}.{last}.weight"] == max(layers.values()) == 4
    groups = parameter_groups(model, settings(name="muon"))
    muon = {member for group in groups if group["muon"] for member in group["names"]}
    assert (
        f"{prefix}.{block}.0.{'layer.0.SelfAttention.q' if name == 'mt5' else 'fc1'}.weight" in muon
    )
    assert not [member for member in muon if "relative" in member or "embed" in member]
    images = number_layers(model, "image")
    assert [images[f"visual.layers.{k}.blocks.0.weight"] for k in range(3)] == [1, 2, 3]


def test_muon_without_numbered_layers_is_refused() -> None:
    model = torch.nn.ModuleDict({"visual": torch.nn.Linear(4, 4), "text": torch.nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r"optim\.name=muon: no trained weight matrix"):
        parameter_groups(model, settings(name="muon"))


def test_tower_without_known_layers_is_refused() -> None:
    model = build_model(ModelSettings(name="quickstart"))
    with pytest.raises(
        ValueError,
        match=r"optim.image.layer_decay: the layers of this model's image tower are unknown",
    ):
        parameter_groups(model, settings(image={"layer_decay": 0.9}))
