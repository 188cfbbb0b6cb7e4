"""The import rules of the package, read from its syntax trees: who may import whom, and who may name DeepSpeed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import disco_ds

ROOT = Path(disco_ds.__file__).parent
TESTS = Path(__file__).parent

LAYERS = {
    **dict.fromkeys(
        ("config", "data_settings", "ds_config", "recipe_yaml", "comm", "kernels", "gpus", "flight_recorder"), 0
    ),
    **dict.fromkeys(
        ("losses", "data", "model", "convnet", "metrics", "watchdog", "run_folder", "interrupt", "groups"), 1
    ),
    **dict.fromkeys(("agreement", "heartbeat", "disk", "copies", "phases", "retention", "host_share"), 1),
    **dict.fromkeys(("marks", "diagnostics"), 1),
    **dict.fromkeys(("engine", "step", "checkpoint", "reshape", "resume", "weights", "eval", "report"), 2),
    **dict.fromkeys(("flops", "draws"), 2),
    **dict.fromkeys(
        ("arguments", "build", "train", "evaluate", "export", "plan", "doctor", "launch", "out_of_memory"), 3
    ),
    "__main__": 4,
}
"""Subject (a module or a package of disco_ds) -> layer. A subject imports itself and layers strictly below."""

WITHIN_A_LAYER = {
    ("config", "data_settings"): "a recipe's `data` entry, a file of its own for its length",
    ("config", "ds_config"): "a recipe's `deepspeed` entry is read and merged by its owner",
    ("config", "recipe_yaml"): "a recipe is read as its text says",
    ("comm", "flight_recorder"): "it is switched on before there is a group",
    ("model", "convnet"): "importing it registers the tower with timm",
    ("heartbeat", "marks"): "beats tell them",
    ("heartbeat", "diagnostics"): "written before it ends a process",
    ("metrics", "phases"): "a record has them",
    ("retention", "run_folder"): "the checkpoints of a run lie in its folder",
    ("step", "engine"): "the step goes through the engine's backward",
    ("checkpoint", "engine"): "it saves and restores an engine",
    ("reshape", "checkpoint"): "it restores what that one has written",
    ("reshape", "engine"): "into an engine",
    ("reshape", "weights"): "frozen parameters are read as for an export",
    ("weights", "checkpoint"): "it reads what that one writes",
    ("resume", "checkpoint"): "it chooses the checkpoint to go on from",
    ("resume", "reshape"): "whatever shape has written that",
    ("resume", "engine"): "and builds the engine it is restored into",
    ("draws", "flops"): "both run the model on tensors without data",
    ("train", "build"): "the trainer runs what build.py puts together",
    ("train", "arguments"): "the trainer parses its own command line",
    ("train", "out_of_memory"): "what the trainer says then",
    ("out_of_memory", "plan"): "what happened is compared with the plan",
    ("launch", "arguments"): "it starts the trainer, with the trainer's arguments",
    ("evaluate", "arguments"): "both commands end with one message",
    ("doctor", "arguments"): "a hostfile is read and refused as for a dry run",
    ("plan", "arguments"): "ranks are counted as for a dry run",
}
"""Imports between subjects of one layer, with the reason."""

ONLY_IMPORTS = {"losses": {"losses", "comm", "kernels"}, "data": {"data", "config", "data_settings"}}
"""Subjects that are told more strictly than by their layer."""

MAX_LINES = 400


def modules() -> dict[str, str]:
    """Dotted name below disco_ds -> source."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(part for part in parts if part != "__init__")] = path.read_text(encoding="utf-8")
    return found


def imports(name: str, source: str) -> Iterator[str]:
    """Absolute dotted name of everything that a module below disco_ds imports, for type checking too."""
    package = ["disco_ds", *name.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*(package[: -node.level] if node.level else []), *([node.module] if node.module else [])]
            # `from a import b` may import the module a.b or a name of a: the longer form covers both.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def subjects(name: str, source: str) -> Iterator[str]:
    """The other subjects of disco_ds that a module imports."""
    own = name.split(".")[0]
    for target in imports(name, source):
        root, *rest = target.split(".")
        if root == "disco_ds":
            other = rest[0] if rest else ""
            if other != own:
                yield other


def broken_rules(name: str, source: str) -> list[str]:
    """Imports of a module that the layers do not allow."""
    own = name.split(".")[0]
    if own not in LAYERS:
        return [f"{own} has no layer: put it into LAYERS"]
    found = []
    for other in subjects(name, source):
        if other not in LAYERS:
            found.append(f"{name} imports {other or 'the package itself'}, which has no layer")
        elif own in ONLY_IMPORTS and other not in ONLY_IMPORTS[own]:
            found.append(f"{name} imports {other}; {own} may import only {sorted(ONLY_IMPORTS[own])}")
        elif LAYERS[other] >= LAYERS[own] and (own, other) not in WITHIN_A_LAYER:
            found.append(f"{name} (layer {LAYERS[own]}) imports {other} (layer {LAYERS[other]})")
    return found


def names_communication(name: str, source: str) -> list[str]:
    """Imports and attributes of a module that reach for torch.distributed or deepspeed.comm."""
    spelled = list(imports(name, source))
    spelled += [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    refused = ("torch.distributed", "deepspeed.comm", "deepspeed.init_distributed", "torch.multiprocessing.spawn")
    return [text for text in spelled if any(text == word or text.startswith(word + ".") for word in refused)]


def calls_initialize(source: str) -> bool:
    spelled = list(imports("", source))
    spelled += [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return "deepspeed.initialize" in spelled or any(text.startswith("deepspeed.DeepSpeedEngine(") for text in spelled)


@pytest.mark.parametrize("name", modules())
def test_module_imports_only_layers_below(name: str) -> None:
    assert not broken_rules(name, modules()[name])


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("losses.clip", "from disco_ds import config", "losses may import only"),
        ("losses.clip", "from disco_ds.data.order import DataOrder", "losses may import only"),
        ("losses.clip", "def f():\n    import disco_ds.engine", "losses may import only"),
        ("data.tar", "from disco_ds import comm", "data may import only"),
        ("config", "from disco_ds.model import forward", "imports model"),
        ("config", "from .train import train", "imports train"),
        ("data.tar", "from ..comm import rank", "data may import only"),
        ("metrics", "from disco_ds.run_folder import FINISHED", "imports run_folder"),
        ("ds_config", "from disco_ds.config import Config", "imports config"),
        ("engine", "from disco_ds.step import train_step", "imports step"),
        (
            "model",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from disco_ds.engine import Engine",
            "engine",
        ),
        ("helpers", "", "has no layer"),
        ("train", "from disco_ds import helpers", "has no layer"),
    ],
)
def test_import_that_breaks_a_rule_is_found(name: str, source: str, words: str) -> None:
    (message,) = broken_rules(name, source)
    assert words in message


@pytest.mark.parametrize("pair", WITHIN_A_LAYER)
def test_exception_is_in_use(pair: tuple[str, str]) -> None:
    own, other = pair
    assert LAYERS[own] == LAYERS[other], "an exception is for one layer"
    mine = {name: source for name, source in modules().items() if name.split(".")[0] == own}
    assert other in {subject for name, source in mine.items() for subject in subjects(name, source)}, "remove it"


@pytest.mark.parametrize("name", modules())
def test_only_comm_names_communication(name: str) -> None:
    found = names_communication(name, modules()[name])
    assert bool(found) == (name == "comm"), found


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.nn import all_gather",
        "from deepspeed import comm as dist",
        "import deepspeed.comm",
        "import deepspeed\ndeepspeed.comm.barrier()",
        "import torch\ndef f():\n    torch.distributed.barrier()",
        "import deepspeed\ndeepspeed.init_distributed()",
    ],
)
def test_communication_in_any_spelling_is_found(source: str) -> None:
    assert names_communication("step", source)
    assert not names_communication("step", "from disco_ds import comm\ncomm.barrier()")


def test_only_engine_calls_deepspeed_initialize() -> None:
    assert [name for name, source in modules().items() if calls_initialize(source)] == ["engine"]
    assert calls_initialize("from deepspeed import initialize")


def test_package_never_imports_tools_or_tests() -> None:
    foreign = {"tools", "tests", "pytest"} | {path.stem for path in TESTS.glob("*.py")}
    found = {
        (name, target)
        for name, source in modules().items()
        for target in imports(name, source)
        if target.split(".")[0] in foreign
    }
    assert not found


def test_no_module_is_called_utils() -> None:
    words = {"util", "utils", "helper", "helpers", "misc", "common"}
    assert not [name for name in modules() if words & set(name.split("."))]


def test_no_file_is_too_long() -> None:
    lengths = {name: source.count("\n") for name, source in modules().items()}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert len(lengths) > 20, "the walk must find the package"
