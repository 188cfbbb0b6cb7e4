"""DeepSpeed's settings: the bundled ds_configs, keys that the recipe sets, the written ds_config.json, refused keys."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.config import load_config, render_ds_config
from disco_ds.config.ds_config import (
    DEFAULTS,
    OWNED_BY_RECIPE,
    REFUSED_KEYS,
    check_gradient,
    find_ds_configs,
    precision,
    read_ds_config,
    zero_stage,
)
from disco_ds.config.render import GRADIENT_BUCKET
from helpers.minimal import MINIMAL, settings

BUNDLED = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the path and value of everything that is not a mapping."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return found


def test_bundled_ds_configs_are_these() -> None:
    assert sorted(path.stem for path in find_ds_configs().glob("*.json")) == sorted(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_ds_config_is_rendered_whole_and_accepted_by_deepspeed(
    name: str, recipe: Path
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    given = json.loads((find_ds_configs() / f"{name}.json").read_text())
    config = load_config(recipe, [f"deepspeed={name}"])
    assert config.deepspeed == given
    rendered = render_ds_config(config, 1)
    for path, value in leaves(given).items():
        assert leaves(rendered)[path] == value
    accepted = DeepSpeedConfig(copy.deepcopy(rendered))
    assert accepted.zero_optimization_stage == zero_stage(given) == int(name[4])
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
        "zero_optimization": {
            "stage": 2,
            "reduce_scatter": False,
            "offload_optimizer": {"device": "cpu"},
        },
        "communication_data_type": "bf16",
    }
    config = settings(deepspeed=copy.deepcopy(given))
    rendered = render_ds_config(config, 1)
    buckets = {
        "reduce_bucket_size": GRADIENT_BUCKET,
        "overlap_comm": False,
        "contiguous_gradients": True,
    }
    assert (
        rendered["zero_optimization"]
        == DEFAULTS["zero_optimization"] | buckets | given["zero_optimization"]
    )
    assert rendered["communication_data_type"] == "bf16"
    rendered["zero_optimization"]["stage"] = 9
    rendered["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
    assert config.deepspeed == given
    assert before == DEFAULTS


@pytest.mark.parametrize("name", BUNDLED)
def test_buckets_and_overlap_depend_on_stage_and_micro_batches(
    name: str,
) -> None:
    for ranks, micro_batch in ((2, 32), (2, 8), (1, 64)):
        config = settings(deepspeed=read_ds_config(name, Path()), micro_batch=micro_batch)
        zero = render_ds_config(config, ranks)["zero_optimization"]
        if zero["stage"] == 0:
            assert not {"reduce_bucket_size", "overlap_comm"} & set(zero)
        else:
            assert 25e6 <= zero["reduce_bucket_size"] <= 50e6
            assert zero["overlap_comm"] is (zero["stage"] == 3 or (ranks, micro_batch) == (2, 32))
            # Without overlap, ZeRO 1 needs no buffer for the gradients.
            assert zero["contiguous_gradients"] is (zero["stage"] > 1 or zero["overlap_comm"])


def test_bucket_and_overlap_of_the_ds_config_are_kept() -> None:
    given = {"stage": 1, "reduce_bucket_size": 7_000_000, "overlap_comm": False}
    config = settings(deepspeed={"zero_optimization": given}, micro_batch=32)
    assert given.items() <= render_ds_config(config, 2)["zero_optimization"].items()


def test_throughput_timer_of_deepspeed_is_off_unless_asked_for() -> None:
    from deepspeed.utils.config import get_timers_config

    assert render_ds_config(settings(), 1)["timers"] == {"throughput": {"enabled": False}}
    assert not get_timers_config(render_ds_config(settings(), 1)).enabled
    given = {"throughput": {"enabled": True, "synchronized": False}}
    assert render_ds_config(settings(deepspeed={"timers": given}), 1)["timers"] == given
    assert get_timers_config(render_ds_config(settings(deepspeed={"timers": given}), 1)).enabled


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
        with pytest.raises(
            ValueError, match=f"ds_config key {key} .* recipe's {OWNED_BY_RECIPE[key]};"
        ):
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
def test_refused_key_is_refused_with_its_reason(key: str) -> None:
    with pytest.raises(
        ValueError, match=f"ds_config key {key} is not supported: {REFUSED_KEYS[key]}"
    ):
        render_ds_config(settings(deepspeed={key: "on"}), 1)


def test_refused_key_with_a_value_that_changes_nothing_is_accepted() -> None:
    given = {
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_optimization": {"stage": 1, "zero_quantized_weights": False},
        "bfloat16": {"enabled": False},
    }
    assert zero_stage(render_ds_config(settings(deepspeed=given), 1)) == 1


@pytest.mark.parametrize("changes", [{"ratio": 0.5}, {"super_offload": True}])
def test_offload_with_a_separate_optimizer_is_refused(changes: dict[str, Any]) -> None:
    offload = {"device": "cpu", **changes}
    given = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    with pytest.raises(ValueError, match="super_offload"):
        render_ds_config(settings(deepspeed=given), 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"zero_optimisation": {}},
            r"unknown key zero_optimisation; did you mean zero_optimization\?",
        ),
        ({"stage": 3}, "unknown key stage"),
        ({"overlap_comm": True}, "unknown key overlap_comm"),
        (
            {"zero_optimization": {"stge": 3}},
            r"unknown key zero_optimization.stge; did you mean stage\?",
        ),
        (
            {"zero_optimization": {"zero_allow_untested_optimizer": True}},
            "unknown key zero_optimization.zero_allow",
        ),
        ({"bf16": {"loss_scale": 0}}, "unknown key bf16.loss_scale"),
        ({"fp16": {"enabeld": True}}, r"unknown key fp16.enabeld; did you mean enabled\?"),
        (
            {"torch_autocast": {"dtpe": "bfloat16"}},
            r"unknown key torch_autocast.dtpe; did you mean dtype\?",
        ),
        ({"zero_optimization": 3}, "zero_optimization must be a mapping, got 3"),
        ({"bf16": None}, "bf16 must be a mapping, got None"),
        (
            {"timers": {"thruput": {"enabled": True}}},
            r"unknown key timers.thruput; did you mean throughput\?",
        ),
        ({"timers": None}, "timers must be a mapping, got None"),
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
    text = '{"zero_optimization": {"stage": 2,\n\t"overlap_comm": true}}'
    (tmp_path / "mine.json").write_text(text)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"deepspeed": "mine.json"}))
    assert zero_stage(load_config(path).deepspeed) == 2
    entry = {"base": "mine.json", "zero_optimization": {"stage": 1}}
    path.write_text(yaml.safe_dump(MINIMAL | {"deepspeed": entry}))
    assert load_config(path).deepspeed == {"zero_optimization": {"stage": 1, "overlap_comm": True}}


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
def test_precision_at_each_stage_is_accepted_or_refused(
    given: dict[str, Any], kind: str, level: int
) -> None:
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
    with pytest.raises(ValueError, match=f"torch_autocast.dtype={dtype} is refused"):
        render_ds_config(
            settings(deepspeed={"torch_autocast": {"enabled": True, "dtype": dtype}}), 1
        )


@pytest.mark.parametrize(
    "pair", [("bf16", "fp16"), ("torch_autocast", "bf16"), ("torch_autocast", "fp16")]
)
def test_two_precisions_at_once_are_refused(pair: tuple[str, str]) -> None:
    given = {"zero_optimization": {"stage": 1}} | {name: {"enabled": True} for name in pair}
    with pytest.raises(ValueError, match=f"{pair[0]} and {pair[1]} are both enabled"):
        render_ds_config(settings(deepspeed=given), 1)


def test_bf16_without_its_overflow_check_is_refused() -> None:
    given = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }
    with pytest.raises(ValueError, match="check_grad_overflow=false is refused"):
        render_ds_config(settings(deepspeed=given), 1)


@pytest.mark.parametrize("value", [1, "true", "yes"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_precision_enabled_by_another_word_for_true_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.enabled"):
        render_ds_config(settings(deepspeed={name: {"enabled": value}}), 1)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "prescale_gradients",
            "compile",
            "zero_optimization.zenflow",
            "zero_optimization.zero_quantized_gradients",
        ),
        *("zero_optimization.compute_grad_norm", "bf16.bf16_master_weights_and_grads"),
    ],
)
def test_ds_config_key_that_changes_the_gradient_is_refused(key: str) -> None:
    section, _, inner = key.rpartition(".")
    tree: dict[str, Any] = {section: {inner: "on"}} if section else {inner: "on"}
    with pytest.raises(ValueError, match=f"ds_config key {re.escape(key)} is not supported"):
        render_ds_config(settings(deepspeed=tree), 1)


def test_settings_of_a_custom_loop_are_refused_only_if_they_change_the_gradient() -> None:
    fine = {
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "Mean",
        "managed_gradient_accumulation": True,
        "amp": {"enabled": False},
        "zero_optimization": {"stage": 2, "zenflow": None, "zero_quantized_gradients": False},
        "comet": {"enabled": True, "api_key": "given"},
        "a key of the loop": 3,
    }
    check_gradient(fine)
    zero = fine["zero_optimization"]
    for changes, key in (
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types"),
        ({"bfloat16": {"enabled": True}}, "bfloat16"),
        (
            {"zero_optimization": zero | {"zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
        ),
        (
            {"zero_optimization": zero | {"compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm",
        ),
    ):
        with pytest.raises(
            ValueError, match=f"ds_config key {key} is not supported: {REFUSED_KEYS[key]}"
        ):
            check_gradient(fine | changes)
    with pytest.raises(ValueError, match=r"bf16\.enabled at ZeRO 0"):
        check_gradient(fine | {"bf16": {"enabled": True}, "zero_optimization": {}})
