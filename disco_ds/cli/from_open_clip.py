"""`disco-ds from-open-clip`: translate a command line of open_clip_train into a recipe.

open_clip's parser reads the flags. The table config/open_clip_flags.yaml translates most of them. A flag without a
counterpart becomes a comment.
"""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.metadata import version
from math import ceil
from pathlib import Path

from open_clip_train.params import parse_args

from disco_ds.cli.options import FromOpenClip
from disco_ds.config import Tree, check_config
from disco_ds.config.ds_config import read_ds_config
from disco_ds.config.load import read_words
from disco_ds.config.recipe_yaml import assign, dump

MAIN = re.compile(r"(.*[./])?(open_clip_train|training)[./]main(\.py)?")
"""Matches the word of a command line that names open_clip's training program. The words after it are the flags."""
TABLES = (".csv", ".tsv")


def run(options: FromOpenClip) -> int:
    """Print the recipe.

    Raises:
        ValueError: If open_clip refuses the flags, or they cannot be translated into a recipe that starts.
    """
    print(translate(parse_flags(options.arguments), options.ranks), end="")
    return 0


def parse_flags(words: Sequence[str]) -> Tree:
    """Parse a command line with the parser of the installed open_clip.

    Args:
        words: The flags, or a whole command line. Words up to the name of open_clip's training program are skipped.

    Returns:
        Values of all flags by name, with underscores.

    Raises:
        ValueError: If open_clip refuses the flags.
        SystemExit: After --help, with code 0.
    """
    starts = [number for number, word in enumerate(words, 1) if MAIN.fullmatch(word)]
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            return vars(parse_args(list(words[max(starts, default=0) :])))
    except SystemExit as end:
        if not end.code:
            raise
        problem = messages.getvalue().strip().rpartition("error: ")[2]
    except (ValueError, SyntaxError) as error:
        problem = f"--aug-cfg takes KEY=VALUE in Python's syntax: {error}"
    raise ValueError(f"open_clip {version('open_clip_torch')} refuses the flags: {problem}")


def translate(flags: Tree, ranks: int) -> str:
    """Return the text of a recipe that trains like open_clip_train with these flags.

    Args:
        flags: What `parse_flags` returned. It is changed in place.
        ranks: Number of GPUs that open_clip uses.

    Raises:
        ValueError: If the flags do not train, if a value is invalid, or if a file must be renamed or downloaded.
    """
    # Each step takes the flags that it translates. The table translates the others, or makes comments of them.
    take = flags.pop
    micro_batch = take("batch_size")
    settings: Tree = {
        "name": take("name"),
        "global_batch": ranks * micro_batch * take("accum_freq"),
        "micro_batch": micro_batch,
        "deepspeed.base": "zero1",
    }
    settings |= _take_model(flags) | _take_data(flags)
    settings |= _take_length(flags, settings["global_batch"])
    name = settings["name"] or Path(settings["model.name"]).stem
    settings["name"] = re.sub(r"^[ .-]|[^\w.+=@ -]", "_", name)[:100]
    table, defaults, comments = read_words()["flags"], parse_flags(()), ""
    for key, value in flags.items():
        row = table.get(flag := key.replace("_", "-"), {"note": "not available"})
        is_default = value == defaults.get(key) and not row.get("always")
        if is_default or value is None:
            continue
        if value in row.get("values", ()):
            settings |= row["values"][value]
        elif setting := row.get("to") or ("" if "note" in row else row["ours"][0]):
            settings.setdefault(setting, value)
        else:
            shown = "" if value is True else f" {value}"
            ours = ", ".join(row.get("ours", ()))
            comments += f"# --{flag}{shown}: {ours}{'; ' if ours else ''}{row['note']}\n"
    tree: Tree = {}
    for key, value in settings.items():
        assign(tree, key.split("."), value)
    ds_config = read_ds_config(tree["deepspeed"], Path())
    config = check_config(tree | {"deepspeed": ds_config}, "the recipe")
    # A setting that has our default needs no line.
    recipe = config.model_dump(mode="json", exclude_defaults=True)
    return comments + dump(recipe | {"deepspeed": tree["deepspeed"]})


def _take_model(flags: Tree) -> Tree:
    """Take the flags of the model, the optimizer and DeepSpeed, and return their settings."""
    take = flags.pop
    schema, _, model = take("model").rpartition(":")
    if schema == "hf-hub":
        raise ValueError(
            f"--model hf-hub:{model}: download it with `hf download {model} --local-dir FOLDER`, and pass "
            "--model local-dir:FOLDER"
        )
    if schema:  # open_clip reads the folder's weights and ignores --pretrained
        flags["pretrained"] = model
    image_layers = take("lock_image_unlocked_groups") * flags["lock_image"]
    text_layers = take("lock_text_unlocked_layers") * flags["lock_text"]
    settings: Tree = {"model.name": model, "model.unlocked_layers": image_layers or text_layers}
    if len(sizes := set(flags["force_image_size"] or ())) == 1:
        flags["force_image_size"] = sizes.pop()
    betas = [take("beta1"), take("beta2")]
    if None not in betas:  # timm's optimizers have their own defaults
        settings["optim.betas"] = betas
    if flags["distill_model"]:
        settings["teacher.weight"] = 0.5  # half of open_clip's sum of both losses
    project = take("wandb_project_name")
    if re.search("wandb|all", take("report_to")):
        settings["log.wandb.project"] = project
    return settings


def _take_data(flags: Tree) -> Tree:
    """Take the flags of the data, and return their settings."""
    take = flags.pop
    kind, shards, held_out = take("dataset_type"), take("train_data") or "", flags["val_data"] or ""
    settings: Tree = {"data.shards": shards}
    image, caption = take("csv_img_key"), f"{{{take('csv_caption_key')}}}"
    if kind == "synthetic":
        settings = {"data.source": kind, "data.num_samples": flags["train_num_samples"]}
    elif not shards:
        raise ValueError("the flags have no --train-data; to evaluate a model, use disco-ds eval")
    elif shards.endswith(TABLES):
        # open_clip ignores --train-num-samples if it reads a csv.
        flags["train_num_samples"] = None
        settings |= {"data.image_key": image, "data.captions": {caption: 1}}
    elif "::" in shards:
        settings = {"data.sources": [{"shards": part} for part in shards.split("::")]}
    if "pipe:" in shards:
        settings["data.remote.pipe"] = True
    if held_out.endswith(TABLES):
        settings |= {"eval.validation.val": take("val_data"), "eval.caption_key": caption}
    # The items of --aug-cfg are those of open_clip's transforms. With timm's, they become a comment.
    items = flags["aug_cfg"]
    keys = {} if items.get("use_timm") else dict(read_words()["flags"]["aug-cfg"]["items"])
    if not items.get("color_jitter_prob"):
        keys.pop("color_jitter", None)
    return settings | {keys[name]: items.pop(name) for name in keys if name in items}


def _take_length(flags: Tree, global_batch: int) -> Tree:
    """Take the flags of the length of the run, its schedule and its intervals, and return their settings."""
    take = flags.pop
    epochs, num_samples = take("epochs"), take("train_num_samples")
    scale = num_samples / global_batch if num_samples else 1
    settings: Tree = {"samples": epochs * num_samples} if num_samples else {"epochs": epochs}
    cooldown_steps, warmup_steps = 0, flags["warmup"]
    if flags["lr_scheduler"] == "const-cooldown" and num_samples:
        flags["lr_scheduler"] = None
        cooldown_steps = ceil((take("epochs_cooldown") or 0) * scale)
        settings |= {"optim.schedule": "cooldown", "optim.cooldown_steps": cooldown_steps}
    if num_samples:  # open_clip's warmup may be longer than the run
        warmup_steps = min(warmup_steps, int(epochs * scale) - cooldown_steps)
    if warmup_steps == flags["warmup"]:  # otherwise, the flag becomes a comment
        take("warmup")
    intervals = {"checkpoint": take("save_frequency"), "eval": take("val_frequency")}
    zero_shot = take("zeroshot_frequency")
    if flags["imagenet_val"] or flags["imagenet_v2"]:
        intervals["eval"] = zero_shot
    for group, frequency in intervals.items():
        unit = "every_steps" if num_samples or not frequency else "every_epochs"
        settings[f"{group}.{unit}"] = ceil(frequency * scale)
    return settings | {"optim.warmup_steps": warmup_steps}
