"""Read, check and complete the DeepSpeed settings of a run (ds_config, JSON).

DeepSpeed ignores unknown keys, and some of its defaults change results. Therefore this module checks
every key. ds_config_keys.yaml lists the keys, and every default that matters, so that render.py can write it into
ds_config.json.
DeepSpeed is imported only to check a ds_config, because the names of the valid keys come from DeepSpeed.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from disco_ds.config.recipe_yaml import read_settings
from disco_ds.config.settings import Tree, explain_value
from disco_ds.names import suggest

_KEYS = read_settings(Path(__file__).with_name("ds_config_keys.yaml"), "table")
OWNED_BY_RECIPE: dict[str, str] = _KEYS["owned_by_recipe"]
"""DeepSpeed key that must not be in a ds_config -> the recipe setting that controls it."""
DEFAULTS: Tree = _KEYS["defaults"]
"""Values of keys that change results or speed. They are written into the rendered ds_config unless
the user's ds_config sets the key."""
TOP_LEVEL = DEFAULTS.keys() | _KEYS["others"]
"""Top-level keys of DeepSpeed 0.19 that are useful for a CLIP trainer and that the recipe does not
control."""
REFUSED_KEYS: dict[str, str] = _KEYS["refused"]
"""Refused key (as section.key if it is inside a section) -> the reason, for the error message."""


def merge(base: Tree, changes: Tree) -> Tree:
    """Merge `changes` into `base` recursively and in place. Return `base`."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base


def find_ds_configs() -> Path:
    """Return the folder of the bundled ds_configs.

    In an installed package, this folder is inside the package. In a clone of the repository, it is at
    the top level.
    """
    package = Path(__file__).parents[1]
    installed = package / "ds_configs"
    return installed if installed.is_dir() else package.parent / "ds_configs"


def read_ds_config(entry: str | Tree, folder: Path) -> Tree:
    """Return the ds_config that the `deepspeed` entry of a recipe describes.

    Args:
        entry: The name of a bundled ds_config, a path (relative to `folder` or to the working
            directory), or a mapping of settings. A mapping may contain `base`, the name or path of
            a ds_config whose settings the mapping overrides.
        folder: The folder that contains the recipe.

    Raises:
        ValueError: If the file is missing or malformed.
    """
    if isinstance(entry, dict):
        changes = copy.deepcopy(entry)
        base = changes.pop("base", None)
        return changes if base is None else merge(read_ds_config(base, folder), changes)
    if not isinstance(entry, str):
        raise ValueError(f"deepspeed must be a bundled name, a path or a mapping, got {entry!r}")
    known = {path.stem: path for path in sorted(find_ds_configs().glob("*.json"))}
    for path in (known.get(entry), folder / entry, Path(entry)):
        if path is not None and path.is_file():
            return read_settings(path, "ds_config")
    raise ValueError(f"deepspeed: there is no file {entry!r}; bundled names: {', '.join(known)}")


def precision(ds_config: Tree) -> str:
    """Return the precision that a ds_config enables: autocast, bf16, fp16 or fp32."""
    enabled = []
    for name in ("torch_autocast", "bf16", "fp16"):
        value = (ds_config.get(name) or {}).get("enabled", False)
        if not isinstance(value, bool):  # DeepSpeed would accept 1 or "yes" as true
            raise ValueError(f"ds_config: {name}.enabled must be true or false, got {value!r}")
        if value:
            enabled.append(name)
    if len(enabled) > 1:
        raise ValueError(f"ds_config: {' and '.join(enabled)} are both enabled; choose one")
    return enabled[0].removeprefix("torch_") if enabled else "fp32"


def zero_stage(ds_config: Tree) -> int:
    """Return the ZeRO stage of a ds_config, 0 to 3."""
    value = (ds_config.get("zero_optimization") or {}).get("stage", 0)
    if value not in (0, 1, 2, 3) or isinstance(value, bool):
        raise ValueError(f"ds_config: zero_optimization.stage must be 0, 1, 2 or 3, got {value!r}")
    return value


def check_ds_config(ds_config: Tree) -> None:
    """Check all keys and values of a ds_config.

    Raises:
        ValueError: If a key is unknown or refused, if the recipe controls the key, if a value is
            invalid, or if check_precision refuses a combination of settings.
    """
    if problems := list(_find_problems(ds_config)):
        raise ValueError("\n  ".join(problems))
    check_precision(ds_config)
    _check_values(ds_config)


def _find_problems(ds_config: Tree) -> Iterator[str]:
    """Yield an error message for each key that is unknown, misplaced, refused or set by the recipe."""
    sections = {"": TOP_LEVEL, **_KEYS["sections"]}
    for section, model in _section_models().items():
        fields = model.model_fields
        sections[section] = fields.keys() | {
            field.alias for field in fields.values() if field.alias
        }
    for section, known in sections.items():
        part = ds_config.get(section, {}) if section else ds_config
        if not isinstance(part, dict):
            yield f"ds_config: {section} must be a mapping, got {part!r}"
            continue
        for key, value in part.items():
            dotted = f"{section}.{key}" if section else key
            if dotted in OWNED_BY_RECIPE:
                yield (
                    f"ds_config key {dotted} is set by the recipe's {OWNED_BY_RECIPE[dotted]}; remove "
                    "it from the ds_config"
                )
            elif dotted in REFUSED_KEYS and not _is_neutral(dotted, value):
                yield f"ds_config key {dotted} is not supported: {REFUSED_KEYS[dotted]}"
            elif key not in known and dotted not in REFUSED_KEYS:
                yield f"ds_config: unknown key {dotted}{suggest(key, sorted(known))}"


def _is_neutral(key: str, value: Any) -> bool:
    """Return whether this value of a key in REFUSED_KEYS has no effect, so that the ds_config is accepted."""
    if isinstance(value, dict):
        value = any(value.values())
    neutral = _KEYS["neutral"].get(key, False)
    return bool(value.lower() == neutral if isinstance(value, str) else value == neutral)


def _check_values(ds_config: Tree) -> None:
    """Refuse invalid values early. DeepSpeed would refuse them only after much of the run has been built.

    Raises:
        ValueError: If a value is invalid. The message names the key, unless a number is not finite.
    """
    for section, model in _section_models().items():
        given = ds_config.get(section, {})
        try:
            checked = model(**given)
        except ValidationError as error:
            item = error.errors()[0]
            key = ".".join(map(str, (section, *item["loc"])))
            raise ValueError(f"ds_config: {explain_value(key, item)}") from None
        for name, value in given.items():
            # DeepSpeed would read the string "false" as false, but this package would treat it as true.
            if isinstance(getattr(checked, name, None), bool) and not isinstance(value, bool):
                raise ValueError(
                    f"ds_config: {section}.{name} must be true or false, got {value!r}"
                )
    try:
        json.dumps(ds_config, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"ds_config: numbers must be finite: {error}") from None


def check_gradient(ds_config: Tree) -> None:
    """Refuse settings with which DeepSpeed 0.19 would apply a wrong gradient in a custom training loop.

    Args:
        ds_config: The settings that were passed to deepspeed.initialize. Only the keys of REFUSED_KEYS
            (except comet.api_key), the precision and the ZeRO stage are checked.

    Raises:
        ValueError: If a key of REFUSED_KEYS has a value that changes something, or if
            check_precision refuses the settings.
    """
    for key, reason in REFUSED_KEYS.items():
        section, _, inner = key.rpartition(".")
        value = (ds_config.get(section) or {} if section else ds_config).get(inner)
        # An API key is allowed in the settings of a custom loop, because nothing copies these settings
        # into a run folder.
        if value is not None and not _is_neutral(key, value) and key != "comet.api_key":
            raise ValueError(f"ds_config key {key} is not supported: {reason}")
    check_precision(ds_config)


def check_precision(ds_config: Tree) -> None:
    """Refuse combinations of precision and ZeRO stage with which DeepSpeed 0.19 would train incorrectly.

    Raises:
        ValueError: If the combination is refused. The message suggests a combination that works.
    """
    kind, level = precision(ds_config), zero_stage(ds_config)
    dtype = str((ds_config.get("torch_autocast") or {}).get("dtype", "bfloat16"))
    if kind == "autocast" and dtype.removeprefix("torch.") not in ("bfloat16", "bf16"):
        raise ValueError(
            f"ds_config: torch_autocast.dtype={dtype} is refused: DeepSpeed skips every step under "
            "float16 autocast at ZeRO 1 to 3; use bfloat16, or fp16.enabled with its loss scaling"
        )
    if level == 0 and kind in _KEYS["refused_at_zero_0"]:
        reason = _KEYS["refused_at_zero_0"][kind]
        raise ValueError(f"ds_config: {kind}.enabled at ZeRO 0 is refused: {reason}")
    if kind == "bf16" and not ds_config["bf16"].get("check_grad_overflow", True):
        raise ValueError(
            "ds_config: bf16.check_grad_overflow=false is refused: a NaN on one rank would spread to "
            "every weight; remove the key"
        )


def _section_models() -> dict[str, type[BaseModel]]:
    """Map each section to the pydantic model with which DeepSpeed parses it."""
    from deepspeed.monitor.config import CometConfig, CSVConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comet": CometConfig,
        "csv_monitor": CSVConfig,
    }
