"""Mistakes in recipes, overrides, ds_configs and hostfiles are refused in a few lines that name the place."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.cli.commands import describe_run
from disco_ds.config import PACKAGE, load_config
from disco_ds.config.ds_config import find_ds_configs
from disco_ds.config.recipe_yaml import Dumper, parse
from disco_ds.launch.hosts import read_hosts
from helpers.minimal import MINIMAL

TEXT = yaml.safe_dump(MINIMAL)
MAX_LINES, MAX_CHARACTERS, MAX_S = 30, 2500, 30


def refusal(start: Callable[[], object]) -> str:
    """Return the message of the ValueError that `start` raises, or "". Check the message's length, and the time."""
    before = time.process_time()
    said, kind = "", ValueError
    try:
        start()
    except ValueError as error:
        said, kind = str(error), type(error)
    assert not issubclass(kind, UnicodeError), said
    assert time.process_time() - before < MAX_S
    assert said.count("\n") < MAX_LINES, said
    assert len(said) < MAX_CHARACTERS, said
    return said


def dry_run(recipe: Path, *overrides: str) -> str:
    def start() -> None:
        config = load_config(recipe, list(overrides))
        describe_run(config, config.ranks or 1)

    return refusal(start)


def write(folder: Path, text: str | bytes, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


TEXTS = {
    "lists in lists": ("a: " + "[" * 3_000 + "]" * 3_000, "syntax error"),
    "mappings in mappings": ("\n".join(" " * n + "a:" for n in range(1_500)), "syntax error"),
    "Latin-1": (f"name: café\n{TEXT}".encode("latin-1"), "not UTF-8 text: byte 9 is 0xe9"),
    "a zero byte": ("name: a\0b", "syntax error"),
    "two documents": (f"{TEXT}\n---\n{TEXT}", "line 12: but found another document"),
    "a long integer": (
        TEXT.replace("steps: 100", "steps: 1" + "0" * 5_000),
        "syntax error: Exceeds the limit",
    ),
    "a line that is wrong": (f"{TEXT}\n  a: b: c\n", "line 12: "),
    "a value that is wrong": (
        TEXT.replace("steps: 100", "steps: many"),
        "steps must be a valid integer, got 'many'",
    ),
    "a key of a list": (f"{TEXT}\n? [a, b]\n: 2", "line 12: found unhashable key"),
    "many unknown keys": ("".join(f"zz{n}: 1\n" for n in range(9)) + TEXT, "unknown key zz8"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_malformed_recipe_is_refused_naming_the_file(kind: str, tmp_path: Path) -> None:
    text, words = TEXTS[kind]
    said = dry_run(write(tmp_path, text))
    assert words in said
    assert str(tmp_path / "recipe.yaml") in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "Is a directory"),
        ("none.yaml", "No such file"),
        ("a" * 5_000 + ".yaml", "File name too long"),
        ("a" * 5_000, "unknown recipe"),
        ("a\0b", "unknown recipe"),
    ],
)
def test_recipe_that_cannot_be_read_is_refused(name: str, words: str) -> None:
    assert words in dry_run(Path(name))


OVERRIDES = [
    *((f"{key}={value}", "finite number") for value in (".inf", "-.inf", ".nan", "1e400")
      for key in ("optim.lr", "optim.weight_decay", "timeout_s", "log.peak_flops", "optim.image.lr_factor")),
    ("optim.betas=[.nan, 0.9]", "finite number"),
    ("data.crop_ratio=[1, .inf]", "finite number"),
    ('data.captions={"{txt}": .inf}', "finite"),
    ("timeout_s=1e18", "less than or equal to 10000000"),
    ("lost_after_s=1e-9", "greater than or equal to 1"),
    ("seed=4294967296", "less than 2147483648"),
    ("data.num_samples=1000000000000000000000", "data.num_samples must be less than or equal to"),
    *((f"{key}=1{'0' * 400}", f"{key} must be less than or equal to 4611686018427387904, got 1000")
      for key in ("global_batch", "steps", "samples", "micro_batch", "optim.warmup_steps", "checkpoint.every_steps",
                  "data.window", "model.image_size", "eval.validation_batch", "ranks")),
    (f"stages=[{{until: 1{'0' * 400}}}]", "stages.0.until must be less than or equal to"),
    ("steps='1%s'" % ("0" * 400), "steps must be less than or equal to"),
    ("epochs=1e300", "epochs must be less than or equal to 1000000"),
    ("checkpoint.every_epochs=1e300", "checkpoint.every_epochs must be less than or equal to 1000000"),
    ("micro_batch=true", "micro_batch: true is not valid"),
    ("name=a/b", "name must match pattern"),
    ("name=..", "name must match pattern"),
    ('name="a\\nb"', "name must match pattern"),
    (f"name={'a' * 5_000}", "at most 100 characters"),
    ('data.captions={"plain": 1}', "has no field"),
    ('data.captions={"": 1}', "has no field"),
    ('data.captions={"{": 1}', "data.captions: Single '{'"),
    ('data.captions={"{}": 1}', "expected {member}"),
    ('data.captions={"{txt!r:>99999999}": 1}', "expected {member}"),
    ("eval.label_key=plain", "eval.label_key: template 'plain' has no field"),
    ("eval.caption_key=", "eval.caption_key"),
    ("eval.classes={a: b}", "eval.labeled has no set named a"),
    ("eval.templates={a: b}", "eval.labeled has no set named a"),
    ("data.remote.tries=9", "data.remote.tries: this is not a setting"),
    ("data.worker_timeout_s=9", "data.worker_timeout_s: this is not a setting"),
    ("data.retry_s=9", "unknown key data.retry_s"),
    ("data.workers=1000000", "less than or equal to 1024"),
    ("data.slots=1000000000", "less than or equal to"),
    ("checkpoint.copy_command=cp {name}", "checkpoint.copy_command: expected"),
    ("checkpoint.copy_command=cp {path} '", "checkpoint.copy_command: No closing quotation"),
    ("deepspeed.zero_optimization.reduce_bucket_size=-5", "reduce_bucket_size must be greater than 0, got -5"),
    ("deepspeed.zero_optimization.reduce_bucket_size=big", "reduce_bucket_size"),
    ("deepspeed.zero_optimization.reduce_bucket_size=.nan", "reduce_bucket_size must be a finite number"),
    ("deepspeed.comms_logger.debug=.inf", "finite"),
    ("deepspeed.zero_optimization.overlap_comm='off'", "overlap_comm must be true or false, got 'off'"),
    ("deepspeed.zero_optimization.overlap_comm=maybe", "overlap_comm must be a valid boolean, got 'maybe'"),
    ("deepspeed.zero_optimization.offload_optimizer={device: gpu}", "offload_optimizer.device"),
    ("deepspeed.zero_optimization.offload_optimizer=cpu", "offload_optimizer"),
    ("deepspeed.fp16={initial_scale_power: many}", "initial_scale_power"),
    ("deepspeed.csv_monitor={enabled: perhaps}", "csv_monitor.enabled"),
    ("deepspeed.wandb={enabled: true}", "wandb is set by the recipe's log.wandb"),
    ("deepspeed.comet={api_key: abc}", "set the environment variable COMET_API_KEY"),
    ("log.wandb={project: a, api_key: abc}", "unknown key log.wandb.api_key"),
    ("deepspeed=[]", "must be a bundled name, a path or a mapping"),
    ("optim.lr=[", "syntax error"),
    ("..=3", "not of the form a.b=value"),
    ("loss=siglip", "loss must be a valid dictionary, got 'siglip'"),
    ("data.source=odd", "data.source must match pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "words"), OVERRIDES)
def test_invalid_override_is_refused(override: str, words: str, tmp_path: Path) -> None:
    assert words in dry_run(write(tmp_path, TEXT), override)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[no, sv, yes, on, Off, y]", ["no", "sv", "yes", "on", "Off", "y"]),
        ("[true, False]", [True, False]),
        ("[0100, 1:30, 1:30.5]", ["0100", "1:30", "1:30.5"]),
        ("[0, -12, 1_000, 0x1F, +3]", [0, -12, 1000, 31, 3]),
        ("[1e-3, 1., .5, -2.5E+3, 1_0.5, .inf]", [1e-3, 1.0, 0.5, -2500.0, 10.5, float("inf")]),
        ("[null, ~, 2026-01-31]", [None, None, "2026-01-31"]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: list[Any]) -> None:
    found = parse(text, "test")
    assert (found, [type(each) for each in found]) == (value, [type(each) for each in value])
    assert parse(yaml.dump(value, Dumper=Dumper), "test") == value


def test_aliases_of_a_recipe_are_read(tmp_path: Path) -> None:
    text = f"{TEXT}\neval: {{labeled: &sets {{a: /b}}, retrieval: *sets}}"
    assert load_config(write(tmp_path, text)).eval.retrieval == {"a": "/b"}


def test_name_that_looks_like_a_date_is_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.replace("name: test", "name: 2026-01-31"))
    assert load_config(path).name == "2026-01-31"
    assert load_config(write(tmp_path, load_config(path).to_yaml(), "again.yaml")) == load_config(
        path
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 2}}',
            "'zero_optimization' is given twice",
        ),
        ('{"zero_optimization": {"stage": 1, "stage": 3}}', "'stage' is given twice"),
        ("[" * 100_000 + "]" * 100_000, "syntax error"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        ("[1]", "expected a mapping of settings, got list"),
    ],
)
def test_malformed_ds_config_is_refused_naming_the_file(
    text: str | bytes, words: str, tmp_path: Path
) -> None:
    said = dry_run(write(tmp_path, TEXT), f"deepspeed={write(tmp_path, text, 'ours.json')}")
    assert words in said
    assert "ours.json" in said


@pytest.mark.parametrize(
    "line",
    [
        "host slots=4x",
        "host slots=-1",
        "host",
        "slots=4",
        "h;ls slots=4",
        "-oProxyCommand=ls slots=4",
        "host:22 slots=4",
        "hôst slots=4",
        "host slots=99999999999999",
        "host\0 slots=4",
    ],
)
def test_malformed_hostfile_line_is_refused(line: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"# ours\nfirst slots=2\n{line}\n", "hosts")
    assert f"{path}, line 3: expected `host slots=GPUs`" in refusal(lambda: read_hosts(path, []))


def test_hostfile_in_every_form_of_deepspeed_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "\n# ours\nnode-1.example.org\tslots=8\nnode_2   slots=8  # spare\n\n",
        "hosts",
    )
    assert read_hosts(path, []) == {"node-1.example.org": 8, "node_2": 8}


# Mutations


ODD = (
    ".nan",
    "-1",
    "1e999",
    "null",
    "[]",
    "{}",
    "yes",
    '"',
    "*a",
    "&a x",
    "!!int x",
    "0x" + "f" * 30,
    "é\0",
    "2**9",
)


def mutate(text: str, rng: random.Random) -> bytes:
    """Damage a text: drop, repeat, indent or cut lines, replace values, shuffle letters, flip a byte."""
    lines = text.splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        line, kind = lines[at], rng.randrange(7)
        if kind == 0:
            del lines[at : at + rng.randint(1, 3)]
        elif kind == 1:
            lines.insert(at, rng.choice(lines))
        elif kind == 2:
            lines[at] = rng.choice((" ", "  ", "\t", "- ", "#")) + line
        elif kind == 3:
            lines[at] = line.partition(":")[0] + ": " + rng.choice(ODD) + "\n"
        elif kind == 4:
            lines[at] = line[: rng.randrange(len(line) + 1)]
        elif kind == 5:
            lines[at] = "".join(rng.sample(line, len(line)))
        else:
            lines[at] = line.replace(
                rng.choice(line or " "), rng.choice("{}[]:,'\"&*!|>%@`#\n\0é-")
            )
        lines = lines or ["\n"]
    data = bytearray("".join(lines).encode())
    if data and rng.random() < 0.1:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def sweep(folder: Path, num_cases: int) -> tuple[int, int]:
    """Read mutated files and return how many were read and how many were refused."""
    recipes = [path.read_text() for path in sorted((PACKAGE / "recipes").glob("*.yaml"))] + [TEXT]
    ds_configs = [path.read_text() for path in sorted(find_ds_configs().glob("*.json"))]
    hostfiles = ["first slots=8\nsecond slots=8\n# third\nthird slots=4\n"]
    refused = 0
    for number in range(num_cases):
        rng = random.Random(number)
        kind = rng.choices(("recipe", "ds_config", "hostfile"), (6, 3, 1))[0]
        if kind == "recipe":
            said = dry_run(write(folder, mutate(rng.choice(recipes), rng)))
        elif kind == "ds_config":
            write(folder, mutate(rng.choice(ds_configs), rng), "ours.json")
            said = dry_run(write(folder, TEXT), "deepspeed=ours.json")
        else:
            path = write(folder, mutate(hostfiles[0], rng), "hosts")
            said = refusal(lambda path=path: read_hosts(path, []))
        refused += bool(said)
    return num_cases - refused, refused


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    read, refused = sweep(tmp_path, 300)
    assert min(read, refused) > 20, "the mutations must be neither all harmless nor all fatal"


@pytest.mark.slow
def test_many_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    sweep(tmp_path, 10_000)


def test_config_yaml_round_trips(tmp_path: Path) -> None:
    """The config.yaml that a run writes contains the same settings, so that a resume finds them equal."""
    for number in range(100):
        path = write(tmp_path, mutate(TEXT, random.Random(number)))
        if dry_run(path) == "":
            config = load_config(path)
            assert load_config(write(tmp_path, config.to_yaml(), "config.yaml")) == config
            json.dumps(config.model_dump(mode="json"), allow_nan=False)
