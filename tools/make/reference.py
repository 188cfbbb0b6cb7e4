"""Generate docs/settings.md from the code.

    python -m tools.make.reference

tests/docs/test_reference.py fails if the committed page differs from the output of this tool.
"""

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from disco_ds.config import Config, EmaSettings
from disco_ds.config.data import SourceSettings
from disco_ds.config.ds_config import DEFAULTS, OWNED_BY_RECIPE, REFUSED_KEYS
from disco_ds.config.load import read_words
from disco_ds.config.recipe import StageSettings, TeacherSettings
from disco_ds.config.settings import MAX_COUNT

ITEMS: dict[str, type[BaseModel]] = {"data.sources": SourceSettings, "stages": StageSettings}
"""Name of a setting that is a list -> model of one item of the list."""
OPTIONAL: dict[str, type[BaseModel]] = {"ema": EmaSettings, "teacher": TeacherSettings}
"""Name of a group that may be null -> its model."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
SIGNS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
FIRST = (
    "global_batch",
    "micro_batch",
    "samples",
    "data.shards",
    "data.captions",
    "model.name",
    "model.pretrained",
    "model.activation_checkpointing",
    "loss.name",
    "optim.lr",
    "optim.warmup_steps",
    "optim.weight_decay",
    "checkpoint.every_minutes",
    "eval.labeled",
    "deepspeed",
)
"""The settings that matter most."""
MADE = "<!-- Made by tools/make/reference.py from the code: change that, and run it again. -->"


def settings_page() -> str:
    """Return the text of docs/settings.md.

    The page lists the settings of a recipe, the options of the losses, the keys of a ds_config, and open_clip_train's
    flags.
    """
    lines = [
        "# All settings",
        "",
        MADE,
        "",
        "A recipe is a YAML file of these settings. Override any of them on the command line by its dotted name:",
        "`optim.lr=1e-3`. `null` means that it is not set. [training.md](training.md), [data.md](data.md) and",
        "[losses.md](losses.md) explain how they work together.",
        "",
        *textwrap.wrap(f"Most recipes set only these: {', '.join(f'`{x}`' for x in FIRST)}.", 120),
    ]
    for title, model in sections("", Config):
        lines += ["", f"## {title.rstrip('.') or 'The run'}", "", text(inspect.getdoc(model) or "")]
        lines += ["", "| setting | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows(title, model)]
    lines += [
        "",
        "## loss.options",
        "",
        "Options of each registered loss, with their defaults. Their meaning is in",
    ]
    lines += ["[losses.md](losses.md#options).", "", "| loss.name | options |", "|---|---|"]
    lines += [f"| {names} | {options} |" for options, names in loss_options().items()]
    lines += [
        "",
        "## deepspeed",
        "",
        "The setting `deepspeed` names a file in `ds_configs/`, a path, or a mapping whose `base` names the file",
        "that it changes. Its keys are DeepSpeed's; unknown keys are refused. Keys that it leaves out get the values",
        "below in the run's `ds_config.json`; [some depend on the run](training.md#deepspeed-defaults).",
        "",
    ]
    lines += ["| key set by the recipe | setting |", "|---|---|"]
    lines += [f"| `{key}` | {setting} |" for key, setting in OWNED_BY_RECIPE.items()]
    lines += ["", "| key | default |", "|---|---|"]
    lines += [f"| `{key}` | `{json.dumps(value)}` |" for key, value in flatten("", DEFAULTS)]
    lines += ["", "| refused key | reason |", "|---|---|"]
    lines += [f"| `{key}` | {why} |" for key, why in REFUSED_KEYS.items()]
    lines += ["", "## Flags of open_clip_train", "", *open_clip_flags()]
    return "\n".join(lines) + "\n"


def sections(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted prefix and the model of each group of settings. A group comes before the groups inside it."""
    yield prefix, model
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from sections(f"{prefix}{name}.", field.annotation)
        elif prefix + name in ITEMS:
            yield f"{prefix}{name}[].", ITEMS[prefix + name]
        elif name in OPTIONAL:
            yield f"{prefix}{name}.", OPTIONAL[name]


def rows(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, type, default and meaning of each setting of a model, except settings that are groups."""
    for name, field in model.model_fields.items():
        is_group = inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)
        if is_group or field.exclude:
            continue
        default = "required" if field.is_required() else f"`{show(field.default)}`"
        yield f"`{prefix}{name}`", describe_type(field), default, text(field.description or "")


def describe_type(field: FieldInfo) -> str:
    """Describe the type of a setting and the bounds of its values, except MAX_COUNT, which all counts have."""
    # In `PositiveCount | None`, the bounds are in the metadata of PositiveCount. The field itself has none.
    inner = [
        part for each in get_args(field.annotation) for part in getattr(each, "__metadata__", ())
    ]
    is_optional = NoneType in get_args(field.annotation)
    bounds = [
        f"`{sign} {getattr(part, name):,.10g}`"
        for part in [*field.metadata, *(inner if is_optional else [])]
        for kind, (sign, name) in SIGNS.items()
        if isinstance(part, kind) and part != Le(MAX_COUNT)
    ]
    return ", ".join([_type(field.annotation), *bounds])


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _type(part) for part in parts)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in parts)
    if origin is tuple:
        return (
            f"list of {_type(parts[0])}"
            if parts[-1] is Ellipsis
            else f"{len(parts)} x {_type(parts[0])}"
        )
    if origin is dict:
        return f"mapping of {_type(parts[1])}"
    if hasattr(annotation, "__metadata__"):
        return _type(parts[0])
    names = {
        str: "text",
        Path: "path",
        Any: "anything",
        SourceSettings: "`data.sources[]`",
        EmaSettings: "`optim.ema`",
        TeacherSettings: "`teacher`",
        StageSettings: "`stages[]`",
        bool: "true or false",
    }
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def show(value: Any) -> str:
    """Format a default as YAML."""
    return json.dumps(str(value) if isinstance(value, Path) else value).strip('"')


def text(words: str) -> str:
    """Format text as one line of Markdown for a table."""
    return " ".join(words.split()).replace("|", "\\|")


def flatten(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(f"{prefix}{key}.", value)
        else:
            yield prefix + key, value


def loss_options() -> dict[str, str]:
    """Group the registered losses by their options.

    Returns:
        Options with their defaults -> names of all losses that have exactly these options and defaults.
    """
    from disco_ds.losses import build_loss, list_losses
    from disco_ds.losses.base import list_options

    found: dict[str, list[str]] = {}
    for name in list_losses():
        options, _ = list_options(type(build_loss(name)))
        shown = [
            f"`{key}: {show(option.default)}`" for key, option in options.items() if key != "group"
        ]
        found.setdefault(", ".join(shown) or "none", []).append(f"`{name}`")
    return {options: ", ".join(names) for options, names in found.items()}


def shorten_flags(names: list[str]) -> list[str]:
    """Replace four or more flags with the same first word, such as `--audio-ext`, by one pattern, `--audio-*`."""
    first_words = [name.split("-")[2].strip("`") for name in names]
    shown = [
        f"`--{word}-*`" if first_words.count(word) >= 4 else name
        for word, name in zip(first_words, names, strict=True)
    ]
    return list(dict.fromkeys(shown))


def wrap(paragraph: str, indent: str = "") -> list[str]:
    return textwrap.wrap(paragraph, 120, subsequent_indent=indent, break_on_hyphens=False)


def open_clip_flags() -> list[str]:
    """Return the lines that list the flags of open_clip_train 3.3 and 4.2, with the settings that replace them."""
    table = ["| open_clip_train | here | note |", "|---|---|---|"]
    same: list[str] = []
    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, row in read_words()["flags"].items():
        key = tuple(row.get("ours", ())), row.get("note", "")
        groups.setdefault(key, []).append(f"`--{name}`")
    for (ours, note), names in groups.items():
        settings = ", ".join(f"`{key}`" for key in ours)
        if ours and note:
            table += [f"| {', '.join(names)} | {settings} | {text(note)} |"]
        elif ours:
            same += [f"{settings.replace(', ', ' and ')} ({', '.join(names)})"]
    lines = [
        "The flags of open_clip 3.3 and 4.2. [from_open_clip.md](from_open_clip.md) explains the translation.",
        "",
        *wrap(
            "Settings, with the flags that `disco-ds from-open-clip` translates into them: "
            f"{', '.join(same)}."
        ),
        "",
        *table,
        "",
        "Flags without a setting here. `disco-ds from-open-clip` prints the reasons:",
        "",
    ]
    unset = {note: shorten_flags(names) for (ours, note), names in groups.items() if not ours}
    for answer in ("not needed", "not available"):
        flags = [name for note, names in unset.items() if note.startswith(answer) for name in names]
        lines += wrap(f"- {answer}: {', '.join(flags)}", "  ")
    for note, names in unset.items():
        if not note.startswith("not "):
            lines += [f"- {', '.join(names)}: {text(note)}"]
    return lines


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
