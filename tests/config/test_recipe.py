"""Reading of recipes, and overrides on the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.cli.commands import describe_run
from disco_ds.config import PACKAGE, check_config, load_config, render_ds_config
from disco_ds.config.ds_config import (
    merge,
    precision,
    read_ds_config,
    zero_stage,
)
from disco_ds.config.load import find_recipe
from helpers.minimal import MINIMAL

RECIPES = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml"))


# Recipes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_bundled_recipe_loads_and_dry_runs(name: str, ranks: int) -> None:
    config = load_config(name)
    ranks = config.ranks or ranks
    text = describe_run(config, ranks)
    assert (
        f"global batch {config.global_batch:,} = {ranks} rank{'s' if ranks > 1 else ''} x "
        f"micro-batch {config.micro_batch:,} x " in text
    )
    settings_text, _, ds_config_text = text.partition("\nds_config.json:\n")
    assert yaml.safe_load(settings_text)["name"] == config.name
    ds_config, _ = json.JSONDecoder().raw_decode(ds_config_text)
    assert ds_config == render_ds_config(config, ranks)


def test_bundled_recipes_include_the_quickstart() -> None:
    assert "quickstart" in RECIPES


def test_recipe_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ValueError,
        match=r"'quikstart'; did you mean quickstart\?; .*, quickstart",
    ):
        load_config("quikstart")


def test_recipe_missing_file_is_named(tmp_path: Path) -> None:
    for path, problem in (
        (tmp_path / "missing.yaml", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ValueError, match=f"{path}.*{problem}"):
            load_config(path)
    assert find_recipe("quickstart") == PACKAGE / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "syntax error"),
        ("a: b: c", "syntax error"),
        ("a: !!python/object:os.system 1", "syntax error"),
        ("", "expected a mapping of settings, got NoneType"),
        ("[1, 2]", "expected a mapping of settings, got list"),
        ("name: x", "global_batch is missing"),
        ("name: x", "micro_batch is missing"),
        ("1: 2", "must be strings, got 1"),
    ],
)
def test_recipe_malformed_is_refused_naming_the_file(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load_config(path)
    assert words in str(caught.value)


def test_recipe_without_a_loss_has_the_one_that_the_manual_recommends(recipe: Path) -> None:
    manual = (PACKAGE.parent / "docs" / "losses.md").read_text(encoding="utf-8")
    (by_default,) = (line for line in manual.splitlines() if line.endswith("| by default |"))
    assert by_default.startswith(f"| `{load_config(recipe).loss.name}` |")
    assert load_config(recipe, ["loss.options={tile: 4}"]).loss.name == "disco_fused"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("seed: 1\nseed: 1", "seed"),
        ("loss: {name: clip, options: {}, name: disco}", "name"),
        ("eval: &a {labeled: {'b': x, b: y}}", "b"),
        ("optim: {}", "optim"),  # the recipe already has this key
    ],
)
def test_recipe_key_given_twice_is_refused(text: str, key: str, recipe: Path) -> None:
    with recipe.open("a") as file:
        file.write(f"{text}\n")
    with pytest.raises(
        ValueError, match=f"(?s){re.escape(str(recipe))}.*key '{key}' is given twice"
    ):
        load_config(recipe)


def test_recipe_may_override_what_it_merges(recipe: Path) -> None:
    with recipe.open("a") as file:
        file.write(
            "model: &base {name: RN50, max_scale: 50}\nloss: {options: {<<: *base, name: x}}\n"
        )
    assert load_config(recipe).loss.options == {"name": "x", "max_scale": 50}


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=1e-3", "optim.lr", 0.001),
        ("optim.lr=2E-4", "optim.lr", 0.0002),
        ("optim.lr=3.e+0", "optim.lr", 3.0),
        ("global_batch=128", "global_batch", 128),
        ("optim.betas=[0.8, 9e-1]", "optim.betas", (0.8, 0.9)),
        ("optim.lr=null", "optim.lr", None),
        ("data.crop_scale=null", "data.crop_scale", None),
        ("data.captions={'{json[a=b]}': 2e-1}", "data.captions", {"{json[a=b]}": 0.2}),
        ("name=1.5-run", "name", "1.5-run"),
        ("model.lock_image=true", "model.lock_image", True),
        ("loss.options.tile=4e-1", "loss.options", {"tile": 0.4}),
        ("loss.options={deep: {er: 1e2}}", "loss.options", {"deep": {"er": 100.0}}),
        ("data.augment={zoom: 0.1}", "data.augment.zoom", 0.1),
        ("data.augment.shift=0.25", "data.augment.shift", 0.25),
    ],
)
def test_override_reaches_its_setting(override: str, path: str, value: Any, recipe: Path) -> None:
    config: Any = load_config(recipe, [override])
    for part in path.split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ["data.shards=/data/0.tar", "data.shards=/data/1.tar", "data.shards=/data/2.tar"],
            "data.shards",
        ),
        (["seed=1", "optim.eps=1e-8", "seed=1"], "seed"),
        (["optim={eps: 1e-8}", "optim={lr: 1}"], "optim"),
        (["deepspeed=zero1", "deepspeed=zero2"], "deepspeed"),
        (["loss.options={a: 1, a: 2}"], "a"),
    ],
)
def test_override_of_a_key_given_twice_is_refused(
    overrides: list[str], key: str, recipe: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(key)}\S* is given twice"):
        load_config(recipe, overrides)


def test_override_of_a_whole_mapping_leaves_what_others_put_into_it(recipe: Path) -> None:
    words = [
        "data.augment.shift=0.2",
        "data.augment={zoom: 0.1}",
        "deepspeed.zero_optimization.stage=2",
    ]
    words += ["deepspeed=zero1", "loss.options.tile=[4, 4]", "loss={name: inf_cl}"]
    one, other = load_config(recipe, words), load_config(recipe, words[::-1])
    assert one == other
    assert (one.data.augment.shift, one.data.augment.zoom, one.loss.name) == (0.2, 0.1, "inf_cl")
    assert (zero_stage(one.deepspeed), one.loss.options) == (2, {"tile": [4, 4]})


def test_override_leaves_its_neighbors_and_replaces_a_whole_mapping(recipe: Path) -> None:
    config = load_config(
        recipe, ["optim.warmup_steps=3", "data.augment={zoom: 0.1}", "data.augment.shift=0.2"]
    )
    assert (config.optim.lr, config.optim.warmup_steps) == (1e-3, 3)
    assert (config.data.augment.zoom, config.data.augment.shift) == (0.1, 0.2)
    assert config.data.source == "synthetic"
    assert load_config(recipe, ["optim={warmup_steps: 3}"]).optim.lr is None


@pytest.mark.parametrize("item", ["seed", "=3", "optim.=3", ".lr=3", "optim..lr=3"])
def test_override_of_another_form_is_refused(item: str, recipe: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"override {item!r} is not of the form a.b=value")
    ):
        load_config(recipe, [item])


def test_override_malformed_value_is_named(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"override 'optim.betas=\[1' .*syntax error"):
        load_config(recipe, ["optim.betas=[1"])


def test_override_deeper_than_a_value_is_refused_naming_it(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"global_batch .*got \{'x': 3\}"):
        load_config(recipe, ["global_batch.x=3"])


@pytest.mark.parametrize("swap", [False, True])
def test_override_of_the_ds_config_then_deeper(swap: bool, recipe: Path) -> None:
    overrides = [
        "deepspeed=zero3_offload",
        "deepspeed.zero_optimization.stage=2",
        "deepspeed.fp16.loss_scale=1e2",
    ]
    config = load_config(recipe, overrides[::-1] if swap else overrides)
    bundled = read_ds_config("zero3_offload", recipe.parent)
    assert config.deepspeed == merge(
        bundled, {"zero_optimization": {"stage": 2}, "fp16": {"loss_scale": 100.0}}
    )
    assert config.deepspeed["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_override_deep_into_the_named_ds_config(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"deepspeed": "zero2"}))
    config = load_config(path, ["deepspeed.torch_autocast.enabled=false"])
    assert (zero_stage(config.deepspeed), precision(config.deepspeed)) == (2, "fp32")
    assert precision(load_config(path).deepspeed) == "autocast"


@pytest.mark.parametrize(
    ("augment", "fits"),
    [
        ({"color_jitter_prob": 0.8}, False),
        ({"gray_scale_prob": 1.0}, False),
        ({"color_jitter": [0.1, 0, 0, 0], "color_jitter_prob": 0.0}, False),
        ({"color_jitter": [0.1, 0, 0, 0]}, True),
        ({"gray_scale_prob": 0.2}, True),
        ({"shift": 0.1}, True),
    ],
)
def test_two_views_need_random_changes(augment: dict[str, Any], fits: bool) -> None:
    tree = MINIMAL | {"model": {"two_views": True}}
    tree = tree | {"data": tree["data"] | {"augment": augment}}
    if fits:
        check_config(tree, "test")
        return
    with pytest.raises(ValueError, match="the two views are identical"):
        check_config(tree, "test")
