"""The DeepSpeed settings of a run (JSON): found, checked, completed and rendered.

DeepSpeed ignores keys it does not know and has defaults that change results; so every key is checked here, and the
rendered ds_config.json states all that matter. Imports DeepSpeed only to ask for its key names, when a file is checked.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from disco_ds.config.hints import shorten, suggest
from disco_ds.config.text_file import read_text

OWNED_BY_RECIPE = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "global_batch and micro_batch",
    "gradient_clipping": "optim.clip_norm",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "tensorboard": "log.tensorboard",
    "wandb": "log.wandb",
    "steps_per_print": "log.every_steps",
}
"""Keys of a ds_config that the recipe owns, and by what name."""

DEFAULTS: dict[str, Any] = {
    "zero_optimization": {
        "stage": 0,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "round_robin_gradients": False,
    },
    "torch_autocast": {"enabled": False},
    "bf16": {"enabled": False, "check_grad_overflow": True},
    "fp16": {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    },
    "communication_data_type": "fp32",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "wall_clock_breakdown": False,
    # On by default in DeepSpeed, and it waits for the device twice in every micro-batch; nobody reads it here.
    "timers": {"throughput": {"enabled": False}},
    "checkpoint": {"tag_validation": "Fail"},
}
"""Keys that change results, or cost time, and what we write when the file is silent."""

GRADIENT_BUCKET = 50_000_000
"""Elements of a gradient that ZeRO 1 to 3 reduce at a time where the file is silent.

DeepSpeed's own default is 500 million, which holds most CLIP models whole: nothing travels before the backward ends.
"""

_SWITCHES = ("disable_allgather", "dump_state", "memory_breakdown", "disable_python_gc", "wall_clock_breakdown")
VALUES: dict[str, tuple[Any, ...]] = {
    "communication_data_type": ("fp32", "fp16", "bf16"),
    "seq_parallel_communication_data_type": ("fp32", "fp16", "bf16"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
    **dict.fromkeys((*_SWITCHES, "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), (True, False)),
}
"""What keys outside the sections may say; DeepSpeed itself takes any value, or fails at the start."""

KNOWN_KEYS = {
    *OWNED_BY_RECIPE,
    *DEFAULTS,
    *("disable_allgather", "dump_state", "memory_breakdown", "disable_python_gc", "log_level"),
    *("activation_checkpointing", "comms_logger", "flops_profiler", "aio"),
    *("comet", "csv_monitor", "seq_parallel_communication_data_type"),
}
"""What DeepSpeed 0.19 reads at the top level and a CLIP trainer can use."""

REFUSED_KEYS = {
    "amp": "use torch_autocast",
    "bfloat16": "its name is bf16",
    "elasticity": "DeepSpeed 0.19 has removed it",
    "sparse_gradients": "DeepSpeed 0.19 has removed it",
    "managed_gradient_accumulation": "the step manages it",
    "gradient_allreduce_op": "the losses count on the mean over ranks",
    "data_types": "gradients are accumulated in the parameters' precision",
    "compile": "model.compile compiles the towers",
    "prescale_gradients": "DeepSpeed has it at ZeRO 0 and 1 only, and the mean over ranks is the same",
    "gradient_predivide_factor": "DeepSpeed has it at ZeRO 0 to 2 only, and the mean over ranks is the same",
    "zero_optimization.zenflow": "it applies another gradient than the step's",
    "zero_optimization.zero_quantized_gradients": "it rounds gradients to 4 bits",
    "zero_optimization.zero_quantized_weights": "it rounds weights to 8 bits",
    "zero_optimization.zero_quantized_nontrainable_weights": "it rounds weights to 8 bits",
    "zero_optimization.compute_grad_norm": "the norm is what clipping and the metrics go by",
    "bf16.bf16_master_weights_and_grads": "the optimizer's copy is fp32",
    "bf16.bf16_optimizer_states": "the optimizer's states are fp32",
    "bf16.immediate_grad_update": "it applies gradients before the step",
    "fp16.fp16_master_weights_and_grads": "the optimizer's copy is fp32",
    "comet.api_key": "settings are copied into run folders; set the environment variable COMET_API_KEY",
}
"""Keys, dotted inside a section, that would change the gradient, hold a secret or are gone from DeepSpeed, and why."""


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Put `changes` into `base`, mapping by mapping, in place."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base


def find_ds_configs() -> Path:
    """Folder of the bundled files: inside the installed package, or at the top of a clone."""
    package = Path(__file__).parents[1]
    return package / "ds_configs" if (package / "ds_configs").is_dir() else package.parent / "ds_configs"


def read_ds_config(entry: str | dict[str, Any], folder: Path) -> dict[str, Any]:
    """The mapping a recipe's `deepspeed` entry stands for.

    Args:    entry: a bundled name, a path (relative to `folder` or the working directory), or a mapping whose optional
             `base` names the file it changes.
    Raises:  ValueError for a file that is missing or not JSON.
    """
    if isinstance(entry, dict):
        base = entry.get("base")
        start = read_ds_config(base, folder) if base is not None else {}
        return merge(start, copy.deepcopy({key: value for key, value in entry.items() if key != "base"}))
    if not isinstance(entry, str):
        raise ValueError(f"deepspeed must be a name, a path or a mapping, got {entry!r}")
    known = {path.stem: path for path in sorted(find_ds_configs().glob("*.json"))}
    candidates = [known.get(entry), folder / entry, Path(entry)]
    path = next((item for item in candidates if item is not None and item.is_file()), None)
    if path is None:
        raise ValueError(f"deepspeed: no file {entry!r}; bundled: {', '.join(known)}")
    try:
        tree = json.loads(read_text(path, "ds_config"), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be settings") from None
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(tree).__name__}")
    return tree


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is given twice, of which the JSON reader would keep the last."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"key {twice!r} is given twice")
    return tree


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def complete_ds_config(ds_config: dict[str, Any], owned: dict[str, Any]) -> dict[str, Any]:
    """The file's keys, the recipe's (`owned`, by DeepSpeed's names), and every default that changes results.

    Raises: ValueError for unknown keys, keys with two owners, and combinations that DeepSpeed computes wrongly.
    """
    check_keys(ds_config)
    check_values(ds_config)
    check_precision(ds_config)
    rendered = merge(copy.deepcopy(DEFAULTS), copy.deepcopy(ds_config))
    if precision(rendered) == "autocast":
        # The list names the modules whose gradients may travel in 16 bits; DeepSpeed's own default is Linear and Conv.
        rendered["torch_autocast"].setdefault("lower_precision_safe_modules", [])
    zero, level = rendered["zero_optimization"], stage(rendered)
    if level:
        zero.setdefault("reduce_bucket_size", GRADIENT_BUCKET)
        # To overlap, ZeRO 1 and 2 wait for the device after every backward. The update waits too, so that costs little
        # where a step has one backward, and brings nothing where there is one rank.
        one_backward = owned["gradient_accumulation_steps"] == 1
        alone = owned["train_batch_size"] == owned["train_micro_batch_size_per_gpu"]
        zero.setdefault("overlap_comm", level == 3 or (one_backward and not alone))
    return rendered | owned


def precision(ds_config: dict[str, Any]) -> str:
    """One of autocast, bf16, fp16, fp32."""
    enabled = []
    for name in ("torch_autocast", "bf16", "fp16"):
        value = (ds_config.get(name) or {}).get("enabled", False)
        if not isinstance(value, bool):  # DeepSpeed would take 1, "yes" and more for true
            raise ValueError(f"ds_config: {name}.enabled must be true or false, got {value!r}")
        if value:
            enabled.append(name)
    if len(enabled) > 1:
        raise ValueError(f"ds_config: {' and '.join(enabled)} are both enabled; choose one")
    return {"torch_autocast": "autocast"}.get(enabled[0], enabled[0]) if enabled else "fp32"


def stage(ds_config: dict[str, Any]) -> int:
    """The ZeRO stage, 0 to 3."""
    value = (ds_config.get("zero_optimization") or {}).get("stage", 0)
    if value not in (0, 1, 2, 3) or isinstance(value, bool):
        raise ValueError(f"ds_config: zero_optimization.stage must be 0, 1, 2 or 3, got {value!r}")
    return value


def check_keys(ds_config: dict[str, Any]) -> None:
    """Refuse keys that are unknown, misplaced, removed, or owned by the recipe too."""
    for problem in find_problems(ds_config):
        raise ValueError(problem)


def find_problems(ds_config: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the keys, one by one."""
    for key in ds_config:
        if key in OWNED_BY_RECIPE:
            yield (
                f"ds_config key {key} and the recipe's {OWNED_BY_RECIPE[key]} own the same value; "
                "remove it from the ds_config: the recipe says it"
            )
        elif key in REFUSED_KEYS:
            yield f"ds_config key {key} is not supported: {REFUSED_KEYS[key]}"
        elif key not in KNOWN_KEYS:
            inside = " or ".join(section for section, known in section_keys().items() if key in known)
            hint = f"; it belongs into {inside}" if inside else suggest(key, sorted(KNOWN_KEYS - set(OWNED_BY_RECIPE)))
            yield f"ds_config: unknown key {key}{hint}"
    for section, known in section_keys().items():
        part = ds_config.get(section, {})
        if not isinstance(part, dict):
            yield f"ds_config: {section} must be a mapping, got {part!r}"
            continue
        for key in part:
            if (whole := f"{section}.{key}") in REFUSED_KEYS:
                yield f"ds_config key {whole} is not supported: {REFUSED_KEYS[whole]}"
            elif key not in known:
                outside = key in KNOWN_KEYS - set(OWNED_BY_RECIPE)
                hint = "; it belongs to the top level" if outside else suggest(key, sorted(known))
                yield f"ds_config: unknown key {whole}{hint}"


def check_values(ds_config: dict[str, Any]) -> None:
    """Refuse values that DeepSpeed would trip over at the start, or take for something else."""
    for path, value in _leaves(ds_config, ()):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"ds_config: {'.'.join(path)} must be finite, got {value}")
    for key, kind in VALUES.items():
        if key in ds_config and ds_config[key] not in kind:
            raise ValueError(
                f"ds_config: {key} must be one of {', '.join(map(json.dumps, kind))}, got {ds_config[key]!r}"
            )
    stage(ds_config)
    for section, model in section_models().items():
        try:
            model(**ds_config.get(section, {}))
        except ValidationError as error:
            item = error.errors()[0]
            key = ".".join(map(str, (section, *item["loc"])))
            problem = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            raise ValueError(f"ds_config: {key}: {problem}, got {shorten(repr(item['input']))}") from None


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in mappings and lists, with its path."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, (*path, str(key)))
    else:
        yield path, value


def check_precision(ds_config: dict[str, Any]) -> None:
    """Refuse the combinations of precision and stage that DeepSpeed 0.19 gets wrong, with the reason."""
    kind, level = precision(ds_config), stage(ds_config)
    dtype = str((ds_config.get("torch_autocast") or {}).get("dtype", "bfloat16"))
    if kind == "autocast" and dtype.removeprefix("torch.") not in ("bfloat16", "bf16"):
        raise ValueError(
            f"torch_autocast.dtype {dtype} is refused: DeepSpeed skips every step under float16 autocast at ZeRO 1-3; "
            "use bfloat16, or fp16.enabled with its loss scaling"
        )
    if kind == "bf16" and level == 0:
        raise ValueError(
            "bf16.enabled at ZeRO 0 is refused: DeepSpeed takes a hidden optimizer step at start-up (weight decay, "
            "Adam one step ahead); use torch_autocast at ZeRO 0, or bf16 at ZeRO 1-3"
        )
    if kind == "fp16" and level == 0:
        raise ValueError(
            "fp16.enabled at ZeRO 0 is refused: DeepSpeed's step divides the gradient by the loss scale, but its "
            "backward has not multiplied by it; use fp16 at ZeRO 1-3"
        )
    if kind == "bf16" and not ds_config["bf16"].get("check_grad_overflow", True):
        raise ValueError("bf16.check_grad_overflow=false is refused: one NaN on one rank would reach every weight")


def section_models() -> dict[str, type[BaseModel]]:
    """Section -> what DeepSpeed reads it with."""
    from deepspeed.monitor.config import CometConfig, CSVConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        **{"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config},
        **{"comet": CometConfig, "csv_monitor": CSVConfig},
    }


def section_keys() -> dict[str, set[str]]:
    """Section -> keys that DeepSpeed reads there."""
    known = {
        name: set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}
        for name, model in section_models().items()
    }
    autocast = {"enabled", "dtype", "lower_precision_safe_modules"}
    return known | {"torch_autocast": autocast, "timers": {"throughput"}}
