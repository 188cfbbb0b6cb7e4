"""The recipes of examples/open_clip, and the table of open_clip's flags."""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip_train.params import parse_args

from disco_ds.cli.main import main
from disco_ds.cli.options import make_parser
from disco_ds.config import Config, load_config
from disco_ds.config.load import read_words
from disco_ds.models.clip import register_config
from disco_ds.runs.run_folder import FINISHED
from disco_ds.training.build import build
from disco_ds.training.loop import finish, train
from helpers.dist import run_ranks
from helpers.paths import ROOT
from helpers.shards import encode, noise
from tools.make import reference

RECIPES = sorted((ROOT / "examples" / "open_clip").glob("*.yaml"))
RANKS = {"laion400m": 176, "cc3m": 8, "lit": 8, "fine_tune": 8}
SMALL = [
    *(
        "global_batch=64",
        "micro_batch=16",
        "steps=2",
        "epochs=null",
        "samples=null",
        "optim.warmup_steps=1",
    ),
    *("data.workers=0", "log.wandb.project=null", "deepspeed.torch_autocast.enabled=false"),
]
EMOJI_KEYS = [
    *("data.image_key=png", "data.captions={'{json[caption]}': 1}"),
    *("eval.label_key='{json[caption]}'", "eval.caption_key='{json[caption]}'"),
]
EMOJI = "bundled:emoji/unseen"
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 4, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


class FoundError(Exception):
    """Carries the flags of open_clip's parser out of the function that builds it."""


def open_clip_flags() -> set[str]:
    def found(parser: argparse.ArgumentParser, *args: Any) -> None:
        raise FoundError({name for action in parser._actions for name in action.option_strings})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", found)
        with pytest.raises(FoundError) as caught:
            parse_args([])
    (flags,) = caught.value.args
    return flags - {"-h", "--help"}


def test_table_has_every_flag_of_the_installed_open_clip() -> None:
    release = int(open_clip.__version__.split(".")[0])
    flags = {
        name for name, row in read_words()["flags"].items() if row.get("only", release) == release
    }
    assert {f"--{name}" for name in flags} == open_clip_flags()


def test_table_names_settings_and_options_that_exist() -> None:
    known = {
        row[0].strip("`")
        for title, model in reference.sections("", Config)
        for row in reference.rows(title, model)
    }
    known |= {title.rstrip(".") for title, _ in reference.sections("", Config)}
    known |= {word for action in make_parser("train")._actions for word in action.option_strings}
    for name, row in (read_words()["flags"] | read_words()["other_words"]).items():
        assert set(row.get("ours", ())) <= known, name
        assert row, name


def test_flag_of_open_clip_on_the_command_line_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--config", "quickstart", "--batch-size", "256", "--dry-run"])
    assert caught.value.code == 2
    assert "--batch-size: here it is micro_batch or global_batch" in capsys.readouterr().err


def weights(name: str, folder: Path, model: str) -> list[str]:
    """Return overrides that replace a recipe's pretrained weights by a local file, so that nothing is downloaded."""
    if name not in ("lit", "fine_tune"):
        return []
    whole = open_clip.create_model(register_config(model))
    lit = name == "lit"
    path = folder / "weights.pt"
    torch.save((whole.visual if lit else whole).state_dict(), path)
    return [f"model.pretrained{'_image' if lit else ''}={path}"]


def test_there_is_a_recipe_for_each_of_open_clip_s_examples() -> None:
    assert {path.stem for path in RECIPES} == set(RANKS)
    for path in RECIPES:
        assert len(path.read_text().splitlines()) <= 20
        assert (
            f"examples/open_clip/{path.name}" in (ROOT / "docs" / "from_open_clip.md").read_text()
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_dry_run_and_plan(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "log.wandb.project=null",
        *weights(path.stem, tmp_path, load_config(path).model.name),
    ]
    ranks = RANKS[path.stem]
    assert (
        main(["train", "--config", str(path), "--dry-run", "--ranks", str(ranks), *overrides]) == 0
    )
    assert f"{ranks} ranks x " in capsys.readouterr().out
    assert main(["plan", "--config", str(path), "--ranks", str(ranks), *overrides]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_doctor_misses_but_the_data_of_a_recipe(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [
        "log.wandb.project=null",
        *weights(path.stem, tmp_path, load_config(path).model.name),
    ]
    assert (
        main(["doctor", "--config", str(path), "--ranks", str(RANKS[path.stem]), *overrides]) == 1
    )
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("fail")} == {"data", "recipe"}


def run_config(path: Path, folder: Path, overrides: list[str]) -> None:
    with ExitStack() as stack:
        run = build(load_config(path, [f"runs={folder}", *overrides]), None, stack)
        train(run)
        finish(run)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path.stem != "cc3m" else [], id=path.stem)
        for path in RECIPES
    ],
)
def test_recipe_runs_scaled_down(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    model = str(tmp_path / "tiny.json")
    overrides = [*SMALL, f"model.name={model}", *weights(path.stem, tmp_path, model)]
    if path.stem == "cc3m":
        rows = ["filepath\ttitle"]
        for number in range(96):
            (tmp_path / f"{number}.png").write_bytes(encode(noise(32, 32)))
            rows.append(f"{number}.png\ta picture, number {number}")
        (tmp_path / "train.csv").write_text("\n".join(rows))
        overrides += [f"data.shards={tmp_path / 'train.csv'}", "eval={}"]
    else:
        overrides += [f"data.shards={EMOJI}", "data.manifest=null", *EMOJI_KEYS]
        for kind in ("labeled", "retrieval"):
            overrides += [f"eval.{kind}.{name}={EMOJI}" for name in getattr(config.eval, kind)]
    run_ranks(run_config, 2, path, tmp_path / "runs", overrides)
    (finished,) = (tmp_path / "runs").glob(f"*/{FINISHED}")
    assert json.loads(finished.read_text())["steps"] == 2
