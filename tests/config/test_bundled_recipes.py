"""The bundled recipes for large batches fit the GPUs that they name. Scaled down, they run on the bundled data."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from disco_ds.config import load_config
from disco_ds.models.gpus import find_gpu
from disco_ds.plan.memory import GIB, plan_memory
from disco_ds.plan.towers import trace
from disco_ds.runs.run_folder import FINISHED
from disco_ds.training.build import build
from disco_ds.training.loop import finish, train
from helpers.dist import run_ranks
from helpers.paths import ROOT

LARGE = {
    "vit_b_32_32k": "A100-40G",
    "vit_b_32_196k": "A100-40G",
    "vit_l_14_1m": "A100-80G",
    "vit_l_14_4m": "A100-80G",
    "vit_l_14_12m": "A100-80G",
    "vit_b_32_one_gpu": "RTX-4090",
}
"""Recipe -> the GPU that it is written for."""
SMALL = [
    "ranks=2",
    "global_batch=64",
    "micro_batch=16",
    "steps=2",
    "samples=null",
    "optim.warmup_steps=1",
    "model.name=quickstart",
    "data.shards=bundled:emoji/train",
    "data.image_key=png",
    "data.workers=0",
    "data.captions={'{json[caption]}': 1}",
    "log.tensorboard=false",
    "deepspeed.torch_autocast.enabled=false",
]
FAST = ["vit_l_14_4m"]


def run_small(names: list[str], folder: Path) -> None:
    for name in names:
        with ExitStack() as stack:
            run = build(load_config(name, [f"runs={folder}", *SMALL]), None, stack)
            train(run)
            finish(run)


@pytest.mark.parametrize(
    "names",
    [FAST, pytest.param([name for name in LARGE if name not in FAST], marks=pytest.mark.slow)],
    ids=["one", "others"],
)
def test_recipe_runs_scaled_down(names: list[str], tmp_path: Path) -> None:
    run_ranks(run_small, 2, names, tmp_path)
    for name in names:
        folder = tmp_path / load_config(name).name
        assert json.loads((folder / FINISHED).read_text())["steps"] == 2


def plan_total(name: str) -> int:
    config = load_config(name)
    return plan_memory(config, config.ranks or 1, trace(config, config.micro_batch)).total


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_recipe_fits_the_gpu_it_is_for(name: str) -> None:
    # In a new process, because a trace depends on what earlier tests have set in torch.
    (total,) = run_ranks(plan_total, 1, name, joined=False)
    assert total <= find_gpu(LARGE[name]).gib * GIB
    assert re.search(
        rf"\| `{name}` \| .*{re.escape(LARGE[name])} \| {total / GIB:.1f}, ",
        (ROOT / "docs" / "results.md").read_text(),
    )
