"""Runs resumed with another number of ranks, ZeRO stage or precision have the same batches and losses."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.export import export_run
from disco_ds.checkpoints.keep import find_latest
from disco_ds.checkpoints.state import States, join, read_fragments, read_tensors
from disco_ds.checkpoints.weights import read_weights
from disco_ds.config import ModelSettings, load_config
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.models.param_groups import parameter_groups
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.launched import FP32, records
from helpers.machine import HAS_FP16
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, distance, write_tiny

KEYS = {"fp32", "exp_avg", "exp_avg_sq", "step", "ema", "ema_steps"}


def settings(stage: int, **precision: Any) -> dict[str, Any]:
    return {"base": f"zero{stage}", **FP32, **precision}


def go(path: Path, resume: str | None) -> None:
    """Train to the last step. Runs on every rank."""
    with ExitStack() as stack:
        train(build(load_config(path), resume, stack))


def write_again(path: Path, chain: list[dict[str, Any]]) -> None:
    """For each ds_config in turn, resume, save again without a step, and copy the checkpoint. Runs on every rank."""
    for number, deepspeed in enumerate(chain):
        with ExitStack() as stack:
            run = build(load_config(path, [f"deepspeed={json.dumps(deepspeed)}"]), "latest", stack)
            run.saver.saved_step = 0  # otherwise, this step counts as saved
            run.saver.save(run.schedule.first_step, last=False)
            run.engine.destroy()
            comm.barrier()
            if comm.rank() == 0:
                latest = find_latest(run.folder)
                shutil.copytree(latest, path.parent / f"written-{comm.size()}-{number}")
            comm.barrier()


def run_on(folder: Path, ranks: int, steps: int, resume: str | None, **changes: Any) -> None:
    run_ranks(go, ranks, write_recipe(folder, steps=steps, **changes), resume)


def write_recipe(
    folder: Path,
    name: str = "adamw",
    factory: str | None = None,
    elementwise: bool = False,
    **changes: Any,
) -> Path:
    optim: dict[str, Any] = {"name": name, "factory": factory, "elementwise": elementwise}
    optim |= {"muon_precision": "fp32", "lr": 1e-3, "warmup_steps": 0, "schedule": "constant"}
    optim["ema"] = {"decay": 0.9, "every_steps": 3}
    return recipe(folder, optim=optim, checkpoint={"every_steps": 2, "keep_last": 9}, **changes)


def states(path: Path) -> dict[str, States]:
    """Read a checkpoint: parameter name -> its master weights and optimizer states, joined from all ranks."""
    written_by = next(
        folder / "tiny.yaml" for folder in path.parents if (folder / "tiny.yaml").is_file()
    )
    config = load_config(written_by)
    found = read_fragments(read(path))
    assert found.keys() == {
        name
        for group in parameter_groups(build_model(config.model), config.optim)
        for name in group["names"]
    }
    return {
        name: {key: join(parts, key) for key in parts[0].states} for name, parts in found.items()
    }


def equal_states(first: Path, second: Path) -> None:
    """Check that the master weights and optimizer states of two checkpoints are bit-identical."""
    mine, theirs = states(first), states(second)
    for name, kept in mine.items():
        assert kept.keys() == theirs[name].keys() == KEYS
        for key, value in kept.items():
            mine, other = (torch.as_tensor(each).reshape(-1) for each in (value, theirs[name][key]))
            assert torch.equal(mine, other), (second, name, key)


def equal_losses(folder: Path, other: Path, tolerance: float) -> None:
    mine, theirs = (records(path / "runs" / "tiny") for path in (folder, other))
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a["step"], a["ids"], a["lr"]) == (b["step"], b["ids"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=100 * tolerance)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train eight steps on two ranks at ZeRO 1 without interruption, and return the folder."""
    folder = tmp_path_factory.mktemp("whole")
    run_on(folder, 2, 8, None, deepspeed=settings(1))
    return folder


def begin(whole: Path, folder: Path, step: int) -> None:
    """Copy the run `whole` to `folder` as if it had been stopped at a step: no other checkpoint is left."""
    shutil.copytree(whole / "runs", folder / "runs", dirs_exist_ok=True)
    for path in checkpoint_of(folder, step).parent.glob("step-*"):
        if path != checkpoint_of(folder, step):
            shutil.rmtree(path)


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "runs" / "tiny" / CHECKPOINTS / f"step-{step:08d}"


def test_run_resumes_as_one_rank_at_zero0(whole: Path, tmp_path: Path) -> None:
    begin(whole, tmp_path, 4)
    run_on(tmp_path, 1, 8, "latest", deepspeed=settings(0))
    equal_losses(tmp_path, whole, 1e-5)
    saved = [checkpoint_of(folder, 8) for folder in (tmp_path, whole)]
    mine, theirs = (read_weights(path, ema=True).tensors for path in saved)
    assert distance(mine, theirs) < 1e-5
    assert distance(read_weights(saved[1]).tensors, theirs) > 1e-3


def test_states_are_the_same_to_the_bit_in_every_shape(whole: Path, tmp_path: Path) -> None:
    begin(whole, tmp_path, 8)
    written = checkpoint_of(whole, 8)
    bf16, half = {"bf16": {"enabled": True}}, {"fp16" if HAS_FP16 else "bf16": {"enabled": True}}
    chain = [
        settings(3),
        settings(0),
        settings(2, **bf16),
        settings(3, **bf16),
        settings(1, **half),
        settings(1),
    ]
    run_ranks(write_again, 2, write_recipe(tmp_path, steps=8), chain)
    for number in range(len(chain)):
        equal_states(written, tmp_path / f"written-2-{number}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_come_from_the_checkpoint(stage: int, tmp_path: Path) -> None:
    model = {"name": write_tiny(tmp_path, BPE_SIZE), "lock_image": True}
    pretrained = build_model(ModelSettings(**model)).state_dict()
    # In files of open_clip, the scale is 0-d.
    pretrained["logit_scale"] = pretrained["logit_scale"].reshape(())
    torch.save(pretrained, tmp_path / "weights.pt")
    run_on(
        tmp_path,
        2,
        2,
        None,
        deepspeed=settings(stage),
        model={**model, "pretrained": str(tmp_path / "weights.pt")},
    )
    run_ranks(write_again, 1, write_recipe(tmp_path, steps=2, model=model), [settings(0)])
    kept = read_tensors(read(tmp_path / "written-1-0"))
    for name in [name for name in pretrained if name.startswith("visual.")]:
        assert torch.equal(kept[name], pretrained[name]), name


@pytest.mark.slow
def test_states_are_the_same_to_the_bit_in_every_world(whole: Path, tmp_path: Path) -> None:
    begin(whole, tmp_path, 8)
    for ranks in (1, 4, 2):
        run_ranks(
            write_again,
            ranks,
            write_recipe(tmp_path, steps=8),
            [settings(stage) for stage in (0, 3, 1, 2)],
        )
        for number in range(4):
            equal_states(checkpoint_of(whole, 8), tmp_path / f"written-{ranks}-{number}")


@pytest.mark.slow
def test_run_resumes_at_other_stages_and_world_sizes(whole: Path, tmp_path: Path) -> None:
    begin(whole, tmp_path, 2)
    for ranks, stage, steps in ((1, 0, 4), (4, 3, 6), (2, 2, 8)):
        run_on(tmp_path, ranks, steps, "latest", deepspeed=settings(stage))
    equal_losses(tmp_path, whole, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        ({"name": "lamb"}, (0, 0, 0)),
        ({"factory": "timm.optim:Adan", "elementwise": True}, (1, 2, 0)),
    ],
)
def test_state_in_parameter_groups_continues(
    optimizer: dict[str, Any], stages: tuple[int, ...], tmp_path: Path
) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other):
        folder.mkdir()
    run_on(whole, 2, 6, None, deepspeed=settings(stages[0]), **optimizer)
    begin(whole, other, 2)
    for ranks, stage, steps in zip((1, 2), stages[1:], (4, 6), strict=True):
        run_on(other, ranks, steps, "latest", deepspeed=settings(stage), **optimizer)
    equal_losses(other, whole, 1e-5)


@pytest.mark.slow
def test_muon_and_average_continue_at_other_stages(tmp_path: Path) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other):
        folder.mkdir()
    run_on(whole, 2, 8, None, deepspeed=settings(1), name="muon")
    begin(whole, other, 2)
    for ranks, stage, steps in ((1, 0, 4), (4, 3, 6), (2, 2, 8)):
        run_on(other, ranks, steps, "latest", deepspeed=settings(stage), name="muon")
    equal_losses(other, whole, 1e-5)
    saved = [checkpoint_of(folder, 8) for folder in (other, whole)]
    exports = [
        export_run(path, tmp_path / str(number), ema=True) for number, path in enumerate(saved)
    ]
    mine, theirs = (read_weights(path).tensors for path in exports)
    assert distance(mine, theirs) < 1e-5
