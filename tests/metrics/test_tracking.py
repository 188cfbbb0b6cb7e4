"""Runs logged to W&B, through a fake package or offline through the real one, and DeepSpeed's CSV monitor."""

import csv
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from disco_ds.config import load_config, render_ds_config
from disco_ds.config.ds_config import read_ds_config
from disco_ds.distributed.comm import AgreedError
from disco_ds.metrics.tracking import WANDB_ID
from disco_ds.run import run_training
from disco_ds.runs.run_folder import CHECKPOINTS
from helpers.dist import run_ranks
from helpers.launched import records
from helpers.minimal import settings
from helpers.paths import ROOT
from helpers.tiny_run import expect, recipe, refused

STAND_IN = '''
"""Writes down what it is called with, a line of JSON for each call."""
import json, os


def note(kind, **values):
    with open(os.environ["STAND_IN_CALLS"], "a") as file:
        file.write(json.dumps({"kind": kind, **values}, default=vars) + "\\n")


class Run:
    def __init__(self, id):
        self.id = id

    def define_metric(self, name, **given):
        note("define_metric", name=name, **given)

    def log(self, values):
        if os.environ.get("STAND_IN") == "dies":
            raise ConnectionResetError("Connection lost")
        note("log", **values)

    def finish(self, exit_code):
        note("finish", exit_code=exit_code)


def init(**given):
    note("init", **given)
    problem = os.environ.get("STAND_IN")
    if problem == "no network":
        raise ConnectionError("no such host")
    return Run(given["id"] or "id-of-wandb")
'''


def wandb_recipe(folder: Path, **changes: Any) -> Path:
    """Write a recipe of two steps, logged to W&B, with an evaluation on the bundled images."""
    log = {
        "every_steps": 1,
        "wandb": {"project": "clip"},
    }
    labeled = {"labeled": {"unseen": "bundled:emoji/unseen"}, "label_key": "{json[caption]}"}
    return recipe(folder, **{"steps": 2, "log": log, "eval": labeled, **changes})


def refused_everywhere(path: Path) -> None:
    sys.modules["wandb"] = None  # type: ignore[assignment]  # as if it were not installed
    expect(refused(load_config(path)), "log.wandb (rank 0): ", "wandb")
    assert not list((path.parent / "runs").iterdir())


def test_missing_package_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(refused_everywhere, 2, wandb_recipe(tmp_path))


def use_stand_in(folder: Path) -> None:
    # Forget the real package, if it is installed and imported.
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    os.environ["STAND_IN_CALLS"] = str(folder / "calls.jsonl")


def train(path: Path, *overrides: str, problem: str = "", resume: Path | None = None) -> Path:
    calls = Path(os.environ["STAND_IN_CALLS"])
    if os.environ["RANK"] == "0":
        calls.unlink(missing_ok=True)
    os.environ["STAND_IN"] = problem
    return run_training(load_config(path, list(overrides)), resume)


def called(kind: str | None = None) -> list[dict[str, Any]]:
    """Return the calls of W&B in the last run: all of them, or those of one kind."""
    made = [
        json.loads(line) for line in Path(os.environ["STAND_IN_CALLS"]).read_text().splitlines()
    ]
    return [call for call in made if kind in (None, call["kind"])]


def logged(name: str) -> list[Any]:
    """Return (samples, value) of every call that has logged this name."""
    return [(call["samples"], call[name]) for call in called("log") if name in call]


def new_and_extended(path: Path, folder: Path) -> None:
    """Train on two ranks, of which only rank 0 calls W&B. Then resume the run with more steps."""
    use_stand_in(folder)
    run = train(path)
    if os.environ["RANK"] == "0":
        look_at_new_run(path, run)
    # The extended run keeps its id, and its name is the folder's.
    assert train(path, "steps=3", resume=run) == run
    if os.environ["RANK"] == "0":
        (init,) = called("init")
        assert (init["id"], init["name"]) == ("id-of-wandb", "tiny")
        assert [samples for samples, _ in logged("train/loss")] == [48]


def look_at_new_run(path: Path, run: Path) -> None:
    (init,), made = called("init"), called()
    given = {
        "project": "clip",
        "name": "tiny",
        "dir": str(run),
        "id": None,
    }
    assert given.items() <= init.items()
    assert init["resume"] == "allow"
    assert init["config"] == load_config(path).model_dump(mode="json") | {"ranks": 2}
    assert {"kind": "define_metric", "name": "*", "step_metric": "samples"} in made
    assert made[-1] == {"kind": "finish", "exit_code": 0}
    assert (run / WANDB_ID).read_text() == "id-of-wandb"
    losses = [(record["samples"], record["loss"]) for record in records(run) if "loss" in record]
    assert logged("train/loss") == losses
    with (path.parent / "points" / "train_loss.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "loss"]
    assert [(int(samples), float(loss)) for samples, loss in rows] == losses
    assert len(losses) == 2


def test_wandb_gets_settings_and_points_and_a_resume_goes_on_in_its_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "wandb.py").write_text(STAND_IN)
    deepspeed = {
        "base": "zero1",
        "torch_autocast": {"enabled": False},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "points"},
    }
    path = wandb_recipe(tmp_path, deepspeed=deepspeed)
    run_ranks(new_and_extended, 2, path, tmp_path, joined=False)


def troubles(path: Path, folder: Path) -> None:
    use_stand_in(folder)
    train(path, problem="no network")
    assert [call["kind"] for call in called()] == ["init"]

    train(path, problem="dies")

    with pytest.raises(AgreedError):
        train(path, "optim.lr=1e20", "steps=20")
    assert called()[-1] == {"kind": "finish", "exit_code": 1}


@pytest.mark.slow
def test_no_run_fails_for_wandb_and_a_failed_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(STAND_IN)
    run_ranks(troubles, 1, wandb_recipe(tmp_path), tmp_path, joined=False)


def offline(path: Path) -> tuple[str, str]:
    """Train two steps, and resume for two more. Return the run folder and W&B's id of the run."""
    home = dict.fromkeys(
        ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"), str(path.parent)
    )
    os.environ.update(home, WANDB_MODE="offline")
    run = run_training(load_config(path))
    kept = (run / WANDB_ID).read_text()
    assert len(list((run / "wandb").glob(f"offline-run-*-{kept}/run-{kept}.wandb"))) == 1
    assert run_training(load_config(path, ["steps=4"]), run / CHECKPOINTS / "step-00000002") == run
    return str(run), kept


def test_offline_run_is_resumed_under_the_same_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    ((folder, kept),) = run_ranks(offline, 1, wandb_recipe(tmp_path), joined=False)
    run = Path(folder)
    assert (run / WANDB_ID).read_text() == kept
    sessions = sorted((run / "wandb").glob(f"offline-run-*-{kept}"))
    assert len(sessions) == 2
    for session in sessions:
        assert (session / f"run-{kept}.wandb").stat().st_size > 0
        content = (session / f"run-{kept}.wandb").read_bytes()
        assert all(
            word in content
            for word in (b"train/loss", b"clip", b"global_batch", b"eval/unseen_top1")
        )


def test_blocks_of_the_manual_are_settings() -> None:
    blocks = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "logging.md").read_text(encoding="utf-8"), re.DOTALL
    )
    first, second = (yaml.safe_load(block) for block in blocks)
    assert settings(**first).log.wandb.project == "clip"
    read = read_ds_config(second["deepspeed"], ROOT)
    assert (
        second["deepspeed"]["comet"].items()
        <= render_ds_config(settings(deepspeed=read), 1)["comet"].items()
    )
