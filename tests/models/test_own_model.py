"""Custom models (`model.factory`): refused mistakes, the built model, and a complete run of the example model."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disco_ds.config import ModelSettings
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.models.clip import (
    build_model,
    build_tokenizer,
    read_architecture,
    read_text_size,
    trained_sides,
)
from disco_ds.models.fast.texts import find_counter
from disco_ds.models.param_groups import parameter_groups
from helpers.minimal import settings
from helpers.own_code import disco_ds
from helpers.paths import ROOT
from helpers.tiny_run import recipe

CODE = """
import torch
from torch import nn
from disco_ds import TwoTowers

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, 8)
    def forward(self, x):
        return self.layer(x.flatten(1))

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 8)
        self.dropout = nn.Dropout(0.1)
    def forward(self, tokens):
        return self.dropout(self.embedding(tokens)).mean(1)

class Tokenizer:
    def __call__(self, texts):
        rows = [[ord(c) % 128 for c in text[:6].ljust(6)] for text in texts]
        return torch.tensor(rows)

def build(size=16, **more):
    return TwoTowers(Image(), Text(), Tokenizer(), 6, 128, size, **more)

def fails():
    raise RuntimeError("no such weights")

def plain():
    return nn.Linear(2, 2)

number = 3
"""
BATCH_NORM = """
def normed():
    towers = build()
    towers.visual.layer = nn.Sequential(nn.Unflatten(1, (3, 16, 16)), nn.BatchNorm2d(3), nn.Flatten())
    return towers
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on PYTHONPATH that contains my_towers.py."""
    (tmp_path / "my_towers.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_towers", raising=False)
    return tmp_path


def own(function: str = "build", **changes: Any) -> ModelSettings:
    return settings(model={"factory": f"my_towers:{function}", **changes}).model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"factory": "my_towers:build", "name": "RN50"},
            "remove model.name: model.factory builds the model itself",
        ),
        ({"factory": "my_towers:build", "pretrained": "w.pt"}, "remove model.pretrained"),
        ({"options": {"size": 16}}, "remove model.options"),
        ({"factory": "my_towers.build"}, "model.factory"),
    ],
)
def test_settings_that_do_not_go_together(model, message):
    with pytest.raises(ValueError, match=message):
        settings(model=model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"factory": "no_towers:build"},
            "no_towers:build cannot be imported: ModuleNotFoundError: No module named 'no_towers'",
        ),
        ({"factory": "my_towers:none"}, "my_towers has no none"),
        ({"factory": "my_towers:number"}, "my_towers:number is neither a function nor a class"),
        (
            {"factory": "my_towers:fails", "options": {"size": 3}},
            "unexpected keyword argument 'size'; its options: none",
        ),
        ({"factory": "my_towers:fails"}, "my_towers:fails failed: RuntimeError: no such weights"),
        ({"factory": "my_towers:plain"}, "my_towers:plain returned a Linear, not a TwoTowers"),
        (
            {"factory": "my_towers:build", "activation_checkpointing": True},
            "the image tower has no method",
        ),
    ],
)
def test_factories_that_cannot_be_used(package, model, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_model(settings(model=model).model)


def test_model_is_what_the_trainer_asks_for(package):
    model: Any = build_model(
        own(options={"mean": (0.5, 0.5, 0.5)}), initial_scale=10.0, initial_bias=-10.0
    )
    image = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    tokens = build_tokenizer(own(), model)(["a", "bc", "def", ""])
    features = model.eval()(image, tokens)
    expected = model.visual(
        (image / 255 - 0.5) / torch.tensor(model.visual.image_std).view(3, 1, 1)
    )
    torch.testing.assert_close(features[0], nn.functional.normalize(expected, dim=-1))
    torch.testing.assert_close(features[1], nn.functional.normalize(model.text(tokens), dim=-1))
    assert (features[2].item(), features[3].item()) == (pytest.approx(10), -10)
    assert read_text_size(model) == (6, 128)
    names = {
        group["name"]: len(group["params"]) for group in parameter_groups(model, settings().optim)
    }
    assert names == {"matrices": 2, "vectors": 1, "scale": 2}
    assert read_architecture(own(options={"size": 16})) == {
        "factory": "my_towers:build",
        "options": {"size": 16},
    }


HEADS = """
from open_clip.transformer import TextTransformer

class WithHeads(TwoTowers):
    def __init__(self, *args):
        super().__init__(*args)
        self.image_head = nn.Linear(8, 8)
        self.text_head = nn.Linear(8, 8)
    def encode_image(self, image):
        return self.image_head(self.visual(image))
    def encode_text(self, text):
        return self.text_head(self.text(text))

def with_heads():
    text = TextTransformer(6, 128, width=16, heads=2, layers=1, output_dim=8)
    return WithHeads(Image(), text, Tokenizer(), 6, 128, 16)
"""


def test_subclass_may_change_how_the_towers_are_used(package):
    (package / "my_towers.py").write_text(CODE + HEADS)
    model: Any = build_model(own("with_heads"))
    image = torch.rand(4, 3, 16, 16)
    tokens = build_tokenizer(own(), model)(["a", "bc", "def", "g"])
    rows, columns, *_ = model(image, tokens)
    expected = nn.functional.normalize(model.text_head(model.text(tokens)), dim=-1)
    torch.testing.assert_close(columns, expected)
    (rows * columns.flip(0)).sum().backward()
    for head in (model.image_head, model.text_head):
        assert head.weight.grad.abs().max() > 0
    assert find_counter(model) is None, "padding must stay, because encode_text may need it"


@pytest.mark.parametrize("side", ["image", "text"])
def test_tower_can_be_locked(package, side):
    sides = trained_sides(build_model(own(**{f"lock_{side}": True})))
    assert sides == {"image": side != "image", "text": side != "text"}


def test_text_tower_whose_parameters_are_all_shared_is_trained(package):
    model = build_model(own())
    model.visual.shared = model.text
    assert trained_sides(model) == {"image": True, "text": True}


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.slow
def test_resumed_run_is_the_uninterrupted_one_and_other_options_are_refused(package, tmp_path):
    path = recipe(
        tmp_path, model={"factory": "my_towers:build", "options": {"size": 16}}, log={"every_steps": 1}, steps=4,
        checkpoint={"every_steps": 2},
    )  # fmt: skip
    whole, half = tmp_path / "runs" / "whole", tmp_path / "runs" / "half"
    check(disco_ds("train", "--config", str(path), "name=whole", cwd=tmp_path))
    check(disco_ds("train", "--config", str(path), "name=half", cwd=tmp_path))
    (half / "finished.json").unlink()
    first = str(half / "checkpoints" / "step-00000002")
    changed = disco_ds(
        "train", "--config", str(path), "--resume", first, "model.options.size=32", cwd=tmp_path
    )
    assert changed.returncode == 2
    assert "model.config.options.size: 16 in the checkpoint, 32 now" in changed.stderr
    check(disco_ds("train", "--config", str(path), "name=half", "--resume", first, cwd=tmp_path))
    assert losses(half) == losses(whole)
    weights = [
        torch.load(next(run.glob("checkpoints/step-00000004/engine/mp*")), weights_only=False)
        for run in (whole, half)
    ]
    for name, value in weights[0]["module"].items():
        assert torch.equal(value, weights[1]["module"][name]), name


@pytest.mark.slow
def test_example_with_a_hugging_face_tower_plans_trains_exports_and_evaluates(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    path, run = str(ROOT / "examples" / "own_model.yaml"), tmp_path / "runs" / "own_model"
    few = ["samples=2560", "optim.warmup_steps=2", "log.every_steps=4", "eval.labeled={}"]
    assert "fits" in check(disco_ds("plan", "--config", path, "--ranks", "2", cwd=tmp_path))
    check(disco_ds("train", "--config", path, "--dry-run", *few, cwd=tmp_path))
    check(disco_ds("train", "--config", path, *few, cwd=tmp_path))
    values = list(losses(run).values())
    assert values[-1] < values[0], values
    check(disco_ds("export", str(run), "--to", "exported", cwd=tmp_path))
    assert "own_model:build" in (tmp_path / "exported" / "README.md").read_text()
    tables = [
        check(disco_ds("eval", str(each), "--config", path, cwd=tmp_path))
        for each in (run, "exported")
    ]
    assert tables[0].splitlines()[-1] == tables[1].splitlines()[-1]
    assert "unseen" in tables[0]


def test_batch_statistics_of_a_locked_tower_stay(package):
    (package / "my_towers.py").write_text(CODE + BATCH_NORM)
    model: Any = build_model(own("normed", lock_image=True)).train()
    image = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    before = {name: value.clone() for name, value in model.visual.state_dict().items()}
    model(image=image)
    assert all(
        torch.equal(value, before[name]) for name, value in model.visual.state_dict().items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"activation_checkpointing": True}, {"compile": True}], ids=str)
def test_example_trains_the_same_when_recomputed_or_compiled(change, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    few = [
        "samples=512",
        "micro_batch=128",
        "optim.warmup_steps=1",
        "log.every_steps=1",
        "eval.labeled={}",
        "name=run",
        "model.options.dropout=0.0",  # a compiled model draws other random numbers
    ]
    found = []
    for number, changes in enumerate(
        ([], [f"model.{key}={str(value).lower()}" for key, value in change.items()])
    ):
        (tmp_path / str(number)).mkdir()
        path = str(ROOT / "examples" / "own_model.yaml")
        check(disco_ds("train", "--config", path, *few, *changes, cwd=tmp_path / str(number)))
        found.append(list(losses(tmp_path / str(number) / "runs" / "run").values()))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
