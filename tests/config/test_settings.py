"""Settings: their keys and values, global batch = ranks x micro-batches x micro-batch size, the written config.yaml."""

from pathlib import Path
from typing import Any

import pytest

from disco_ds.config import (
    PACKAGE,
    check_config,
    load_config,
    make_schedule,
    render_ds_config,
)
from disco_ds.config.recipe import BASE_BATCH
from helpers.minimal import settings

RECIPES = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml"))


# Keys and values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("modle=3", r"unknown key modle; did you mean model\?"),
        ("globalbatch=3", r"unknown key globalbatch; did you mean global_batch\?"),
        ("optim.learning_rate=3", r"unknown key optim.learning_rate; here it is optim.lr"),
        ("optim.warmup=3", r"unknown key optim.warmup; here it is optim.warmup_steps"),
        ("optim.warm_up=3", r"unknown key optim.warm_up; did you mean warmup_steps\?"),
        (
            "data.augment.rotate=3",
            r"unknown key data.augment.rotate; did you mean rotate_degrees\?",
        ),
        ("data.zzz=3", "unknown key data.zzz; valid: source, options, shards"),
        ("stages=[{until: 64, imagesize: 3}]", r"stages.0.imagesize; did you mean image_size\?"),
        ("eval.probes.test.trian=a", r"unknown key eval.probes.test.trian; did you mean train\?"),
        ("teacher.modle=a", r"unknown key teacher.modle; did you mean model\?"),
        ("optim.ema.deacy=0.9", r"unknown key optim.ema.deacy; did you mean decay\?"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(recipe, [override])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["global_batch=0"], "global_batch must be greater than 0, got 0"),
        (["micro_batch=-1"], "micro_batch must be greater than 0, got -1"),
        (["global_batch=1.5"], "global_batch must be a valid integer, got 1.5"),
        (["seed=-1"], "seed .*equal to 0, got -1"),
        (["optim.lr=0"], "optim.lr must be greater than 0"),
        (["optim.lr=.nan"], "optim.lr "),
        (["optim.lr=fast"], "optim.lr must be a valid number, got 'fast'"),
        (["optim.name=adam"], "optim.name .*'adamw', .* or 'sgd'.*got 'adam'"),
        (["optim.betas=[0.9]"], "optim.betas.1 is missing"),
        (["optim.schedule=linear"], "optim.schedule .*got 'linear'"),
        (
            ["optim.schedule=cooldown"],
            "optim.cooldown_steps=0",
        ),
        (["optim.cooldown_steps=5"], "optim.schedule=cosine and optim.cooldown_steps=5"),
        (["model.patch_dropout=1"], "model.patch_dropout must be less than 1"),
        (["model.lock_image=true", "model.lock_text=true"], "model.lock_image and model.lock_text"),
        (["optim.image.layer_decay=1.1"], "optim.image.layer_decay .*equal to 1, got 1.1"),
        (["model=3"], "model must be a valid dictionary, got 3"),
        (["data.source=shards"], "data.shards is missing"),
        (["data.captions={a: -1}"], "data.captions: .*weight"),
        (["data.captions={a: 0}"], "data.captions: .*weight"),
        (["data.crop_scale=[0.9, 0.1]"], "data.crop_scale: .*low <= high"),
        (["data.crop_scale=[0.5, 1.1]"], "data.crop_scale.1 .*1.1"),
        (["data.crop_ratio=[2, 1]"], "data.crop_ratio: .*low <= high"),
        (["checkpoint.keep_last=0"], "checkpoint.keep_last must be greater than 0"),
        (
            ["steps=null"],
            "epochs and stages, got none",
        ),
        (["samples=6400"], "got steps=100 and samples=6400; .*=null"),
        (["steps=null", "samples=63"], "samples=63 .* global_batch=64"),
        (["steps=0"], "steps must be greater than 0"),
        (["deepspeed=zero9"], "'zero9'; .*: zero0, zero1"),
        (["deepspeed=3"], "deepspeed .*got 3"),
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
    ("global_batch", "micro_batch", "ranks", "count"),
    [(64, 16, 1, 4), (64, 16, 2, 2), (64, 16, 4, 1), (96, 8, 3, 4)],
)
def test_batch_algebra_is_exact(
    global_batch: int, micro_batch: int, ranks: int, count: int
) -> None:
    config = settings(global_batch=global_batch, micro_batch=micro_batch)
    assert config.num_micro_batches(ranks) == count
    rendered = render_ds_config(config, ranks)
    assert rendered["train_batch_size"] == global_batch
    assert rendered["train_micro_batch_size_per_gpu"] == micro_batch
    assert rendered["gradient_accumulation_steps"] == count
    words = f"global batch {global_batch} = {ranks} rank"
    assert config.describe(ranks).startswith(words)
    assert f" x micro-batch {micro_batch} x {count} per step" in config.describe(ranks)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 16), (3, 8), (5, 7), (8, 64)])
@pytest.mark.parametrize("global_batch", [1, 7, 50, 97, 100, 511, 1001])
def test_batch_that_does_not_divide_names_the_nearest_that_does(
    global_batch: int, micro_batch: int, ranks: int
) -> None:
    with pytest.raises(
        ValueError, match=f"{ranks} x {micro_batch} = {ranks * micro_batch}"
    ) as caught:
        settings(global_batch=global_batch, micro_batch=micro_batch).num_micro_batches(ranks)
    nearest = int(str(caught.value).rpartition("nearest: global_batch=")[2])
    assert settings(global_batch=nearest, micro_batch=micro_batch).num_micro_batches(ranks) >= 1
    working = [ranks * micro_batch * count for count in range(1, 300)]
    assert abs(nearest - global_batch) == min(abs(value - global_batch) for value in working)


def test_ranks_other_than_the_recipes_name_a_missing_hostfile() -> None:
    config = settings(ranks=4)
    assert config.num_micro_batches(4) == 1
    with pytest.raises(ValueError, match=r"4 ranks, .* has 1.*hostfile.*ranks=1"):
        config.num_micro_batches(1)
    assert settings().num_micro_batches(1) == 4


def test_length_in_samples_is_whole_steps() -> None:
    config = settings(steps=None, samples=64 * 100 + 63)
    assert config.find_end()[0] == 100
    assert "100 steps, 6,400 samples" in config.describe(1)
    assert settings(steps=77).find_end()[0] == 77
    # A resumed run whose batch has changed: 20 steps of another batch are done, and the next ones have 64 samples.
    assert "100 steps, 6,400 samples" in config.describe(1, step=20, samples=20 * 64)
    assert "110 steps, 6,400 samples" in config.describe(1, step=20, samples=10 * 64)


def test_peak_lr_follows_the_batch_unless_given() -> None:
    assert settings().peak_lr == 1e-3
    optim = {"lr": None, "base_lr": 5e-4}
    assert settings(optim=optim, global_batch=BASE_BATCH).peak_lr == pytest.approx(5e-4)
    assert settings(optim=optim, global_batch=BASE_BATCH // 4).peak_lr == pytest.approx(1.25e-4)
    assert BASE_BATCH == 32768
    for rule, expected in (("linear", 2e-3), ("sqrt", 1e-3), ("none", 5e-4)):
        found = settings(optim={**optim, "lr_rule": rule}, global_batch=4 * BASE_BATCH)
        assert found.peak_lr == pytest.approx(expected)


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
        data={
            "captions": {"{json[a: b]}": 1e-5, "{txt}": 3},
            "crop_scale": [0.25, 1],
            "shards": "bundled:x",
        },
        optim={"lr": 1e-22, "eps": 1e-8, "betas": [0.9, 0.999], "weight_decay": 1e16},
        eval={"labeled": {"null": "x", "1": "y"}},
        deepspeed={
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
            "bf16": {"enabled": True},
        },
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(path)
    assert again == config
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize(
    "teacher",
    [
        {"model": "ViT-B-32", "pretrained": "vit.pt", "weight": 0.5},
        {"image": "img.npy", "text": "txt.npy", "scale": [100, 50], "widths": [3, 4]},
    ],
)
def test_to_yaml_of_a_teacher_loads_as_the_same_settings(
    teacher: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(teacher=teacher, data={"source": "shards", "shards": "bundled:x"})
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("changes", [{"name": "1e3"}, {"loss": {"options": {"mode": "2e-7"}}}])
def test_to_yaml_of_text_that_looks_like_a_number_loads_as_text(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(**changes)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


def test_timeouts_of_the_data_follow_from_the_timeout_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(settings(timeout_s=100).to_yaml(), encoding="utf-8")
    data = load_config(path).data
    assert (data.worker_timeout_s, data.retry_s, data.remote.timeout_s) == (50, 10, 10)


def test_compile_at_zero_3_is_refused() -> None:
    deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=r"model\.compile=true at ZeRO 3"):
        render_ds_config(settings(deepspeed=deepspeed, model={"compile": True}), 1)


def test_lamb_above_zero_0_is_refused() -> None:
    def render(stage: int) -> None:
        changes = {"zero_optimization": {"stage": stage}}
        render_ds_config(settings(deepspeed=changes, optim={"name": "lamb", "warmup_steps": 0}), 1)

    render(0)
    with pytest.raises(ValueError, match=r"optim\.name=lamb at ZeRO 1 .*deepspeed=zero0"):
        render(1)


def test_epochs_become_steps_when_the_samples_are_counted() -> None:
    config = settings(steps=None, epochs=2.5)
    with pytest.raises(ValueError, match="only after the samples are counted"):
        config.find_end()
    assert "2.5 epochs" in config.describe(1)
    counted = config.with_samples(1000)
    assert (counted.samples, counted.epochs) == (2500, None)
    assert counted.find_end() == (39, 39 * 64)
    assert check_config(counted.model_dump(mode="json"), "again") == counted
    with pytest.raises(
        ValueError, match=r"global_batch=64 .* epochs=2.5, and the data has 25 samples"
    ):
        config.with_samples(25)
    with pytest.raises(ValueError, match="9 steps"):
        make_schedule(config.with_samples(250))


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ({"warmup_steps": 101}, r"101 \+ 0\) .* 100 steps.* optim.warmup_steps=10"),
        (
            {"warmup_steps": 10, "schedule": "cooldown", "cooldown_steps": 91},
            r"10 \+ 91\) .* 100 steps",
        ),
    ],
)
def test_warmup_and_cooldown_that_exceed_the_run_are_refused(
    optim: dict[str, Any], words: str
) -> None:
    config = settings(optim=optim)
    with pytest.raises(ValueError, match=words):
        make_schedule(config)
    # A resumed run with a larger batch still counts warmup in steps of its first batch.
    make_schedule(config, step=3, samples=192, previous_batch=64, warmup_batch=32)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "batch_size=256",
            r"unknown key batch_size; here it is micro_batch or global_batch; ",
        ),
        ("accum_freq=2", r"unknown key accum_freq; here it is global_batch"),
        ("optim.wd=0.1", r"unknown key optim.wd; here it is optim.weight_decay"),
        ("lr=1e-3", r"unknown key lr; here it is optim.lr$"),
        ("precision=amp", r"unknown key precision; here it is deepspeed; bf16 autocast"),
        ("ema=0.999", r"unknown key ema; here it is optim.ema"),
        ("local-loss=true", r"unknown key local-loss; not needed: "),
    ],
)
def test_word_of_another_trainer_is_explained(override: str, words: str, recipe: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_config(recipe, [override])


def test_words_of_another_trainer_are_all_explained() -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_config(
            "quickstart",
            ["lr=1", "wd=1", "beta1=1", "accum_freq=2", "batch_size=3", "precision=fp32"],
        )
    assert str(caught.value).count("here it is") == 6
    assert "more problems" not in str(caught.value)
