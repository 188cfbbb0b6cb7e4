"""An evaluation during a run and `disco-ds eval` of its checkpoint give the same values."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disco_ds.checkpoints.keep import find_latest
from disco_ds.config import load_config
from disco_ds.config.ds_config import precision
from disco_ds.distributed import comm
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.launched import finish
from helpers.tiny_run import expect, recipe

SETS = {
    "labeled": {"emoji": "bundled:emoji/unseen"},
    "retrieval": {"emoji_r": "bundled:emoji/unseen"},
    "validation": {"pairs": "bundled:emoji/unseen"},
    "label_key": "{json[caption]}",
    "caption_key": "{json[caption]}",
    "validation_batch": 40,
}


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"torch_autocast": {"enabled": False}},
    "autocast": {},
    "bf16": {"torch_autocast": {"enabled": False}, "bf16": {"enabled": True}},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "ranks"), [("fp32", 2), ("autocast", 1), ("bf16", 1)])
def test_figures_of_a_run_are_those_of_its_checkpoint(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    deepspeed = {"base": "zero1", **PRECISIONS[kind]}
    path = recipe(
        tmp_path, eval=SETS, log={"every_steps": 1, "tensorboard": False}, deepspeed=deepspeed
    )
    assert precision(load_config(path).deepspeed) == kind
    finish("torchrun", ranks, ["--config", str(path)], tmp_path)
    run = tmp_path / "runs" / "tiny"
    records = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    during = {
        key: value for record in records for key, value in record.items() if key.startswith("eval/")
    }
    assert len(during) >= 8
    command = [sys.executable, "-m", "disco_ds", "eval", str(run), "--json", "after.json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    after = {
        f"eval/{found['name']}_{kind}": value
        for found in json.loads((tmp_path / "after.json").read_text())["sets"]
        for kind, value in found.items()
    }
    assert {key: after.get(key) for key in during} == pytest.approx(during, rel=1e-5)


def train_until_evaluation(path: Path) -> None:
    with ExitStack() as stack, pytest.raises(comm.AgreedError) as caught:
        train(build(load_config(path), None, stack))
    expect(str(caught.value), "evaluation on spoilt", "saved after step 3")


def test_failed_evaluation_loses_no_step(tmp_path: Path) -> None:
    (tmp_path / "spoilt" / "cat").mkdir(parents=True)
    (tmp_path / "spoilt" / "cat" / "1.png").write_bytes(b"no image")
    sets = {"labeled": {"spoilt": str(tmp_path / "spoilt")}, "every_steps": 3}
    run_ranks(train_until_evaluation, 1, recipe(tmp_path, eval=sets))
    assert find_latest(tmp_path / "runs" / "tiny").name == "step-00000003"
