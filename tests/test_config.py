"""Settings: recipes, overrides, the batch algebra, the two owners, the rendered ds_config, the dry run."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.arguments import count_ranks, describe_run, parse_args
from disco_ds.config import BASE_BATCH, PACKAGE, Config, check_config, find_recipe, load_config, render_ds_config
from disco_ds.ds_config import (
    DEFAULTS,
    OWNED_BY_RECIPE,
    REFUSED_KEYS,
    find_ds_configs,
    merge,
    precision,
    read_ds_config,
    stage,
)

RECIPES = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml"))
BUNDLED = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
MINIMAL: dict[str, Any] = {
    "name": "test",
    "global_batch": 64,
    "micro_batch": 16,
    "steps": 100,
    "data": {"source": "synthetic"},
    "optim": {"lr": 1e-3, "warmup_steps": 10},
    "deepspeed": {},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def settings(**changes: Any) -> Config:
    return check_config(merge(copy.deepcopy(MINIMAL), changes), "test")


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Path -> value of everything that is not a mapping."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return found


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
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ValueError, match=re.escape(f"recipe {path} does not exist")):
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


def test_override_leaves_its_neighbours_and_replaces_a_whole_mapping(recipe: Path) -> None:
    config = load_config(recipe, ["optim.warmup_steps=3", "data.augment={zoom: 0.1}", "data.augment.shift=0.2"])
    assert (config.optim.lr, config.optim.warmup_steps) == (1e-3, 3)
    assert (config.data.augment.zoom, config.data.augment.shift) == (0.1, 0.2)
    assert config.data.source == "synthetic"
    assert load_config(recipe, ["optim={warmup_steps: 3}"]).optim.lr is None


def test_override_later_wins(recipe: Path) -> None:
    assert load_config(recipe, ["seed=1", "seed=2"]).seed == 2


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
    overrides = ["deepspeed=zero3", "deepspeed.zero_optimization.stage=2", "deepspeed.fp16.loss_scale=1e2"]
    config = load_config(recipe, overrides[::-1] if swap else overrides)
    bundled = read_ds_config("zero3", recipe.parent)
    assert config.deepspeed == merge(bundled, {"zero_optimization": {"stage": 2}, "fp16": {"loss_scale": 100.0}})
    assert config.deepspeed["zero_optimization"]["overlap_comm"] is True


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
        ("optim.learning_rate=3", r"unknown key optim.learning_rate; valid: .*\blr\b"),
        ("optim.warmup=3", r"unknown key optim.warmup; did you mean warmup_steps\?"),
        ("data.augment.rotate=3", r"unknown key data.augment.rotate; did you mean rotate_degrees\?"),
        ("data.zzz=3", "unknown key data.zzz; valid: source, shards"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(recipe, [override])


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
        (["optim.name=adam"], "optim.name: .*'adamw', 'lion' or 'sgd'.*got 'adam'"),
        (["optim.betas=[0.9]"], "optim.betas.1 is missing"),
        (["optim.schedule=linear"], "optim.schedule: "),
        (["optim.schedule=cooldown"], r"optim.cooldown_steps \(0\) goes with optim.schedule=cooldown"),
        (["optim.cooldown_steps=5"], r"optim.cooldown_steps \(5\) goes with .* \(cosine\)"),
        (["optim.warmup_steps=101"], r"101 \+ 0\) exceed the run's 100 steps"),
        (["optim.schedule=cooldown", "optim.cooldown_steps=91"], r"10 \+ 91\) exceed the run's 100 steps"),
        (["model.patch_dropout=1"], "model.patch_dropout: .*less than 1"),
        (["model.lock_image=true", "model.lock_text=true"], "nothing is left to train"),
        (["model=3"], "model: .*got 3"),
        (["data.source=shards"], "data.shards is missing"),
        (["data.captions={a: -1}"], "data.captions needs templates"),
        (["data.captions={a: 0}"], "data.captions needs templates"),
        (["data.crop_scale=[0.9, 0.1]"], "data.crop_scale must be"),
        (["data.crop_scale=[0.5, 1.1]"], "data.crop_scale must be"),
        (["data.crop_ratio=[2, 1]"], "data.crop_ratio must be"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last: "),
        (["steps=null"], "either steps or samples, got steps=None, samples=None"),
        (["samples=6400"], "either steps or samples, got steps=100, samples=6400"),
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
    nearest = int(str(caught.value).rpartition("nearest: ")[2])
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


# The ds_config


def test_bundled_ds_configs_are_these() -> None:
    assert sorted(path.stem for path in find_ds_configs().glob("*.json")) == sorted(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_ds_config_is_rendered_whole_and_accepted_by_deepspeed(name: str, recipe: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    given = json.loads((find_ds_configs() / f"{name}.json").read_text())
    config = load_config(recipe, [f"deepspeed={name}"])
    assert config.deepspeed == given
    rendered = render_ds_config(config, 1)
    for path, value in leaves(given).items():
        assert leaves(rendered)[path] == value
    accepted = DeepSpeedConfig(copy.deepcopy(rendered))
    assert accepted.zero_optimization_stage == stage(given) == int(name[4])
    assert accepted.gradient_clipping == 0.0
    assert (accepted.train_batch_size, accepted.gradient_accumulation_steps) == (64, 4)
    assert precision(given) == "autocast"
    assert str(accepted.communication_data_type) == "torch.float32"


def test_rendered_ds_config_states_every_default(recipe: Path) -> None:
    rendered = leaves(render_ds_config(settings(), 1))
    for path, value in leaves(DEFAULTS).items():
        assert rendered[path] == value
    assert rendered["gradient_clipping",] == 0.0
    assert render_ds_config(settings(optim={"clip_norm": 0.5}), 1)["gradient_clipping"] == 0.5


def test_rendered_ds_config_keeps_what_the_file_says_and_changes_nothing_else() -> None:
    before = copy.deepcopy(DEFAULTS)
    given: dict[str, Any] = {
        "zero_optimization": {"stage": 2, "reduce_scatter": False, "offload_optimizer": {"device": "cpu"}},
        "communication_data_type": "bf16",
    }
    config = settings(deepspeed=copy.deepcopy(given))
    rendered = render_ds_config(config, 1)
    assert rendered["zero_optimization"] == DEFAULTS["zero_optimization"] | given["zero_optimization"]
    assert rendered["communication_data_type"] == "bf16"
    rendered["zero_optimization"]["stage"] = 9
    rendered["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
    assert config.deepspeed == given
    assert before == DEFAULTS


def test_rendered_ds_config_writes_tensorboard_into_the_run_folder(tmp_path: Path) -> None:
    expected = {"enabled": True, "output_path": str(tmp_path), "job_name": "tensorboard"}
    assert render_ds_config(settings(), 1, tmp_path)["tensorboard"] == expected
    assert "tensorboard" not in render_ds_config(settings(), 1)
    assert "tensorboard" not in render_ds_config(settings(log={"tensorboard": False}), 1, tmp_path)


def test_autocast_reduces_in_fp32_unless_modules_are_given() -> None:
    autocast: dict[str, Any] = {"enabled": True, "dtype": "bfloat16"}
    rendered = render_ds_config(settings(deepspeed={"torch_autocast": autocast}), 1)
    assert rendered["torch_autocast"]["lower_precision_safe_modules"] == []
    autocast["lower_precision_safe_modules"] = ["torch.nn.Linear"]
    rendered = render_ds_config(settings(deepspeed={"torch_autocast": autocast}), 1)
    assert rendered["torch_autocast"]["lower_precision_safe_modules"] == ["torch.nn.Linear"]


@pytest.mark.parametrize("key", OWNED_BY_RECIPE)
def test_key_owned_twice_names_both_owners(key: str) -> None:
    for value in (1, {}, None, "auto"):
        with pytest.raises(ValueError, match=f"ds_config key {key} and the recipe's {OWNED_BY_RECIPE[key]} own"):
            render_ds_config(settings(deepspeed={key: value}), 1)


def test_keys_owned_by_the_recipe_are_at_least_these() -> None:
    assert {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
    } <= set(OWNED_BY_RECIPE)


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_key_that_deepspeed_lost_or_we_refuse_says_why(key: str) -> None:
    with pytest.raises(ValueError, match=f"ds_config key {key} is not supported: {REFUSED_KEYS[key]}"):
        render_ds_config(settings(deepspeed={key: {}}), 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero_optimisation": {}}, r"unknown key zero_optimisation; did you mean zero_optimization\?"),
        ({"stage": 3}, "unknown key stage"),
        ({"overlap_comm": True}, "unknown key overlap_comm"),
        ({"zero_optimization": {"stge": 3}}, r"unknown key zero_optimization.stge; did you mean stage\?"),
        ({"zero_optimization": {"zero_allow_untested_optimizer": True}}, "unknown key zero_optimization.zero_allow"),
        ({"bf16": {"loss_scale": 0}}, "unknown key bf16.loss_scale"),
        ({"fp16": {"enabeld": True}}, r"unknown key fp16.enabeld; did you mean enabled\?"),
        ({"torch_autocast": {"dtpe": "bfloat16"}}, r"unknown key torch_autocast.dtpe; did you mean dtype\?"),
        ({"zero_optimization": 3}, "zero_optimization must be a mapping, got 3"),
        ({"bf16": None}, "bf16 must be a mapping, got None"),
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, got True"),
        ({"zero_optimization": {"stage": "2"}}, "stage must be 0, 1, 2 or 3, got '2'"),
    ],
)
def test_ds_config_unknown_or_misplaced_key_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render_ds_config(settings(deepspeed=given), 1)


def test_ds_config_suggestion_is_never_a_key_of_the_recipe() -> None:
    with pytest.raises(ValueError) as caught:
        render_ds_config(settings(deepspeed={"gradient_clippin": 1.0}), 1)
    assert "gradient_clipping" not in str(caught.value)


def test_read_ds_config_path_beside_the_recipe_and_base(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"deepspeed": "mine.json"}))
    assert stage(load_config(path).deepspeed) == 2
    entry = {"base": "mine.json", "zero_optimization": {"stage": 1}}
    path.write_text(yaml.safe_dump(MINIMAL | {"deepspeed": entry}))
    assert load_config(path).deepspeed == {"zero_optimization": {"stage": 1, "overlap_comm": True}}


@pytest.mark.parametrize(("text", "words"), [("{", "is not valid JSON"), ("[]", "expected a JSON object, got list")])
def test_read_ds_config_malformed_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"mine.json.*{words}"):
        read_ds_config(str(path), tmp_path)


# Precision


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "autocast"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
    ],
)
def test_precision_at_each_stage_is_accepted_or_refused(given: dict[str, Any], kind: str, level: int) -> None:
    given = given | {"zero_optimization": {"stage": level}}
    assert precision(given) == kind
    if level == 0 and kind in ("bf16", "fp16"):
        with pytest.raises(ValueError, match=f"{kind}.enabled at ZeRO 0 is refused"):
            render_ds_config(settings(deepspeed=given), 1)
    else:
        assert render_ds_config(settings(deepspeed=given), 1)["zero_optimization"]["stage"] == level


def test_precision_stage_is_zero_when_the_file_is_silent() -> None:
    with pytest.raises(ValueError, match=r"bf16\.enabled at ZeRO 0"):
        render_ds_config(settings(deepspeed={"bf16": {"enabled": True}}), 1)


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "fp16", "float32"])
def test_autocast_of_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"torch_autocast.dtype {dtype} is refused"):
        render_ds_config(settings(deepspeed={"torch_autocast": {"enabled": True, "dtype": dtype}}), 1)


@pytest.mark.parametrize("pair", [("bf16", "fp16"), ("torch_autocast", "bf16"), ("torch_autocast", "fp16")])
def test_two_precisions_at_once_are_refused(pair: tuple[str, str]) -> None:
    given = {"zero_optimization": {"stage": 1}} | {name: {"enabled": True} for name in pair}
    with pytest.raises(ValueError, match=f"{pair[0]} and {pair[1]} are both enabled"):
        render_ds_config(settings(deepspeed=given), 1)


def test_bf16_without_its_overflow_check_is_refused() -> None:
    given = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "check_grad_overflow": False}}
    with pytest.raises(ValueError, match="check_grad_overflow=false is refused"):
        render_ds_config(settings(deepspeed=given), 1)


@pytest.mark.parametrize("value", [1, "true", "yes"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_precision_enabled_by_another_word_for_true_is_refused_or_understood(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.enabled"):
        render_ds_config(settings(deepspeed={name: {"enabled": value}}), 1)


# Round trip


@pytest.mark.parametrize("name", RECIPES)
def test_to_yaml_of_a_recipe_loads_as_the_same_settings(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = load_config(name)
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


def test_to_yaml_of_every_kind_of_value_loads_as_the_same_settings(tmp_path: Path) -> None:
    config = settings(
        name="näme é 'quoted' = #1",
        runs="a folder/with spaces",
        steps=None,
        samples=10_000,
        model={"pretrained": "weights dir/w.pt", "patch_dropout": 1e-7},
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


# The dry run


def disco_ds(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disco_ds", "train", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_dry_run_counts_the_slots_of_the_hostfile(tmp_path: Path) -> None:
    hosts = tmp_path / "two hosts"
    hosts.write_text("# ours\nfirst slots=3\n\nsecond slots=1  # small\n")
    done = disco_ds("--config", "quickstart", "--dry-run", "--hostfile", str(hosts), "micro_batch=8", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "global batch 128 = 4 ranks x 8 micro-batch x 4 micro-batches per rank" in done.stdout
    assert '"gradient_accumulation_steps": 4' in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["two hosts"], "a dry run writes nothing"


def test_dry_run_mistakes_exit_with_2_and_one_line(tmp_path: Path) -> None:
    done = disco_ds("--config", "quickstart", "--dry-run", "--hostfile", "missing", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no hostfile missing")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_dry_run_imports_no_model_library(tmp_path: Path) -> None:
    script = (
        "import sys; from disco_ds.__main__ import main; from disco_ds.config import load_config"
        "; load_config('quickstart')"
        "; early = {'torch', 'deepspeed'} & set(sys.modules); code = main()"
        "; print('\\nseen', code, early, {'open_clip', 'torchvision', 'timm', 'webdataset'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, "train", "--config", "quickstart", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "seen 0 set() set()"


@pytest.mark.parametrize(("text", "ranks"), [("a slots=2\nb slots=6\n", 8), ("localhost slots=1", 1)])
def test_count_ranks_sums_the_slots(text: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert count_ranks(None, path) == ranks


@pytest.mark.parametrize("text", ["", "a", "a slots=x", "a slots=1\na slots=1"])
def test_count_ranks_malformed_hostfile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match="Hostfile"):
        count_ranks(None, path)


def test_count_ranks_without_a_hostfile() -> None:
    assert [count_ranks(None, None), count_ranks(5, None)] == [1, 5]


def test_parse_args_takes_overrides_and_the_launchers_rank() -> None:
    args = parse_args(["--local_rank=1", "--config", "x", "a=1", "b.c=2", "--resume", "latest"])
    assert (args.config, args.overrides, args.resume, args.dry_run) == ("x", ["a=1", "b.c=2"], "latest", False)


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config", "x", "--ranks", "1", "--hostfile", "f"]])
def test_parse_args_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert "usage: disco_ds.train" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key",
    [
        *("prescale_gradients", "compile", "zero_optimization.zenflow", "zero_optimization.zero_quantized_gradients"),
        *("zero_optimization.compute_grad_norm", "bf16.bf16_master_weights_and_grads"),
    ],
)
def test_ds_config_key_that_changes_the_gradient_is_refused(key: str) -> None:
    section, _, inner = key.rpartition(".")
    tree: dict[str, Any] = {section: {inner: True}} if section else {inner: True}
    with pytest.raises(ValueError, match=f"ds_config key {re.escape(key)} is not supported"):
        render_ds_config(settings(deepspeed=tree), 1)


def test_data_timeout_longer_than_the_collectives_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.timeout_s \(300\) must be below timeout_s \(100\)"):
        settings(timeout_s=100)


def test_compile_at_zero_3_is_refused() -> None:
    deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=r"model\.compile at ZeRO 3 is refused"):
        render_ds_config(settings(deepspeed=deepspeed, model={"compile": True}), 1)
