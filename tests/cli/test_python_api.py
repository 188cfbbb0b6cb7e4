"""The public functions of disco_ds, called as in user programs: once, repeatedly, and on two ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disco_ds import Assumptions, load_config, plan_run
from disco_ds.config import Config
from helpers.dist import free_port
from helpers.launched import BIN, alone
from helpers.paths import ROOT
from helpers.tiny_run import recipe

PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, cwd=folder, env=alone(), capture_output=True, text=True, timeout=800, check=False
    )


def test_code_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    done = python("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^True \d\.\d GiB, most in \w+$", done.stdout, re.MULTILINE)
    assert re.search(r"^unseen \{'top1': 0\.", done.stdout, re.MULTILINE)
    assert (tmp_path / "exports" / "first" / "open_clip_model.safetensors").is_file()
    assert (tmp_path / "runs" / "mine" / "finished.json").is_file()
    assert "has done all its steps" in done.stdout.splitlines()[-1]


EXAMPLES = """
import doctest, disco_ds
for name in ("run_training", "evaluate_run", "plan_run"):
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(disco_ds, name), name, globs={})
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
    print(name, result.failed, result.attempted)
"""


@pytest.mark.slow  # the page runs the same functions
def test_examples_of_the_docstrings_hold(tmp_path: Path) -> None:
    done = python(EXAMPLES, tmp_path)
    assert done.stdout.splitlines() == ["run_training 0 4", "evaluate_run 0 2", "plan_run 0 3"], (
        done.stdout + done.stderr
    )


AGAIN = """
import os, signal, sys, threading
import torch
from disco_ds import *
from disco_ds.metrics.logger import METRICS_FILE

state = lambda: (dict(os.environ), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
                 sys.excepthook, torch.distributed.is_initialized())
signal.signal(signal.SIGUSR1, lambda *_: None)  # the caller's own
load = lambda *overrides: load_config(sys.argv[1], list(overrides))
before, calls, act = state(), 0, None

def at_the_third_forward(module, arguments):
    global calls
    calls += type(module).__name__ == "VisionTransformer" and module.training
    if act and calls == 3:
        act()

def raised(function, *arguments):
    global calls
    calls = 0
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        assert state() == before, "nothing of the run is left behind"

torch.nn.modules.module.register_module_forward_pre_hook(at_the_third_forward)
print(raised(run_training, load("loss.name=disko")))
first = run_training(load())
act = lambda: os.kill(os.getpid(), signal.SIGTERM)
print(raised(run_training, load("name=stopped")))
act = None
second = run_training(load("name=stopped"), "latest")
losses = [[line.split('"loss": ')[1].split(",")[0] for line in (folder / METRICS_FILE).read_text().splitlines()
           if '"loss": ' in line] for folder in (first, second)]
print("same", len(losses[0]), losses[0] == losses[1])

def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 900.00 GiB.")
act = run_out
print(raised(run_training, load("name=large")))
act = None
thread = threading.Thread(target=lambda: print(raised(run_training, load())))
thread.start()
thread.join()
print(raised(evaluate_run, first, ["eval.labeled.x=nowhere"]))
print(raised(run_training, load("name=nan", "optim.lr=1e30")))
assert state() == before
torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
try:
    run_training(load())
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_process_can_continue_after_any_end_of_a_run(tmp_path: Path) -> None:
    done = python(AGAIN, tmp_path, str(recipe(tmp_path)))
    assert done.returncode == 0, done.stderr
    progress = re.compile(
        r"step|towers: |run folder|pictures|curves|.*: global batch|.*: resumes after|\d+ steps, "
    )
    refused, stopped, same, *explained, thread, evaluated, nan, joined = [
        line for line in done.stdout.splitlines() if not progress.match(line)
    ]
    assert refused.startswith("RefusedError: loss: unknown loss 'disko'; did you mean disco?")
    assert (
        stopped
        == "AskedToStopError: asked to stop: a checkpoint was saved after step 1; --resume latest resumes from there"
    )
    assert same == "same 4 True"
    assert explained[0].startswith(
        "OutOfMemoryError: out of memory in forward: CUDA out of memory."
    )
    assert len(explained) == 3
    assert thread.startswith("RefusedError: run_training must be called in the main thread")
    assert evaluated == "RefusedError: data: eval.labeled.x: there is no folder nowhere"
    assert nan.startswith("AgreedError: step 1: the loss is not finite")
    assert joined.startswith("this process has joined a process group already")
    assert "error on" not in done.stderr, "an error that is raised must not be printed as well"


RANKS = """
import json, os, sys
from disco_ds import evaluate_run, load_config, run_training

environment, config = dict(os.environ), load_config(sys.argv[-1])
folders, values = [], []
for _ in range(2):
    folders.append(str(run_training(config)))
    results = evaluate_run(folders[-1], ["eval.labeled.unseen=bundled:emoji/unseen"])
    values.append([result.values for result in results])
    assert dict(os.environ) == environment
seen = {"folders": folders, "values": values, "size": os.environ["WORLD_SIZE"]}
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node", "deepspeed --num_accelerators"])
def test_users_own_script_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    """The script trains and evaluates twice. Each of the four calls creates a new process group of the ranks."""
    (tmp_path / "script.py").write_text(RANKS)
    program, *option = launcher.split()
    command = [
        str(BIN / program),
        *option,
        "2",
        "--master_port",
        str(free_port()),
        "script.py",
        str(recipe(tmp_path)),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=alone(), capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (
        json.loads((tmp_path / f"rank-{number}.json").read_text()) for number in range(2)
    )
    assert first == second
    assert first["size"] == "2"
    assert [Path(folder).name for folder in first["folders"]] == ["tiny", "tiny-2"]
    assert all((Path(folder) / "finished.json").is_file() for folder in first["folders"])
    assert 0 <= first["values"][0][0]["top1"] <= 1
    assert first["values"][0] == first["values"][1], "both runs must give the same results"


def small(folder: Path) -> Config:
    return load_config(recipe(folder), ["data={source: synthetic}"])


def test_plan_is_a_value(tmp_path: Path) -> None:
    plan = plan_run(small(tmp_path), ranks=2, gpu="A100-40G", assumed=Assumptions(context_gib=0.0))
    assert plan.fits
    assert plan.speed is not None
    assert (
        plan.memory.moments["loss"]["slack"]
        < 2**30
        < plan_run(small(tmp_path)).memory.parts["slack"]
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 3}, "not a multiple of ranks x micro_batch"),
        ({"gpu": "A100-40"}, "did you mean A100-40G"),
    ],
)
def test_plan_refuses(given: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        plan_run(small(tmp_path), **given)  # type: ignore[arg-type]
