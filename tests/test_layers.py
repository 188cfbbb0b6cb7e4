"""The import rules of the package: which modules may import which, and which may use torch.distributed or DeepSpeed."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import disco_ds

ROOT = Path(disco_ds.__file__).parent
TESTS = Path(__file__).parent
CLONE = TESTS.parent

LAYERS = {
    "names": 0,
    **dict.fromkeys(("config", "distributed"), 1),
    "runs": 2,
    **dict.fromkeys(("losses", "models", "data", "metrics"), 3),
    "checkpoints": 4,
    "eval": 5,
    "training": 6,
    **dict.fromkeys(("plan", "checks"), 7),
    **dict.fromkeys(("run", "launch"), 8),
    "cli": 9,
    **dict.fromkeys(("train", "evaluate", "doctor", "__main__"), 10),
}
"""Room (a folder or module below disco_ds) -> layer. A room may import itself and rooms of lower layers.

A module of a room that is listed here counts as a separate room.
"""

ONLY_IMPORTS = {
    "losses": {"losses", "distributed", "names"},
    "data": {"data", "config", "names"},
    **{entry: {"cli"} for entry in ("train", "evaluate", "doctor", "__main__")},
}
"""Rooms that may import less than their layer allows."""


@cache
def modules() -> dict[str, str]:
    """Return dotted name of a module below disco_ds -> its source code."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(part for part in parts if part != "__init__")] = path.read_text(
                encoding="utf-8"
            )
    return found


@cache
def imports(name: str, source: str) -> tuple[str, ...]:
    """Return the absolute dotted names that a module below disco_ds imports, including those for type checking."""
    return tuple(_imports(name, source))


def _imports(name: str, source: str) -> Iterator[str]:
    package = ["disco_ds", *name.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [
                *(package[: -node.level] if node.level else []),
                *([node.module] if node.module else []),
            ]
            # `from a import b` may import the module a.b or a name in a. Use a.b for both.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def room_of(name: str) -> str:
    return name if name in LAYERS else name.split(".")[0]


def subjects(name: str, source: str) -> Iterator[str]:
    """Yield the other rooms of disco_ds that a module imports."""
    own = room_of(name)
    for target in imports(name, source):
        root, *rest = target.split(".")
        if root == "disco_ds":
            other = rest[0] if rest else ""
            if other != own:
                yield other


def broken_rules(name: str, source: str) -> list[str]:
    """Return descriptions of a module's imports that the layers do not allow."""
    own = room_of(name)
    if own not in LAYERS:
        return [f"{own} has no layer: put it into LAYERS"]
    found = []
    for other in subjects(name, source):
        if other not in LAYERS:
            found.append(f"{name} imports {other or 'the package itself'}, which has no layer")
        elif own in ONLY_IMPORTS and other not in ONLY_IMPORTS[own]:
            found.append(
                f"{name} imports {other}; {own} may import only {sorted(ONLY_IMPORTS[own])}"
            )
        elif LAYERS[other] >= LAYERS[own]:
            found.append(f"{name} (layer {LAYERS[own]}) imports {other} (layer {LAYERS[other]})")
    return found


def names_communication(name: str, source: str) -> list[str]:
    """Return the imports and attributes with which a module uses torch.distributed or deepspeed.comm."""
    spelled = list(imports(name, source))
    spelled += [
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    ]
    refused = (
        "torch.distributed",
        "deepspeed.comm",
        "deepspeed.init_distributed",
        "torch.multiprocessing.spawn",
    )
    return [
        text
        for text in spelled
        if any(text == word or text.startswith(word + ".") for word in refused)
    ]


def calls_initialize(source: str) -> bool:
    spelled = list(imports("", source))
    spelled += [
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    ]
    return "deepspeed.initialize" in spelled or any(
        text.startswith("deepspeed.DeepSpeedEngine(") for text in spelled
    )


@pytest.mark.parametrize("name", modules())
def test_module_imports_only_layers_below(name: str) -> None:
    assert not broken_rules(name, modules()[name])


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("losses.infonce", "from disco_ds import config", "losses may import only"),
        (
            "losses.infonce",
            "from disco_ds.data.order import DataOrder",
            "losses may import only",
        ),
        (
            "losses.infonce",
            "def f():\n    import disco_ds.training.engine",
            "losses may import only",
        ),
        ("data.sources.tar", "from disco_ds.distributed import comm", "data may import only"),
        ("data.sources.tar", "from ...distributed.comm import rank", "data may import only"),
        ("config.recipe", "from disco_ds.models.clip import forward", "imports models"),
        ("distributed.comm", "from disco_ds.config import Config", "imports config"),
        ("metrics.logger", "from disco_ds.models.gpus import Gpu", "imports models"),
        (
            "models.clip",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from disco_ds.training.engine import Engine",
            "imports training",
        ),
        ("train", "from disco_ds.training.loop import train", "train may import only"),
        ("doctor", "from disco_ds.data import Loader", "may import only"),
        ("checks.recipe", "from disco_ds.cli.main import main", "imports cli"),
        ("plan.overview", "from disco_ds.run import run_training", "imports run"),
        ("helpers", "", "has no layer"),
        ("training.loop", "from disco_ds import helpers", "has no layer"),
    ],
)
def test_import_that_breaks_a_rule_is_found(name: str, source: str, words: str) -> None:
    (message,) = broken_rules(name, source)
    assert words in message


def test_modules_import_in_no_circle() -> None:
    """Imports within a room and imports inside functions count too."""
    sources = modules()
    graph = {}
    for name, source in sources.items():
        targets = {target.removeprefix("disco_ds.") for target in imports(name, source)}
        longest = {
            next((t for t in (target, target.rpartition(".")[0]) if t in sources), name)
            for target in targets
        }
        graph[name] = longest - {name} - {name.partition(".")[0]}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", modules())
def test_only_comm_names_communication(name: str) -> None:
    found = names_communication(name, modules()[name])
    assert bool(found) == (name == "distributed.comm"), found


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
    assert [name for name, source in modules().items() if calls_initialize(source)] == [
        "training.engine"
    ]
    assert calls_initialize("from deepspeed import initialize")


def test_package_never_imports_tools_or_tests() -> None:
    foreign = {"tools", "tests", "helpers", "pytest"} | {path.stem for path in TESTS.rglob("*.py")}
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


def test_architecture_has_the_layers_of_the_code() -> None:
    text = (CLONE / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (\d+) \| ([^|]*) \|", text, re.MULTILINE)
    assert {room: int(layer) for room, layer, _ in rows} == LAYERS
    for room, layer, may in rows:
        if room in ONLY_IMPORTS:
            expected = ", ".join(f"`{other}`" for other in sorted(ONLY_IMPORTS[room] - {room}))
        else:
            below = int(layer) - 1
            expected = {-1: "nothing", 0: "layer 0"}.get(below, f"layers 0 to {below}")
        assert may == expected, room
