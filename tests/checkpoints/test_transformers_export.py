"""Exports for transformers: its models have the features of open_clip's, from the picture and the words on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

from disco_ds.checkpoints.export import export_run
from disco_ds.config import ModelSettings
from disco_ds.models.clip import build_model, build_tokenizer
from helpers.trained import write_run

TEXT = {"context_length": 12, "vocab_size": 49_408, "width": 32, "heads": 2, "layers": 2}
VISION = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TIMM = {
    "image_size": 32,
    "timm_model_name": "tiny_siglip",
    "timm_pool": "map",
    "timm_proj": "none",
}
WORDS = [
    "<pad>",
    "<eos>",
    "<unk>",
    *["a", "photo", "of", "red", "blue", "green", "square", "circle"],
]


def write_tokenizer(folder: Path) -> str:
    """A small tokenizer in a local folder, as SigLIP models have them on the hub."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def architecture(kind: str, folder: Path) -> dict[str, Any]:
    clip = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT}
    if kind == "clip":
        return clip
    if kind == "quick_gelu":
        return {**clip, "quick_gelu": True, "custom_text": True}
    if kind == "resnet":
        vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
        return {**clip, "vision_cfg": {**vision, "head_width": 16}}
    if kind == "layer_scale":
        return {**clip, "vision_cfg": {**VISION, "ls_init_value": 0.1}}
    if kind == "convnext":
        return {**clip, "vision_cfg": {"image_size": 32, "timm_model_name": "test_convnext"}}
    text = {
        **TEXT,
        "vocab_size": len(WORDS),
        "width": 64,
        "hf_tokenizer_name": write_tokenizer(folder / "tokenizer"),
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"} if kind == "siglip2" else {},
    }
    return {"embed_dim": 64, "custom_text": True, "vision_cfg": TIMM, "text_cfg": text}


@register_model
def tiny_siglip(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """A small tower like timm's vit_base_patch16_siglip_224."""
    size = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return VisionTransformer(32, **size, num_classes=0, class_token=False, global_pool="map")


def make_run(folder: Path, kind: str, bias: float | None = None) -> tuple[Path, Any, Any]:
    name = folder / f"{kind}.json"
    name.write_text(json.dumps(architecture(kind, folder)))
    torch.manual_seed(0)
    model = build_model(ModelSettings(name=str(name)), initial_bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    run = folder / "run"
    write_run(run, model, str(name))
    return run, model.eval(), build_tokenizer(ModelSettings(name=str(name)), model)


@pytest.mark.parametrize(
    ("kind", "bias"),
    [("clip", None), ("quick_gelu", None), ("siglip", -3.0), ("siglip", None), ("siglip2", -3.0)],
)
@torch.no_grad()
def test_transformers_loads_equal_features_from_pictures_and_words(
    kind: str, bias: float | None, tmp_path: Path
) -> None:
    run, model, tokenizer = make_run(tmp_path, kind, bias)
    folder = export_run(run, tmp_path / "export", "transformers")
    loaded = transformers.AutoModel.from_pretrained(folder).eval()
    assert type(loaded).__name__ == ("SiglipModel" if "siglip" in kind else "CLIPModel")
    assert loaded.logit_scale.reshape(()) == model.logit_scale.reshape(())
    if "siglip" in kind:
        assert loaded.logit_bias.item() == ((bias and model.logit_bias.item()) or 0.0)
    words = ["a photo of red square", "a blue circle"]
    texts = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = texts(words, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
    features = loaded.get_text_features(input_ids=tokens)
    features = getattr(features, "pooler_output", features)
    assert_close(features, model.encode_text(tokenizer(words)))
    pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8)
    picture = Image.fromarray(pixels.numpy())
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    prepared = images(picture, return_tensors="pt")["pixel_values"]
    features = loaded.get_image_features(pixel_values=prepared)
    features = getattr(features, "pooler_output", features)
    ours = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)
    expected = model.encode_image(ours(picture)[None])
    assert_close(features, expected, 2e-2)
    assert_close(loaded.get_image_features(pixel_values=ours(picture)[None]), expected)


def assert_close(theirs: Any, ours: torch.Tensor, tolerance: float = 1e-5) -> None:
    theirs = getattr(theirs, "pooler_output", theirs)
    torch.testing.assert_close(F.normalize(theirs), F.normalize(ours), rtol=0, atol=tolerance)


def test_16_bits_keep_the_scale_in_fp32(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path, "clip")
    folder = export_run(run, tmp_path / "export", "transformers", dtype="bf16")
    loaded = transformers.CLIPModel.from_pretrained(folder, dtype="auto")
    assert loaded.visual_projection.weight.dtype == torch.bfloat16
    saved = load_file(folder / "model.safetensors")
    assert saved["logit_scale"].dtype == torch.float32
    assert saved["visual_projection.weight"].dtype == torch.bfloat16
    assert (folder / "README.md").read_text().count("AutoModel.from_pretrained") == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("resnet", "towers ModifiedResNet"),
        ("convnext", "towers ConvNeXt"),
        ("layer_scale", "parts that transformers' model lacks"),
    ],
)
def test_other_architectures_are_refused_by_name(kind: str, words: str, tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path, kind)
    with pytest.raises(ValueError, match=words):
        export_run(run, tmp_path / "export", "transformers")
    assert not list(tmp_path.glob("*export*"))
