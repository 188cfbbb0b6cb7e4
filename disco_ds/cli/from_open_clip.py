"""`disco-ds from-open-clip`: translate a command line of open_clip_train into a recipe.

Most flags are translated by the table config/open_clip_flags.yaml. A flag without a counterpart becomes a comment.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from disco_ds.config.ds_config import merge, read_ds_config
from disco_ds.config.load import check_config
from disco_ds.config.open_clip_flags import read_words
from disco_ds.config.recipe import Config
from disco_ds.config.recipe_yaml import assign, dump

_MAIN = re.compile(r"(?:open_clip_train|training)[./]main(?:\.py)?\s(.*)")
"""Matches the call of open_clip's training program in a command line. Group 1 contains the program's flags."""


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        Exit code 0: the recipe was printed.

    Raises:
        ValueError: If the command line cannot be parsed, does not train, or contains an invalid value.
    """
    print(translate(args.line, args.ranks), end="")
    return 0


def translate(line: str, ranks: int | None = None) -> str:
    """Return the text of a recipe that trains like a command line of open_clip_train.

    Args:
        line: The flags, a command line with its launcher, or a shell script that contains one.
        ranks: Number of GPUs. None: read it from the arguments of torchrun or srun, or from #SBATCH lines. If they do
            not contain it, the recipe is for one GPU.

    Raises:
        ValueError: If the line cannot be parsed, does not train, or contains an invalid value.
    """
    line = re.sub(r"\\\s*\n", " ", line)
    found = _MAIN.search(line)
    given = parse_flags(found.group(1) if found else line)
    table = read_words()["flags"]
    flags = {name: row["default"] for name, row in table.items() if "default" in row} | given
    if "train-data" not in flags and flags.get("dataset-type") != "synthetic":
        raise ValueError(
            f"the line has no --train-data. To evaluate a model: disco-ds eval {flags['model']} --weights "
            f"{flags.get('pretrained', 'FILE')} eval.labeled.imagenet={flags.get('imagenet-val', 'FOLDER')}"
        )
    comments = []
    ranks = ranks or count_ranks(line[: found.start()] if found else "")
    if ranks is None:
        comments.append(
            "The command line does not contain the number of GPUs, so this recipe is for one GPU; if that is wrong, "
            "add --ranks N."
        )
    per_rank = int(flags["batch-size"]) * int(flags["accum-freq"])
    global_batch = (ranks or 1) * per_rank
    comments.append(f"global_batch: {ranks or 1} GPU(s) x {per_rank} samples")
    name = re.sub(r"[^\w.+=@ -]", "-", str(flags.get("name", flags["model"])))
    tree: dict[str, Any] = {"name": name, "global_batch": global_batch}
    tree["deepspeed"] = {"base": "zero1"}
    for flag, value in flags.items():
        row = table.get(flag, {"note": "not a flag of open_clip 3.3 or 4.2"})
        if row.get("translated"):
            continue
        to = row.get("to") or ("" if "note" in row else row["ours"][0])
        values = row.get("values")
        if to and (values is None or value in values):
            merge(tree, _nest(to, values[value] if values else row.get("value", value)))
        else:
            where = f"{', '.join(row['ours'])}; " if "ours" in row else ""
            shown = "" if value is True else f" {value}"
            comments.append(f"--{flag}{shown}: {where}{row['note']}")
    for key, value in chain(
        _translate_data(flags, comments), _translate_run(flags, global_batch, comments)
    ):
        merge(tree, _nest(key, value))
    check_config(tree | {"deepspeed": read_ds_config(tree["deepspeed"], Path())}, "the recipe")
    tree = {key: tree[key] for key in Config.model_fields if key in tree}  # the order of the docs
    text = dump(tree)
    return "".join(f"# {comment}\n" for comment in comments) + text


def parse_flags(text: str) -> dict[str, Any]:
    """Return the flags by name, without dashes. The value of a flag without arguments is True.

    Raises:
        ValueError: If a quote is not closed, or a value contains a shell variable.
    """
    flags: dict[str, list[Any]] = {}
    values: list[Any] = []
    for word in shlex.split(text, comments=True):
        if re.match(r"\d*>|[|&;<]", word):
            break  # the rest belongs to the shell
        word = word.rstrip(";")
        if "$" in word:
            raise ValueError(f"replace the shell variable in {word!r} by its value")
        if word.startswith("--"):
            name, equals, word = word[2:].partition("=")
            values = flags[name.replace("_", "-")] = []
            if not equals:
                continue
        values.append(_parse_number(word))
    return {
        name: values if name == "aug-cfg" or len(values) > 1 else [*values, True][0]
        for name, values in flags.items()
    }


def _parse_number(word: str) -> Any:
    try:
        return float(word) if re.search(r"[.eE]", word) else int(word)
    except ValueError:
        return word


def _nest(key: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    assign(tree, key.split("."), value)
    return tree


def _is_csv(flags: dict[str, Any]) -> bool:
    is_csv = str(flags.get("train-data")).endswith((".csv", ".tsv"))
    return is_csv or flags.get("dataset-type") == "csv"


def _translate_data(flags: dict[str, Any], comments: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the data settings as (dotted name, value), and append notes for the user to `comments`."""
    shards = str(flags.get("train-data"))
    if flags.get("dataset-type") == "synthetic":
        yield "data.source", "synthetic"
        yield "data.num_samples", flags["train-num-samples"]
    elif "::" in shards:
        yield "data.sources", [{"shards": source} for source in shards.split("::")]
    else:
        yield "data.shards", shards
    if "pipe:" in shards:
        yield "data.remote.pipe", True
    if _is_csv(flags):
        yield "data.image_key", flags.get("csv-img-key", "filepath")
        yield "data.captions", {f"{{{flags.get('csv-caption-key', 'title')}}}": 1}
    elif "train-data" in flags:
        commands = "; ".join(f"disco-ds index {shlex.quote(part)}" for part in shards.split("::"))
        comments.append(f"Before the first run, count the samples: {commands}")
    keys = read_words()["flags"]["aug-cfg"]["to"]
    for item in flags.get("aug-cfg", ()):
        name, _, text = item.partition("=")
        if name in keys:
            try:
                value = ast.literal_eval(text)
            except (SyntaxError, ValueError):
                raise ValueError(
                    f"--aug-cfg {item}: {text!r} is not a value in Python's syntax"
                ) from None
            yield keys[name], list(value) if isinstance(value, tuple) else value
        else:
            comments.append(f"--aug-cfg {item}: not available")


def _translate_run(
    flags: dict[str, Any], global_batch: int, comments: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the settings outside `data` that the table of flags cannot translate, as (dotted name, value).

    Append notes for the user to `comments`.
    """
    # open_clip's defaults depend on the name of the model.
    is_vit = "vit" in str(flags["model"]).lower()
    yield "optim.betas", [flags.get("beta1", 0.9), flags.get("beta2", 0.98 if is_vit else 0.999)]
    yield "optim.eps", flags.get("eps", 1e-6 if is_vit else 1e-8)
    if re.search("wandb|all", str(flags.get("report-to"))):
        yield "log.wandb.project", flags["wandb-project-name"]
    if "distill-model" in flags:
        yield "teacher.weight", 0.5  # half of open_clip's sum of both losses
    # open_clip ignores --train-num-samples if it reads a csv.
    num_samples = 0 if _is_csv(flags) else int(flags.get("train-num-samples", 0))
    epochs, warmup_steps = int(flags["epochs"]), int(flags["warmup"])
    unit, steps_per_epoch = "every_steps", num_samples / global_batch
    if num_samples:
        yield "samples", epochs * num_samples
        comments.append(
            f"samples: {epochs} epochs x {num_samples:,} samples; every_steps: converted from epochs"
        )
        num_steps = epochs * num_samples // global_batch
        if "epochs-cooldown" in flags:
            cooldown_steps = math.ceil(int(flags["epochs-cooldown"]) * steps_per_epoch)
            yield "optim.cooldown_steps", cooldown_steps
            num_steps -= cooldown_steps
        if warmup_steps > num_steps:
            comments.append(
                f"--warmup {warmup_steps}: lowered, because the run has only {num_steps} steps"
            )
            warmup_steps = num_steps
    else:
        unit, steps_per_epoch = "every_epochs", 1
        yield "epochs", epochs
    yield "optim.warmup_steps", warmup_steps
    has_labels = "imagenet-val" in flags or "imagenet-v2" in flags
    evals = "zeroshot-frequency" if has_labels else "val-frequency"
    for group, flag in (("checkpoint", "save-frequency"), ("eval", evals)):
        yield f"{group}.{unit}", math.ceil(int(flags[flag]) * steps_per_epoch)


def count_ranks(launcher: str) -> int | None:
    """Return the number of ranks that a launcher such as torchrun or srun starts, or None if it is not known.

    Args:
        launcher: The text before open_clip's program. It may contain #SBATCH lines.
    """

    def number(options: str) -> int | None:
        found = re.search(rf"(?<!\S)(?:{options})[ =]*(\d+)", launcher)
        return int(found.group(1)) if found else None

    per_node = number("--nproc[-_]per[-_]node") or number(
        r"--ntasks-per-node|--gpus-per-node|--gres=gpu:(?:\w+:)?"
    )
    if per_node:
        return per_node * (number("--nnodes|--nodes|-N") or 1)
    is_alone = "python" in launcher and not re.search("torchrun|srun|distributed", launcher)
    return 1 if is_alone else number("--ntasks|-n")
