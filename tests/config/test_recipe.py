"""Settings: recipes, overrides, keys and values, the batch algebra, the written config.yaml."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.cli.dry_run import describe_run
from disco_ds.config import BASE_BATCH, PACKAGE, check_config, find_recipe, load_config, render_ds_config
from disco_ds.config.ds_config import (
    merge,
    precision,
    read_ds_config,
    stage,
)
from helpers.minimal import MINIMAL, settings

RECIPES = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml"))


# Recipes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_bundled_recipe_loads_and_dry_runs(name: str, ranks: int) -> None:
    config = load_config(name)
    ranks = config.ranks or ranks
    text = describe_run(config, ranks)
    assert f"global batch {config.global_batch:,} = {ranks} ranks x {config.micro_batch:,} micro-batch" in text
    settings_text, _, ds_config_text = text.partition("\nds_config.json:\n")
    assert yaml.safe_load(settings_text)["name"] == config.name
    ds_config, _ = json.JSONDecoder().raw_decode(ds_config_text)
    assert ds_config == render_ds_config(config, ranks)


def test_bundled_recipes_include_the_quickstart() -> None:
    assert "quickstart" in RECIPES


def test_recipe_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'quikstart'; did you mean quickstart\?; known: .*quickstart"):
        load_config("quikstart")


def test_recipe_missing_file_is_named(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "missing.yaml", "does not exist"), (tmp_path, "is not a file")):
        with pytest.raises(ValueError, match=re.escape(f"recipe {path} {problem}")):
            load_config(path)
    assert find_recipe("quickstart") == PACKAGE / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("a: !!python/object:os.system 1", "is not valid YAML"),
        ("", "expected a mapping of settings, got NoneType"),
        ("[1, 2]", "expected a mapping of settings, got list"),
        ("name: x", "global_batch is missing\n  micro_batch is missing\n  data is missing"),
        ("1: 2", "keys should be strings, got 1"),
    ],
)
def test_recipe_malformed_is_refused_naming_the_file(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load_config(path)
    assert words in str(caught.value)


def test_recipe_that_is_not_text_is_refused_naming_the_file(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_config(path)


def test_recipe_without_a_loss_has_the_one_that_the_readme_recommends(recipe: Path) -> None:
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    (by_default,) = (line for line in readme.splitlines() if line.endswith("| by default |"))
    assert by_default.startswith(f"| `{load_config(recipe).loss.name}` |")
    assert load_config(recipe, ["loss.options={tile: 4}"]).loss.name == "disco_fused"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("seed: 1\nseed: 1", "seed"),
        ("loss: {name: clip, options: {}, name: disco}", "name"),
        ("eval: &a {labelled: {'b': x, b: y}}", "b"),
        ("optim: {}", "optim"),  # with the one before
    ],
)
def test_recipe_key_given_twice_is_refused(text: str, key: str, recipe: Path) -> None:
    with recipe.open("a") as file:
        file.write(f"{text}\n")
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(recipe))}.*key '{key}' is given twice"):
        load_config(recipe)


def test_recipe_may_override_what_it_merges(recipe: Path) -> None:
    with recipe.open("a") as file:
        file.write("model: &base {name: RN50, max_scale: 50}\nloss: {options: {<<: *base, name: x}}\n")
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
        (["data.shards=/data/0.tar", "data.shards=/data/1.tar", "data.shards=/data/2.tar"], "data.shards"),
        (["seed=1", "optim.eps=1e-8", "seed=1"], "seed"),
        (["optim={eps: 1e-8}", "optim={lr: 1}"], "optim"),
        (["optim={lr: 1e-3}", "optim.lr=1e-4"], "optim.lr"),
        (["optim.lr=1e-4", "optim={lr: 1e-3}"], "optim.lr"),
        (["optim={image: {lr_factor: 2}}", "optim.image={weight_decay: 0}"], "optim.image"),
        (["deepspeed=zero1", "deepspeed=zero2"], "deepspeed"),
        (["deepspeed={zero_optimization: {stage: 1}}", "deepspeed.zero_optimization.stage=2"], "deepspeed.zero"),
        (["loss.options={a: 1, a: 2}"], "a"),
    ],
)
def test_override_of_a_key_given_twice_is_refused(overrides: list[str], key: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(key)}\S* is given twice"):
        load_config(recipe, overrides)


def test_override_of_a_whole_mapping_leaves_what_others_put_into_it(recipe: Path) -> None:
    words = ["data.augment.shift=0.2", "data.augment={zoom: 0.1}", "deepspeed.zero_optimization.stage=2"]
    words += ["deepspeed=zero1", "loss.options.tile=[4, 4]", "loss={name: inf_cl}"]
    one, other = load_config(recipe, words), load_config(recipe, words[::-1])
    assert one == other
    assert (one.data.augment.shift, one.data.augment.zoom, one.loss.name) == (0.2, 0.1, "inf_cl")
    assert (stage(one.deepspeed), one.loss.options) == (2, {"tile": [4, 4]})


def test_override_leaves_its_neighbours_and_replaces_a_whole_mapping(recipe: Path) -> None:
    config = load_config(recipe, ["optim.warmup_steps=3", "data.augment={zoom: 0.1}", "data.augment.shift=0.2"])
    assert (config.optim.lr, config.optim.warmup_steps) == (1e-3, 3)
    assert (config.data.augment.zoom, config.data.augment.shift) == (0.1, 0.2)
    assert config.data.source == "synthetic"
    assert load_config(recipe, ["optim={warmup_steps: 3}"]).optim.lr is None


@pytest.mark.parametrize("item", ["seed", "=3", "optim.=3", ".lr=3", "optim..lr=3"])
def test_override_of_another_form_is_refused(item: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"override {item!r} is not of the form a.b=value")):
        load_config(recipe, [item])


def test_override_malformed_value_is_named(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"override 'optim.betas=\[1' is not valid YAML"):
        load_config(recipe, ["optim.betas=[1"])


def test_override_deeper_than_a_value_is_refused_naming_it(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"global_batch: .*got \{'x': 3\}"):
        load_config(recipe, ["global_batch.x=3"])


@pytest.mark.parametrize("swap", [False, True])
def test_override_of_the_ds_config_then_deeper(swap: bool, recipe: Path) -> None:
    overrides = ["deepspeed=zero3_offload", "deepspeed.zero_optimization.stage=2", "deepspeed.fp16.loss_scale=1e2"]
    config = load_config(recipe, overrides[::-1] if swap else overrides)
    bundled = read_ds_config("zero3_offload", recipe.parent)
    assert config.deepspeed == merge(bundled, {"zero_optimization": {"stage": 2}, "fp16": {"loss_scale": 100.0}})
    assert config.deepspeed["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_override_deep_into_the_named_ds_config(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"deepspeed": "zero2"}))
    config = load_config(path, ["deepspeed.torch_autocast.enabled=false"])
    assert (stage(config.deepspeed), precision(config.deepspeed)) == (2, "fp32")
    assert precision(load_config(path).deepspeed) == "autocast"


# Keys and values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("modle=3", r"unknown key modle; did you mean model\?"),
        ("globalbatch=3", r"unknown key globalbatch; did you mean global_batch\?"),
        ("optim.learning_rate=3", r"unknown key optim.learning_rate; here it is optim.lr"),
        ("optim.warmup=3", r"unknown key optim.warmup; here it is optim.warmup_steps"),
        ("optim.warm_up=3", r"unknown key optim.warm_up; did you mean warmup_steps\?"),
        ("data.augment.rotate=3", r"unknown key data.augment.rotate; did you mean rotate_degrees\?"),
        ("data.zzz=3", "unknown key data.zzz; valid: source, shards"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(recipe, [override])


@pytest.mark.parametrize("override", ["loss.options.wire=bf16", "loss={name: inf_cl, options: {wire: bf16}}"])
def test_renamed_key_is_refused_naming_the_new_one(override: str, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"loss": {"name": "inf_cl", "options": {"wire": "bf16"}}}))
    for arguments, origin in (([recipe, [override]], f"override {override!r}"), ([path], str(path))):
        with pytest.raises(ValueError) as caught:
            load_config(*arguments)
        assert str(caught.value) == f"{origin}: loss.options.wire is now called loss.options.comm_dtype"
    own = load_config(recipe, ["loss.name=package.module:Own", "loss.options.wire=bf16"])
    assert own.loss.options == {"wire": "bf16"}, "an option of a user's own loss is called as the user likes"


def test_renamed_key_in_a_run_folders_settings_is_translated(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"loss": {"name": "inf_cl", "options": {"wire": "bf16", "tile": [8, 8]}}}))
    with pytest.raises(ValueError, match="now called"):
        load_config(path)
    (tmp_path / "ds_config.json").write_text("{}")
    assert load_config(path).loss.options == {"tile": [8, 8], "comm_dtype": "bf16"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["global_batch=0"], "global_batch: .*greater than 0, got 0"),
        (["micro_batch=-1"], "micro_batch: .*greater than 0"),
        (["global_batch=1.5"], "global_batch: .*integer"),
        (["seed=-1"], "seed: .*greater than or equal to 0"),
        (["optim.lr=0"], "optim.lr: .*greater than 0"),
        (["optim.lr=.nan"], "optim.lr: "),
        (["optim.lr=fast"], "optim.lr: .*number.*got 'fast'"),
        (["optim.name=adam"], "optim.name: .*'adamw', 'lamb', 'lion' or 'sgd'.*got 'adam'"),
        (["optim.betas=[0.9]"], "optim.betas.1 is missing"),
        (["optim.schedule=linear"], "optim.schedule: "),
        (["optim.schedule=cooldown"], r"optim.cooldown_steps \(0\) goes with optim.schedule=cooldown"),
        (["optim.cooldown_steps=5"], r"optim.cooldown_steps \(5\) goes with .* \(cosine\)"),
        (["optim.warmup_steps=101"], r"101 \+ 0\) exceed the run's 100 steps; set optim.warmup_steps=10, for instance"),
        (["optim.schedule=cooldown", "optim.cooldown_steps=91"], r"10 \+ 91\) exceed the run's 100 steps"),
        (["model.patch_dropout=1"], "model.patch_dropout: .*less than 1"),
        (["model.lock_image=true", "model.lock_text=true"], "nothing is left to train"),
        (["model.lock_text=true", "optim.text.lr_factor=2"], "optim.text is of a tower that is not trained"),
        (["optim.image.layer_decay=1.1"], "optim.image.layer_decay: .*less than or equal to 1"),
        (["model=3"], "model: .*got 3"),
        (["data.source=shards"], "data.shards is missing"),
        (["data.captions={a: -1}"], "data.captions needs templates"),
        (["data.captions={a: 0}"], "data.captions needs templates"),
        (["data.crop_scale=[0.9, 0.1]"], "data.crop_scale must be"),
        (["data.crop_scale=[0.5, 1.1]"], "data.crop_scale must be"),
        (["data.crop_ratio=[2, 1]"], "data.crop_ratio must be"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last: "),
        (["steps=null"], "give one of steps, samples and epochs, got steps=None, samples=None, epochs=None"),
        (["samples=6400"], "got steps=100, samples=6400, epochs=None; NAME=null takes one away"),
        (["steps=null", "samples=63"], r"samples \(63\) is less than one global_batch \(64\)"),
        (["steps=0"], "steps: .*greater than 0"),
        (["deepspeed=zero9"], "no file 'zero9'; bundled: zero0, zero1"),
        (["deepspeed=3"], "deepspeed must be a name, a path or a mapping, got 3"),
        pytest.param(
            ["optim.betas=[0.9, 5]"],
            "optim.betas",
        ),
    ],
)
def test_invalid_value_is_refused_on_load(overrides: list[str], words: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(recipe, overrides)


def test_settings_are_frozen() -> None:
    config = settings()
    for target, name in ((config, "seed"), (config.optim, "lr")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(target, name, 3)


# Batch algebra


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "ranks", "count"), [(64, 16, 1, 4), (64, 16, 2, 2), (64, 16, 4, 1), (96, 8, 3, 4)]
)
def test_batch_algebra_is_exact(global_batch: int, micro_batch: int, ranks: int, count: int) -> None:
    config = settings(global_batch=global_batch, micro_batch=micro_batch)
    assert config.num_micro_batches(ranks) == count
    rendered = render_ds_config(config, ranks)
    assert rendered["train_batch_size"] == global_batch
    assert rendered["train_micro_batch_size_per_gpu"] == micro_batch
    assert rendered["gradient_accumulation_steps"] == count
    words = f"global batch {global_batch} = {ranks} ranks x {micro_batch} micro-batch x {count} micro-batches per rank"
    assert words in config.describe(ranks)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 16), (3, 8), (5, 7), (8, 64)])
@pytest.mark.parametrize("global_batch", [1, 7, 50, 97, 100, 511, 1001])
def test_batch_that_does_not_divide_names_the_nearest_that_does(
    global_batch: int, micro_batch: int, ranks: int
) -> None:
    with pytest.raises(ValueError, match=f"{ranks} x {micro_batch} = {ranks * micro_batch}") as caught:
        settings(global_batch=global_batch, micro_batch=micro_batch).num_micro_batches(ranks)
    nearest = int(str(caught.value).rpartition("nearest: global_batch=")[2])
    assert settings(global_batch=nearest, micro_batch=micro_batch).num_micro_batches(ranks) >= 1
    working = [ranks * micro_batch * count for count in range(1, 300)]
    assert abs(nearest - global_batch) == min(abs(value - global_batch) for value in working)


def test_ranks_other_than_the_recipes_name_a_missing_hostfile() -> None:
    config = settings(ranks=4)
    assert config.num_micro_batches(4) == 1
    with pytest.raises(ValueError, match="is for 4 ranks, this run has 1: the likely cause is a missing hostfile"):
        config.num_micro_batches(1)
    assert settings().num_micro_batches(1) == 4


@pytest.mark.parametrize("ranks", [0, -1])
def test_ranks_below_one_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="ranks"):
        settings().num_micro_batches(ranks)


def test_length_in_samples_is_whole_steps() -> None:
    config = settings(steps=None, samples=64 * 100 + 63)
    assert config.num_steps == 100
    assert "100 steps, 6,400 samples" in config.describe(1)
    assert settings(steps=77).num_steps == 77


def test_peak_lr_follows_the_batch_unless_given() -> None:
    assert settings().peak_lr == 1e-3
    optim = {"lr": None, "base_lr": 5e-4}
    assert settings(optim=optim, global_batch=BASE_BATCH).peak_lr == pytest.approx(5e-4)
    assert settings(optim=optim, global_batch=BASE_BATCH // 4).peak_lr == pytest.approx(1.25e-4)
    assert BASE_BATCH == 32768


# Round trip


@pytest.mark.parametrize("name", RECIPES)
def test_to_yaml_of_a_recipe_loads_as_the_same_settings(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = load_config(name)
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


def test_to_yaml_of_every_kind_of_value_loads_as_the_same_settings(tmp_path: Path) -> None:
    config = settings(
        name="näme é = 1",
        runs="a folder/with spaces",
        steps=None,
        samples=10_000,
        model={"pretrained": "weights dir/w.pt", "patch_dropout": 1e-7, "name": "é 'quoted' = #1"},
        loss={"options": {"a": 1e-7, "b": [1, {"c": None}], "d": "yes", "e": True}},
        data={"captions": {"{json[a: b]}": 1e-5, "{txt}": 3}, "crop_scale": [0.25, 1], "shards": "bundled:x"},
        optim={"lr": 1e-22, "eps": 1e-8, "betas": [0.9, 0.999], "weight_decay": 1e16},
        eval={"labelled": {"null": "x", "1": "y"}},
        deepspeed={"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "bf16": {"enabled": True}},
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize("changes", [{"name": "1e3"}, {"loss": {"options": {"mode": "2e-7"}}}])
def test_to_yaml_of_text_that_looks_like_a_number_loads_as_text(changes: dict[str, Any], tmp_path: Path) -> None:
    config = settings(**changes)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


def test_data_timeout_longer_than_the_collectives_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.timeout_s \(300\) must be below timeout_s \(100\)"):
        settings(timeout_s=100)


def test_compile_at_zero_3_is_refused() -> None:
    deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=r"model\.compile at ZeRO 3 is refused"):
        render_ds_config(settings(deepspeed=deepspeed, model={"compile": True}), 1)


def test_lamb_above_zero_0_is_refused() -> None:
    def render(stage: int) -> None:
        changes = {"zero_optimization": {"stage": stage}}
        render_ds_config(settings(deepspeed=changes, optim={"name": "lamb", "warmup_steps": 0}), 1)

    render(0)
    with pytest.raises(ValueError, match=r"optim\.name=lamb at ZeRO 1 is refused: its trust ratio"):
        render(1)


def test_epochs_become_steps_when_the_samples_are_counted() -> None:
    config = settings(steps=None, epochs=2.5)
    with pytest.raises(ValueError, match="only when the samples of the data are counted"):
        _ = config.num_steps
    assert "2.5 epochs, whose steps are known when the samples of the data are counted" in config.describe(1)
    counted = config.with_steps(1000)
    assert (counted.num_steps, counted.steps, counted.epochs) == (39, 39, None)  # 2500 // 64
    assert check_config(counted.model_dump(mode="json"), "again") == counted
    with pytest.raises(ValueError, match=r"epochs \(2.5 of 25 samples\) is less than one global_batch \(64\)"):
        config.with_steps(25)
    with pytest.raises(ValueError, match="exceed the run's 9 steps"):
        config.with_steps(250)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch_size=256", r"unknown key batch_size; here it is micro_batch or global_batch; samples per rank"),
        ("accum_freq=2", r"unknown key accum_freq; here it is global_batch"),
        ("optim.wd=0.1", r"unknown key optim.wd; here it is optim.weight_decay"),
        ("lr=1e-3", r"unknown key lr; here it is optim.lr$"),
        ("precision=amp", r"unknown key precision; here it is deepspeed; bf16 autocast"),
        ("ema=0.999", r"unknown key ema; there is no moving average"),
        ("local-loss=true", r"unknown key local-loss; not needed: no loss here holds"),
    ],
)
def test_word_of_another_trainer_is_explained(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(recipe, [override])


def test_words_of_another_trainer_are_all_explained() -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_config("quickstart", ["lr=1", "wd=1", "beta1=1", "accum_freq=2", "batch_size=3", "precision=fp32"])
    assert str(caught.value).count("here it is") == 6
    assert "more problems" not in str(caught.value)
