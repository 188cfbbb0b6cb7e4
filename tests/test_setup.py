"""setup.py declares all imported packages, and the tests can run as on a CPU without fp16."""

import ast
import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.machine import needs_fp16
from helpers.paths import ROOT
from helpers.shards import write_shards
from tools.make.wheel import build

OPTIONAL = {
    "triton": "comes with torch where there is a GPU for it, and is looked for before it is imported",
    "wandb": "is an extra, and is looked for before it is imported",
    "sklearn": "is an extra, and is imported only by probes",
    "transformers": "is an extra, for whose layout the export is",
    "tokenizers": "comes with transformers",
    "huggingface_hub": "comes with open_clip, whose downloads the tests keep from the network",
}


def declared() -> dict[str, set[str]]:
    """Return the names of the packages that setup.py requires: for "install", and for each extra."""
    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    wanted = {"install": given["install_requires"]} | ast_items(given["extras_require"])
    return {
        name: {canonicalize_name(Requirement(text).name) for text in ast.literal_eval(value)}
        for name, value in wanted.items()
    }


def ast_items(node: ast.expr) -> dict[str, ast.expr]:
    assert isinstance(node, ast.Dict)
    return {
        ast.literal_eval(key): value
        for key, value in zip(node.keys, node.values, strict=True)
        if key is not None
    }


def imported(source: str) -> set[str]:
    """Return the top-level names that a module imports, also inside functions. Omit relative and standard imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names


def undeclared(folder: Path, allowed: set[str], own: set[str]) -> set[str]:
    """Return the names imported below a folder that do not belong to an allowed package, or to `own`."""
    names = set().union(
        *(imported(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    )
    provided_by = packages_distributions()
    assert "torch" in names
    return {
        name
        for name in names - own
        if not allowed
        & {canonicalize_name(distribution) for distribution in provided_by.get(name, ())}
    }


def test_what_the_package_imports_is_declared() -> None:
    found = undeclared(ROOT / "disco_ds", declared()["install"], {"disco_ds"})
    assert found <= OPTIONAL.keys()


def test_what_the_tests_import_is_declared() -> None:
    own = {"disco_ds", "helpers", "tools", "examples"}
    allowed = declared()
    assert undeclared(ROOT / "tests", allowed["install"] | allowed["dev"], own) <= OPTIONAL.keys()


@pytest.mark.parametrize(
    "source", ["import a.b as c", "from a.b import c", "def f():\n    from a import b"]
)
def test_import_is_found_wherever_it_stands(source: str) -> None:
    assert imported(f"import os\nfrom . import d\n{source}") == {"a"}


@needs_fp16
def test_fp16_can_be_hidden_from_every_process() -> None:
    """With ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, DeepSpeed reports that this CPU does not support fp16."""
    code = "from deepspeed.accelerator import get_accelerator as a; print(bool(a().is_fp16_supported()))"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split()[-1] == "False", done.stderr


OPEN_CLIP = """
import sys
import torch
from open_clip_train.data import get_wds_dataset
from open_clip_train.params import parse_args
from torchvision.transforms import ToTensor

args = parse_args(["--train-data", sys.argv[1], "--train-num-samples", "8", "--batch-size", "4", "--workers", "1"])
args.world_size = 1
data = get_wds_dataset(args, ToTensor(), is_train=True, tokenizer=lambda text: torch.tensor([[int(text)]]))
images, texts = next(iter(data.dataloader))
print(list(images.shape), sorted(set(texts.flatten().tolist()) - set(range(8))))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_open_clip_train_still_reads_a_shard_once_this_package_is_installed(tmp_path: Path) -> None:
    """The test environment has the packages of this one, except those of which open_clip_train needs other versions."""
    write_shards(tmp_path / "shards", [8])
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str | Path) -> str:
        command = [str(python), *map(str, words)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    install = ("-m", "pip", "install", "--quiet", "--no-compile")
    run(*install, "open_clip_torch[training]==3.3.0")
    run(*install, build(tmp_path))
    assert run("-c", "import webdataset; print(webdataset.__version__)") == "0.2.86\n"
    said = run("-c", OPEN_CLIP, tmp_path / "shards" / "00000.tar")
    assert said.splitlines()[-1] == "[4, 3, 10, 12] []"
    assert "1 shard, 8 samples" in run(
        "-m", "disco_ds", "index", tmp_path / "shards", "--workers=0"
    )
