"""Exports for transformers: its models compute the same features as open_clip's, from the same images and texts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch.nn import functional as F

from disco_ds.checkpoints.export import export_run
from disco_ds.config import ModelSettings
from disco_ds.models.clip import build_model, build_tokenizer
from helpers.architectures import architecture
from helpers.trained import write_run


def make_run(
    folder: Path, kind: str, bias: float | None = None, length: int = 12
) -> tuple[Path, Any, Any]:
    name = folder / f"{kind[:4]}.json"  # a name with "siglip" would choose another tokenizer
    name.write_text(json.dumps(architecture(kind, folder, length)))
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
    words = ["a photo of red square", "Two_Circles:  it's (blue)!"]
    texts = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = texts(words, padding="max_length", truncation=True, return_tensors="pt")
    features = loaded.get_text_features(**tokens)
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


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2"])
@torch.no_grad()
def test_readme_gives_our_features_and_scores(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, tokenizer = make_run(tmp_path, kind, length=64)
    folder = export_run(run, tmp_path / "export", "transformers")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "photo.jpg", quality=95)
    picture = torch.from_numpy(numpy.array(Image.open(tmp_path / "photo.jpg"))).permute(2, 0, 1)
    monkeypatch.chdir(tmp_path)
    readme = (folder / "README.md").read_text()
    assert "library_name: transformers\n" in readme
    done: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        exec(code, done)
    image, text, scale, _ = model(picture[None], tokenizer(["a cat", "a dog"]))
    for theirs, ours in zip(done["features"], (image, text), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    words = ["a photo of red square", "Two_Circles:  it's (blue)!", "dog"]
    classify = transformers.pipeline("zero-shot-image-classification", "export")
    scores = classify("photo.jpg", candidate_labels=words, hypothesis_template="{}")
    logits = (scale * image @ model(text=tokenizer(words))[1].T)[0]
    ours = logits.softmax(0) if kind == "clip" else logits.sigmoid()
    assert {item["label"]: item["score"] for item in scores} == pytest.approx(
        dict(zip(words, ours.tolist(), strict=True)), abs=1e-3
    )


def test_siglip_with_the_padding_of_open_clips_tokenizer_is_refused(tmp_path: Path) -> None:
    """open_clip's tokenizer pads with 0, which is also a word. transformers pads with the end token."""
    run, _, _ = make_run(tmp_path, "siglip_bpe")
    with pytest.raises(ValueError, match="pads texts with 0, but transformers with the end token"):
        export_run(run, tmp_path / "export", "transformers")
    assert not list(tmp_path.glob("*export*"))


def assert_close(theirs: Any, ours: torch.Tensor, tolerance: float = 1e-5) -> None:
    theirs = getattr(theirs, "pooler_output", theirs)
    torch.testing.assert_close(F.normalize(theirs), F.normalize(ours), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("resnet", "ModifiedResNet"),
        ("convnext", "ConvNeXt"),
        ("layer_scale", "parts that transformers' CLIPModel and SiglipModel lack"),
    ],
)
def test_other_architectures_are_refused_by_name(kind: str, words: str, tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path, kind)
    with pytest.raises(ValueError, match=words):
        export_run(run, tmp_path / "export", "transformers")
    assert not list(tmp_path.glob("*export*"))
