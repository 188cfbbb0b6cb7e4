"""Which checkpoint a run resumes from: the newest, a named one, or an older one if the newest is damaged."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.keep import find_latest
from disco_ds.checkpoints.resume import find_checkpoint
from disco_ds.checkpoints.state import read_tensors
from disco_ds.config import ModelSettings, load_config, make_schedule
from disco_ds.data.sources.counting import index_shards
from disco_ds.data.sources.shards import write_manifest
from disco_ds.distributed import comm
from disco_ds.models.clip import build_model
from disco_ds.runs.messages import LOG
from disco_ds.runs.run_folder import CHECKPOINTS, FINISHED, META, mark_finished
from disco_ds.training.build import build
from disco_ds.training.loop import is_due, train
from helpers.checkpoints import describe, flip, plant, write_checkpoint
from helpers.dist import run_ranks
from helpers.launched import equal_checkpoints, records, same_as_uninterrupted
from helpers.tiny_run import expect, image_sample, recipe, refused, write_shard
from helpers.towers import BPE_SIZE, tiny_config, write_tiny

CONFIG = tiny_config("tiny", {})


def garble(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def change_settings(path: Path) -> None:
    meta = json.loads((path / META).read_text())
    meta["identity"]["seed"] = 5
    describe(path, meta)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "garbage": (lambda path: garble(path / META), "is not a complete disco_ds checkpoint"),
    "foreign": (
        lambda path: (path / META).write_text("[]"),
        "is not a complete disco_ds checkpoint",
    ),
    "meta": (lambda path: flip(path / META), "step-00000003"),
    "missing": (
        lambda path: (path / "rank_00001.pt").unlink(),
        "is incomplete: rank_00001.pt is missing",
    ),
    "cut": (
        lambda path: (path / "engine" / "weights.pt").write_bytes(b"012"),
        "is damaged: engine/weights.pt has 3 bytes, expected 10",
    ),
    "of rank 0": (
        lambda path: flip(path / "engine" / "weights.pt"),
        "engine/weights.pt is not what was written",
    ),
    "of rank 1": (
        lambda path: flip(path / "rank_00000.pt"),
        "rank_00000.pt is not what was written",
    ),
    "code": (
        lambda path: plant(path, "rank_00000.pt", path.parents[1] / "ran"),
        "rank_00000.pt is not what was",
    ),
}


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def choose_step(run: Path, unattended: bool, resume: str = "latest") -> tuple[int | str, list[str]]:
    """Return (the step to resume from or the error message, rank 0's warnings).

    The step or message must be equal on all ranks.
    """
    said = Said()
    logging.getLogger("disco_ds").addHandler(said)
    saved: dict[str, Any] = json.loads((run / "identity.json").read_text())
    try:
        found: int | str = find_checkpoint(
            run, resume, CONFIG, lambda stage: saved, unattended
        ).step
    except ValueError as error:
        found = str(error)
    logging.getLogger("disco_ds").removeHandler(said)
    everybodys = comm.gather_objects(found)
    assert len(set(everybodys)) == 1, everybodys
    return found, comm.broadcast(said.lines)


def fall_back(folder: Path) -> None:
    for kind, (_, words) in DAMAGE.items():
        run, older = folder / kind, folder / kind / CHECKPOINTS / "step-00000002"
        said, _ = choose_step(run, unattended=False)
        expect(str(said), words, f"; --resume {older} resumes")
        assert choose_step(run, False, str(older))[0] == 2
        found, warnings = choose_step(run, unattended=True)
        assert found == 2, found
        expect(warnings[0], words, "step-00000002")
        assert not list(run.glob("ran")), "code from a checkpoint has run"
    # If a checkpoint is named, no newer one may be chosen.
    assert (
        choose_step(folder / "cut", True, str(folder / "cut" / CHECKPOINTS / "step-00000001"))[0]
        == 1
    )
    found, warnings = choose_step(folder / "all", unattended=True)
    expect(str(found), "step-00000001", "has no older complete checkpoint")
    assert len(warnings) == 2
    expect(warnings[0], "step-00000003", "step-00000002")
    found, warnings = choose_step(folder / "settings", unattended=True)
    expect(str(found), "made with other settings", "seed: 5 in the checkpoint, 0 now")
    assert not warnings


def test_damage_of_every_kind_names_the_older_checkpoint_or_falls_back_to_it(
    tmp_path: Path,
) -> None:
    for kind in (*DAMAGE, "all", "settings"):
        paths = [write_checkpoint(tmp_path / kind, step) for step in (1, 2, 3)]
        (tmp_path / kind / "identity.json").write_text(
            json.dumps(read(find_latest(tmp_path / kind)).meta["identity"])
        )
        if kind in DAMAGE:
            DAMAGE[kind][0](paths[-1])
    for path in (tmp_path / "all" / CHECKPOINTS).iterdir():
        flip(path / "rank_00001.pt")
    change_settings(tmp_path / "settings" / CHECKPOINTS / "step-00000003")
    run_ranks(fall_back, 2, tmp_path)


# Whole runs


def train_six(
    path: Path,
    resume: str | None = None,
    unattended: bool = False,
    *overrides: str,
    allow_change: tuple[str, ...] = (),
) -> Path:
    with ExitStack() as stack:
        run = build(load_config(path, list(overrides)), resume, stack, unattended, allow_change)
        assert (
            not resume or find_latest(run.folder).name == f"step-{run.schedule.first_step:08d}"
        ), "checkpoints newer than the first step must be set aside, or a restart would skip steps"
        train(run)
    return run.folder


def resume_from_older(path: Path) -> None:
    """Damage the newest checkpoint, and resume two copies of a run from an older one.

    In the copy `named`, the user names the older checkpoint. In `alone`, it is chosen automatically; there, the oldest
    checkpoint is a symbolic link.
    """
    whole = train_six(path)
    named, alone = (whole.with_name(name) for name in ("named", "alone"))
    if comm.rank() == 0:
        for copy in (named, alone):
            shutil.copytree(whole, copy)
            flip(next((copy / CHECKPOINTS / "step-00000006" / "engine").glob("*rank_1*optim*")))
        link = alone / CHECKPOINTS / "step-00000002"
        link.symlink_to(link.rename(alone / "archive"))
    comm.barrier()
    older = named / CHECKPOINTS / "step-00000004"
    said = refused(load_config(path), resume=str(named))
    expect(
        said,
        "optim_states.pt is not what was written",
        f"--resume {older} resumes",
    )
    missing = older.with_name("step-00000003")
    expect(
        refused(load_config(path), resume=str(missing)), f"{missing}: there is no such checkpoint"
    )
    # A refused resume has changed nothing.
    expect(
        refused(load_config(path, ["seed=1"]), resume=str(older)),
        "seed: 0 in the checkpoint, 1 now",
    )
    assert not list(named.glob(f"{CHECKPOINTS}/set-aside-*"))
    comm.barrier()
    assert train_six(path, str(older)) == named
    assert train_six(path, str(alone), True, "checkpoint.keep_last=1") == alone


def test_run_resumed_from_an_older_checkpoint_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"every_steps": 2, "keep_last": 3}
    model = {"name": write_tiny(tmp_path, BPE_SIZE, patch_dropout=0.5)}
    run_ranks(resume_from_older, 2, recipe(tmp_path, steps=6, model=model, checkpoint=settings))
    whole, named, alone = (tmp_path / "runs" / name for name in ("tiny", "named", "alone"))
    kept = {
        path: sorted(child.name for child in (path / CHECKPOINTS).iterdir())
        for path in (named, alone)
    }
    assert kept[named] == [
        "set-aside-step-00000006",
        *(f"step-0000000{step}" for step in (2, 4, 6)),
    ]
    assert kept[alone] == ["set-aside-step-00000006", "step-00000006"]
    assert (alone / "archive" / META).exists(), "retention must remove only the link"
    for run in (named, alone):
        same_as_uninterrupted(run, whole)
        points = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        assert [point.step // 16 for point in points.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def first_step(path: Path, *overrides: str) -> tuple[str, int]:
    """Return the folder and the step at which `--resume auto` starts."""
    with ExitStack() as stack:
        run = build(load_config(path, list(overrides)), "auto", stack, allow_change=("optim.lr",))
    comm.barrier()
    return run.folder.name, run.schedule.first_step


def resume_automatically(path: Path) -> None:
    assert first_step(path) == ("tiny", 0), "there is nothing to resume yet"
    with (
        pytest.raises(ValueError, match="--allow-change seed: "),
        ExitStack() as stack,
    ):
        build(load_config(path), "auto", stack, allow_change=("seed",))
    folder = train_six(path)
    assert folder.name == "tiny-2", "the first run has no checkpoint, so a new run must start"
    assert first_step(path, "optim.lr=1e-4") == ("tiny-2", 6)
    if comm.rank() == 0:
        mark_finished(folder, {"steps": 6, "samples": 96})
    comm.barrier()
    assert "has done all its steps (6)" in refused(load_config(path), resume="auto")
    assert first_step(path, "steps=7") == ("tiny-2", 6)
    if comm.rank() == 0:
        shutil.rmtree(folder / CHECKPOINTS / "step-00000006")
        (folder / CHECKPOINTS / "step-00000006").mkdir()
        flip(next((folder / CHECKPOINTS / "step-00000004" / "engine").glob("*rank_1*optim*")))
    comm.barrier()
    assert first_step(path) == ("tiny-2", 2), (
        "--resume auto must fall back to an older checkpoint by itself"
    )
    expect(
        refused(load_config(path, ["seed=1"]), resume="auto"), "seed: 0 in the checkpoint, 1 now"
    )
    if comm.rank() == 0:
        flip(next((folder / CHECKPOINTS / "step-00000002" / "engine").glob("*rank_1*optim*")))
    comm.barrier()
    assert "no older complete checkpoint" in refused(load_config(path), resume="auto"), (
        "a run whose checkpoints are all damaged must not be abandoned silently"
    )
    if comm.rank() == 0:
        for checkpoint in (folder / CHECKPOINTS).glob("step-*"):
            (checkpoint / META).unlink(missing_ok=True)
        mark_finished(folder, {"steps": 6, "samples": 96})
    comm.barrier()
    assert "has done all its steps (6)" in refused(load_config(path), resume="auto"), (
        "a finished run must not be repeated, even if its checkpoints have been removed"
    )
    if comm.rank() == 0:
        (folder / FINISHED).unlink()
    comm.barrier()
    assert first_step(path) == ("tiny-3", 0)


def test_auto_resumes_the_newest_run_if_it_has_a_complete_checkpoint(tmp_path: Path) -> None:
    run_ranks(
        resume_automatically,
        2,
        recipe(tmp_path, steps=6, checkpoint={"every_steps": 2, "keep_last": 3}),
    )


def resume_without_weights(path: Path) -> None:
    whole = train_six(path)
    if comm.rank() == 0:
        shutil.copytree(whole, whole.with_name("resumed"))
        shutil.rmtree(whole.with_name("resumed") / CHECKPOINTS / "step-00000006")
        (path.parent / "weights.pt").unlink()
    comm.barrier()
    expect(refused(load_config(path, ["name=new"])), "weights.pt is not a file")
    train_six(path, str(whole.with_name("resumed")))


@pytest.mark.slow
def test_resumed_run_needs_no_pretrained_weights(tmp_path: Path) -> None:
    """The pretrained weights must not even be downloaded, because the machine may not reach the hub."""
    name = write_tiny(tmp_path, BPE_SIZE)
    weights = build_model(ModelSettings(name=name)).state_dict()
    torch.save(
        weights | {"logit_scale": weights["logit_scale"].reshape(())}, tmp_path / "weights.pt"
    )
    model = {"name": name, "lock_image": True, "pretrained": str(tmp_path / "weights.pt")}
    run_ranks(resume_without_weights, 2, recipe(tmp_path, steps=6, model=model))
    whole, resumed = (tmp_path / "runs" / name for name in ("tiny", "resumed"))
    assert [record["loss"] for record in records(resumed)] == [
        record["loss"] for record in records(whole)
    ]
    equal_checkpoints(*(path / CHECKPOINTS / "step-00000006" for path in (whole, resumed)))
    kept = read_tensors(read(resumed / CHECKPOINTS / "step-00000006"))
    for key in [key for key in weights if key.startswith("visual.")]:
        assert torch.equal(kept[key], weights[key]), key


# Changed settings and longer runs

CHANGED = (
    "optim.lr=2e-3",
    "optim.weight_decay=0.7",
    "optim.betas=[0.5, 0.6]",
    "optim.clip_norm=0.01",
)
ALLOWED = ("optim.lr", "optim.weight_decay", "optim.betas", "optim.clip_norm")


def change_by_hand(checkpoint: Path) -> None:
    """Edit a checkpoint's files as if the changed settings had been used when it was written."""
    for path in checkpoint.glob("engine/*optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        state = tree["optimizer_state_dict"]
        state["clip_grad"] = 0.01
        for group in state["base_optimizer_state"]["param_groups"]:
            group.update(betas=(0.5, 0.6), weight_decay=0.7 if group["weight_decay"] else 0.0)
        torch.save(tree, path)
    meta = json.loads((checkpoint / META).read_text())
    meta["identity"]["optim"].update(lr=2e-3, weight_decay=0.7, betas=[0.5, 0.6], clip_norm=0.01)
    describe(checkpoint, meta)


def change_settings_of_runs(path: Path) -> None:
    whole = train_six(path)
    told, by_hand = (whole.with_name(name) for name in ("told", "by-hand"))
    if comm.rank() == 0:
        for copy in (told, by_hand):
            shutil.copytree(whole, copy)
        change_by_hand(by_hand / CHECKPOINTS / "step-00000002")
    comm.barrier()
    second = told / CHECKPOINTS / "step-00000002"
    said = refused(load_config(path, list(CHANGED)), resume=str(second))
    expect(
        said,
        "optim.lr: 0.001 in the checkpoint, 0.002 now",
        f"--allow-change {','.join(sorted(ALLOWED))} ",
    )
    assert "--allow-change" not in refused(
        load_config(path, [*CHANGED, "seed=1"]), resume=str(second)
    )
    for name in ("seed", "optim.name", "optim.image", "data.shards", "optim.rate"):
        with (
            ExitStack() as stack,
            pytest.raises(ValueError, match=f"--allow-change {name}: "),
        ):
            build(load_config(path), str(second), stack, allow_change=(name,))
    with ExitStack() as stack, pytest.raises(ValueError, match="--allow-change needs --resume"):
        build(load_config(path), None, stack, allow_change=ALLOWED)
    train_six(path, str(second), False, *CHANGED, allow_change=ALLOWED)
    train_six(path, str(by_hand / CHECKPOINTS / "step-00000002"), False, *CHANGED)
    if comm.rank() == 0:
        mark_finished(told, {"steps": 6, "samples": 96})
    comm.barrier()
    expect(
        refused(load_config(path, [*CHANGED]), resume=str(told)),
        "has done all its steps (6): ",
        "steps=",
    )
    train_six(path, str(told), False, *CHANGED, "steps=7")
    assert not (told / FINISHED).exists()
    # The checkpoints contain the change from now on, so it need not be allowed again.
    train_six(path, str(told / CHECKPOINTS / "step-00000004"), False, *CHANGED)


def logged_changes(run: Path) -> list[str]:
    log = run / LOG
    return re.findall(r"from step .* instead of .*", log.read_text() if log.exists() else "")


def test_allowed_changes_act_as_if_the_checkpoint_had_them(tmp_path: Path) -> None:
    settings = {"every_steps": 2, "keep_last": 3}
    optim = {"lr": 1e-3, "warmup_steps": 0, "weight_decay": 0.2, "clip_norm": 5.0}
    run_ranks(
        change_settings_of_runs, 2, recipe(tmp_path, steps=6, optim=optim, checkpoint=settings)
    )
    whole, told, by_hand = (tmp_path / "runs" / name for name in ("tiny", "told", "by-hand"))
    same_as_uninterrupted(told, by_hand)
    assert [record["ids"] for record in records(told)] == [
        record["ids"] for record in records(whole)
    ]
    assert records(told)[-1]["loss"] != records(whole)[-1]["loss"]
    *changes, longer = logged_changes(told)
    assert longer == "from step 6 on, steps is 7 instead of 6"
    assert sorted(changes) == [
        "from step 2 on, optim.betas is [0.5, 0.6] instead of [0.9, 0.98]",
        "from step 2 on, optim.clip_norm is 0.01 instead of 5.0",
        "from step 2 on, optim.lr is 0.002 instead of 0.001",
        "from step 2 on, optim.weight_decay is 0.7 instead of 0.2",
    ]
    assert not logged_changes(whole)


# Epochs


def train_epochs(path: Path) -> None:
    whole = train_six(path)
    if comm.rank() == 0:
        shutil.copytree(whole, whole.with_name("resumed"))
        for name in (8, 12):
            shutil.rmtree(whole.with_name("resumed") / CHECKPOINTS / f"step-{name:08d}")
    comm.barrier()
    train_six(path, str(whole.with_name("resumed")))


@pytest.mark.slow
def test_epochs_are_counted_from_the_data_and_resumed(tmp_path: Path) -> None:
    """Sixty-four samples, 16 per step: four steps per epoch."""
    samples = [image_sample(number) for number in range(64)]
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "0.tar", samples)
    write_manifest(index_shards(tmp_path / "shards"))
    data = {"shards": str(tmp_path / "shards"), "image_key": "png", "workers": 0, "slots": 4}
    settings = {
        "steps": None,
        "epochs": 3,
        "checkpoint": {"every_epochs": 1},
        "eval": {"every_epochs": 1.5},
    }
    run_ranks(train_epochs, 1, recipe(tmp_path, data=data, **settings))
    whole, resumed = (tmp_path / "runs" / name for name in ("tiny", "resumed"))
    names = [f"step-{step:08d}" for step in (4, 8, 12)]
    assert sorted(path.name for path in (whole / CHECKPOINTS).iterdir()) == names
    assert [record["epoch"] for record in records(whole)] == [step / 4 for step in range(1, 13)]
    assert load_config(whole / "config.yaml").find_end()[0] == 12
    assert [record["epoch"] for record in records(resumed)] == [n / 4 for n in range(1, 13)]
    same_as_uninterrupted(resumed, whole)


def test_epochs_are_counted_in_whole_samples(tmp_path: Path) -> None:
    """With 1,000 samples and 100 per step, 0.1 epochs are exactly one step. In floats, 0.3 // 0.1 would be 2."""
    own = ["global_batch=100", "micro_batch=100", "steps=10", "checkpoint.every_epochs=0.1"]
    config = load_config(recipe(tmp_path), own)
    run: Any = SimpleNamespace(
        schedule=make_schedule(config), loader=SimpleNamespace(epoch_samples=1000)
    )
    steps = range(1, 11)
    assert all(is_due(run, step, config.checkpoint) for step in steps)
    every = config.checkpoint.model_copy(update={"every_epochs": 0.3})
    assert [step for step in steps if is_due(run, step, every)] == [3, 6, 9]
    longer = load_config(recipe(tmp_path, steps=None, epochs=1.15), ["global_batch=20"])
    assert longer.with_samples(12_800_000).samples == 14_720_000


# Failing data


def lose_data(path: Path) -> None:
    whole = train_six(path)
    config = load_config(path, ["name=lost", "checkpoint.every_steps=0"])
    with ExitStack() as stack:
        run = build(config, None, stack)
        start_step, numbers = run.loader.start_step, iter(range(6))

        def start_and_fail(**arguments: Any) -> Any:
            if next(numbers) == 3 and comm.rank() == 1:
                run.loader._error = "the shard is gone"  # as after a read error
            return start_step(**arguments)

        run.loader.start_step = start_and_fail  # type: ignore[method-assign]
        with pytest.raises(
            comm.AgreedError,
            match=r"step 3: .*data failed on rank 1: .*saved after step 3; --resume latest",
        ):
            train(run)
    assert find_latest(run.folder).name == "step-00000003"
    assert train_six(path, str(run.folder), False, "name=lost") == whole.with_name("lost")


@pytest.mark.slow
def test_run_resumed_after_failing_data_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    model = {"name": write_tiny(tmp_path, BPE_SIZE, patch_dropout=0.5)}
    run_ranks(lose_data, 2, recipe(tmp_path, steps=6, model=model))
    whole, lost = (tmp_path / "runs" / name for name in ("tiny", "lost"))
    same_as_uninterrupted(lost, whole)
