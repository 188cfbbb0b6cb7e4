"""Exports for open_clip compute the same features as the run, in open_clip, in clip_benchmark and in a new process."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import disco_ds
from disco_ds.checkpoints.export import export_run
from disco_ds.checkpoints.weights import TENSORS, read_weights
from disco_ds.cli.main import main
from disco_ds.config import ModelSettings
from disco_ds.data import ImageSpec, load_manifest, read_all, resolve_shards
from disco_ds.data.images import decode_for_evaluation
from disco_ds.models.clip import build_model, build_tokenizer, read_preprocessing
from helpers.checkpoints import flip
from helpers.minimal import settings
from helpers.paths import ROOT
from helpers.towers import BPE_SIZE, CONTEXT, write_tiny
from helpers.trained import write_run

TEXTS = ["a red square", "Snow-capped MOUNTAIN &amp; sea", ""]


def picture(width: int = 50, height: int = 40) -> Image.Image:
    values = torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    return Image.fromarray(values.numpy())


def write_model(folder: Path, kind: str) -> str:
    """Write a model config with open_clip's towers, timm's or ours, and return its model.name."""
    if kind == "quickstart":
        return kind
    name = write_tiny(folder, vocab_size=BPE_SIZE)
    if kind == "timm":
        tree = json.loads(Path(name).read_text())
        tree["vision_cfg"] = {
            "timm_model_name": "test_resnet",
            "timm_pool": "avg",
            "image_size": 32,
        }
        Path(name).write_text(json.dumps(tree))
    return name


def make_run(folder: Path, kind: str, bias: float | None = None) -> tuple[Path, nn.Module, Any]:
    """Return a run folder with changed weights, its model in eval mode, and its tokenizer."""
    name = write_model(folder, kind)
    torch.manual_seed(0)
    model = build_model(ModelSettings(name=name), initial_bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        model(torch.rand(8, 3, *read_preprocessing(model).size))  # changes the batch statistics
    run = folder / "run"
    write_run(run, model, name)
    return run, model.eval(), build_tokenizer(ModelSettings(name=name), model)


def load(folder: Path) -> tuple[Any, Any, Any]:
    """Load an export with open_clip only. Return (model, preprocess, tokenizer)."""
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return model.eval(), preprocess, open_clip.get_tokenizer(f"local-dir:{folder}")


@pytest.mark.parametrize(
    ("kind", "bias"), [("own", None), ("own", -5.0), ("timm", -5.0), ("quickstart", None)]
)
@torch.no_grad()
def test_open_clip_loads_equal_features_preprocessing_and_tokens(
    kind: str, bias: float | None, tmp_path: Path
) -> None:
    run, model, tokenizer = make_run(tmp_path, kind, bias)
    loaded, preprocess, tokenize = load(export_run(run, tmp_path / "exports" / "one"))
    assert loaded.logit_scale.shape == ()
    assert loaded.logit_scale == model.logit_scale
    assert (loaded.logit_bias is None) == (bias is None)
    tokens = tokenizer(TEXTS)
    assert torch.equal(tokenize(TEXTS), tokens)
    image = torch.rand(2, 3, *read_preprocessing(model).size)
    for encode, value in (("encode_image", image), ("encode_text", tokens)):
        found, expected = (getattr(each, encode)(value) for each in (loaded, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Start with an image file and a string, so that preprocessing and tokenization are compared too.
    look = read_preprocessing(model)
    spec = ImageSpec(look.size, look.interpolation, look.resize_mode)
    pixels = decode_for_evaluation(picture(), 10**8, spec)
    ours = model(pixels[None], tokens)
    theirs = (
        loaded.encode_image(preprocess(picture())[None], normalize=True),
        loaded.encode_text(tokens, True),
    )
    for got, wanted in zip(theirs, ours, strict=False):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


def test_export_of_an_export_has_the_same_tensors(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path, "own", bias=-5.0)
    wanted = read_weights(run).tensors
    first = export_run(run, tmp_path / "first")
    again = read_weights(export_run(first, tmp_path / "again")).tensors
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[key], wanted[key]) for key in wanted)


def test_flipped_bit_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model, _ = make_run(tmp_path, "own")
    newest = write_run(run, model, str(tmp_path / "tiny.json"), step=8)
    flip(newest / "engine" / "mp_rank_00_model_states.pt")
    older = newest.with_name("step-00000007")
    assert main(["export", str(run), "--to", str(tmp_path / "one")]) == 2
    said = capsys.readouterr().err
    assert (
        "step-00000008 is damaged: engine/mp_rank_00_model_states.pt is not what was written"
        in said
    )
    assert str(older) in said
    assert not (tmp_path / "one").exists()
    assert main(["export", str(older), "--to", str(tmp_path / "one"), "--format", "open_clip"]) == 0


def test_export_never_overwrites_and_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path, "own")
    left = tmp_path / ".one.partial"
    left.mkdir()
    (left / "half.pt").touch()
    folder = export_run(run, tmp_path / "one", "open_clip")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "open_clip_config.json", "open_clip_model.safetensors"]
    assert not left.exists()
    before = (folder / TENSORS).stat()
    assert before.st_mode & 0o777 == (folder / "README.md").stat().st_mode & 0o777
    with pytest.raises(ValueError, match="one exists already"):
        export_run(run, folder)
    assert (folder / TENSORS).stat() == before


def test_export_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    """If a model's name contains "siglip", open_clip chooses another tokenizer, which may not be installed."""
    run, model, _ = make_run(tmp_path, "own")
    name = Path(write_model(tmp_path, "own")).rename(tmp_path / "siglip.json")
    write_run(run, model, str(name), step=8)
    with pytest.raises(Exception, match=r"."):
        export_run(run, tmp_path / "exports" / "one", "open_clip")
    assert not list((tmp_path / "exports").rglob("*"))


def test_command_line_writes_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = make_run(tmp_path, "own")
    argv = ["export", str(run), "--to", str(tmp_path / "one")]
    assert main(argv) == 0
    assert (
        f"{tmp_path / 'one'}: README.md, open_clip_config.json, open_clip_model"
        in capsys.readouterr().out
    )
    assert main(argv) == 2
    assert "error: " in capsys.readouterr().err


def read_blocks(folder: Path, language: str) -> list[str]:
    """Return the code blocks of this language in an export's README."""
    return re.findall(rf"```{language}\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


def test_readme_loads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model, _ = make_run(tmp_path, "own")
    folder = export_run(run, tmp_path / "my export")
    monkeypatch.chdir(tmp_path)
    (code,) = read_blocks(folder, "python")
    assert "disco_ds" not in code
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["model"].text_projection.equal(model.get_parameter("text_projection"))
    assert found["tokenizer"](TEXTS).shape == (len(TEXTS), CONTEXT)
    assert read_blocks(folder, "sh")[0].startswith(
        'clip_benchmark eval --model "local-dir:my export" '
    )


@pytest.mark.slow
def test_readme_of_a_tower_of_ours_loads_it_in_a_fresh_interpreter(tmp_path: Path) -> None:
    run, model, _ = make_run(tmp_path, "quickstart")
    folder = export_run(run, tmp_path / "quick start", "open_clip")
    assert "disco_ds must be installed" in " ".join((folder / "README.md").read_text().split())
    (code,) = read_blocks(folder, "python")
    assert code.startswith("import disco_ds.models.convnet\n")
    without = "import open_clip\ntry:\n    open_clip.create_model('local-dir:quick start')\n"
    without += "except RuntimeError as error:\n    print('refused', error)\n"
    code = without + code + "\nprint(float(model.visual.trunk.norm.weight.double().sum()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    refused, total = done.stdout.splitlines()
    assert refused.startswith("refused")
    assert "disco_convnet" in refused
    assert float(total) == model.get_parameter("visual.trunk.norm.weight").double().sum().item()


# clip_benchmark

CLASSES = 20


def write_benchmark(folder: Path) -> tuple[list[str], Tensor, Tensor]:
    """Write emoji in clip_benchmark's layout, one class per caption. Return (class names, pixels, labels)."""
    manifest = load_manifest(resolve_shards("bundled:emoji/train"))
    data = settings(data={"image_key": "png", "source": "synthetic"}).data
    samples = list(read_all(manifest, data, ImageSpec((32, 32)), 0, 3, "{json[caption]}"))
    names = sorted({label for _, label, _ in samples})[:: len(samples) // 200][:CLASSES]
    chosen = [(image, names.index(label)) for image, label, _ in samples if label in names]
    (folder / "test").mkdir(parents=True)
    with tarfile.open(folder / "test" / "0.tar", "w") as tar:
        for number, (image, label) in enumerate(chosen):
            buffer = io.BytesIO()
            Image.fromarray(image.permute(1, 2, 0).numpy()).resize((41, 37)).save(buffer, "PNG")
            for suffix, body in (("cls", str(label).encode()), ("png", buffer.getvalue())):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
    (folder / "test" / "nshards.txt").write_text("1")
    (folder / "classnames.txt").write_text("\n".join(names))
    templates = ["a drawing of {c}.", "{c}", "an emoji: {c}!"]
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    return (
        names,
        torch.stack([image for image, _ in chosen]),
        torch.tensor([label for _, label in chosen]),
    )


def learn(
    model: nn.Module, tokenize: Any, names: list[str], pixels: Tensor, labels: Tensor
) -> None:
    """Train on half of the images, so that the accuracy on all of them is well above zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = tokenize(names)
    for _ in range(40):
        image, text, scale, _ = model(pixels[::2], tokens)
        F.cross_entropy(scale * image @ text.T, labels[::2]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def benchmark_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment for clip_benchmark, which fails with numpy 2.4: these packages, but an older numpy."""
    folder = tmp_path_factory.mktemp("clip_benchmark")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [sysconfig.get_path("purelib"), str(Path(disco_ds.__file__).parents[1])]
    (folder / "lib" / version / "site-packages" / "ours.pth").write_text("\n".join(paths))
    pip = [python, "-m", "pip", "install", "--quiet"]
    for packages in (
        ["--no-deps", "clip_benchmark==1.6.2", "pycocoevalcap"],
        ["scikit-learn", "requests", "numpy<2.4"],
    ):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"clip_benchmark could not be installed: {done.stderr[-300:]}")
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["own", "quickstart"])
def test_clip_benchmark_gives_the_accuracy_of_ours(
    kind: str, benchmark_python: Path, tmp_path: Path
) -> None:
    names, pixels, labels = write_benchmark(tmp_path / "set")
    run, model, tokenizer = make_run(tmp_path, kind)
    learn(model, tokenizer, names, pixels, labels)
    write_run(run, model, kind if kind == "quickstart" else str(tmp_path / "tiny.json"), step=8)
    folder = export_run(run, tmp_path / "emoji", "open_clip")
    (command,) = read_blocks(folder, "sh")
    if kind == "quickstart":
        module = "disco_ds.models.convnet"
        start = f'python -c "import {module}; from clip_benchmark.cli import main; main()" eval'
        assert start.removesuffix(" eval") in (folder / "README.md").read_text()
        command = command.replace("clip_benchmark eval", start)
    for name, value in (("RESULT", "theirs"), ("NAME", "set"), ("SET", "set")):
        command = command.replace(name, value)
    env = os.environ | {"PATH": f"{benchmark_python.parent}{os.pathsep}{os.environ['PATH']}"}
    ours = f"{sys.executable} -m disco_ds eval emoji eval.labeled.set=set --json ours.json"
    for line in (f"{command.strip()} --no_amp --num_workers 1", ours):
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]
    (result,) = json.loads((tmp_path / "ours.json").read_text())["sets"]
    assert 0.2 < theirs["acc1"] < 1
    assert result["num_images"] == len(labels)
    assert (result["top1"], result["top5"]) == pytest.approx(
        (theirs["acc1"], theirs["acc5"]), abs=1e-9
    )
    assert result["recall"] == pytest.approx(theirs["mean_per_class_recall"], abs=1e-9)
    if kind == "own":
        script_resumes_over_a_folder_of_sets(benchmark_python, tmp_path, theirs["acc1"])


def script_resumes_over_a_folder_of_sets(python: Path, folder: Path, top1: float) -> None:
    """Check that a second call of the example script repeats only the evaluation whose result is missing."""
    for name in ("one", "two"):
        shutil.copytree(folder / "set", folder / "sets" / name)
    script = ROOT / "examples" / "benchmark_exports.py"
    words = ["emoji", "--sets", "sets", "--to", "results", "--workers", "1"]

    def call() -> dict[str, float]:
        done = subprocess.run(
            [str(python), str(script), *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert f"| two | acc1 | {top1:.2%} |" in done.stdout.splitlines()
        (line,) = (folder / "results" / "results.jsonl").read_text().splitlines()
        return json.loads(line)["values"]

    assert call() == pytest.approx({"one": top1, "two": top1})
    one, two = (folder / "results" / "emoji" / f"{name}.json" for name in ("one", "two"))
    before = one.stat().st_mtime_ns
    two.unlink()
    assert call() == pytest.approx({"one": top1, "two": top1})
    assert one.stat().st_mtime_ns == before
