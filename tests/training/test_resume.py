"""Which checkpoint a run goes on from: the newest, one that is named, or an older one where the newest is damaged."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.metrics.run_folder import CHECKPOINTS
from disco_ds.training.build import build
from disco_ds.training.checkpoint import read
from disco_ds.training.loop import train
from disco_ds.training.resume import choose
from disco_ds.training.retention import META, find_latest
from helpers.checkpoints import describe, flip, plant, write_checkpoint
from helpers.dist import run_ranks
from helpers.launched import SAME, equal_checkpoints, records
from helpers.tiny_run import expect, recipe, refused
from helpers.towers import BPE_SIZE, tiny_config, write_tiny

CONFIG = tiny_config("tiny", {})


def garble(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def change_settings(path: Path) -> None:
    meta = json.loads((path / META).read_text())
    meta["identity"]["seed"] = 5
    describe(path, meta)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "garbage": (lambda path: garble(path / META), "is not a disco_ds checkpoint description"),
    "foreign": (lambda path: (path / META).write_text("[]"), "is not a disco_ds checkpoint description"),
    "meta": (lambda path: flip(path / META), "step-00000003"),
    "missing": (lambda path: (path / "rank_00001.pt").unlink(), "is incomplete: rank_00001.pt is missing"),
    "cut": (lambda path: (path / "engine" / "weights.pt").write_bytes(b"012"), "has 3 bytes, expected 10"),
    "of rank 0": (lambda path: flip(path / "engine" / "weights.pt"), "engine/weights.pt is not what was written"),
    "of rank 1": (lambda path: flip(path / "rank_00000.pt"), "rank_00000.pt is not what was written"),
    "code": (lambda path: plant(path, "rank_00000.pt", path.parents[1] / "ran"), "rank_00000.pt is not what was"),
}


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def choose_step(run: Path, unattended: bool, resume: str = "latest") -> tuple[int | str, list[str]]:
    """(the step that is gone on from, or what is said instead; rank 0's warnings), the same on every rank."""
    said = Said()
    logging.getLogger("disco_ds").addHandler(said)
    saved: dict[str, Any] = json.loads((run / "identity.json").read_text())
    try:
        found: int | str = choose(run, resume, CONFIG, saved, unattended).step
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
        expect(str(said), words, f"; --resume {older} goes on from the one before it")
        assert choose_step(run, False, str(older))[0] == 2
        found, warnings = choose_step(run, unattended=True)
        assert found == 2, found
        expect(warnings[0], words, "; trying the one before it, step-00000002")
        assert not list(run.glob("ran")), "code from a checkpoint has run"
    # What is named is the newest that may be taken.
    assert choose_step(folder / "cut", True, str(folder / "cut" / CHECKPOINTS / "step-00000001"))[0] == 1
    found, warnings = choose_step(folder / "all", unattended=True)
    expect(str(found), "step-00000001", "step-00000002", "step-00000003", "has no older complete checkpoint")
    assert len(warnings) == 2
    found, warnings = choose_step(folder / "settings", unattended=True)
    expect(str(found), "made with other settings", "seed: 5 in the checkpoint, 0 now")
    assert not warnings


def test_damage_of_every_kind_is_told_with_the_older_checkpoint_or_fallen_back_from(tmp_path: Path) -> None:
    for kind in (*DAMAGE, "all", "settings"):
        paths = [write_checkpoint(tmp_path / kind, step) for step in (1, 2, 3)]
        (tmp_path / kind / "identity.json").write_text(json.dumps(read(find_latest(tmp_path / kind)).meta["identity"]))
        if kind in DAMAGE:
            DAMAGE[kind][0](paths[-1])
    for path in (tmp_path / "all" / CHECKPOINTS).iterdir():
        flip(path / "rank_00001.pt")
    change_settings(tmp_path / "settings" / CHECKPOINTS / "step-00000003")
    run_ranks(fall_back, 2, tmp_path)


# Whole runs


def train_six(path: Path, resume: str | None = None, unattended: bool = False, *overrides: str) -> Path:
    with ExitStack() as stack:
        run = build(load_config(path, list(overrides)), resume, stack, unattended)
        assert not resume or find_latest(run.folder).name == f"step-{run.first_step:08d}", "a crash would skip steps"
        train(run)
    return run.folder


def go_on_from_older(path: Path) -> None:
    """Named in one folder; found by itself in another, where a link cannot be removed by retention."""
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
    expect(said, "optim_states.pt is not what was written", f"--resume {older} goes on from the one before it")
    missing = older.with_name("step-00000003")
    expect(refused(load_config(path), resume=str(missing)), f"{missing}: there is no such checkpoint")
    # Refused, it has changed nothing.
    expect(refused(load_config(path, ["seed=1"]), resume=str(older)), "seed: 0 in the checkpoint, 1 now")
    assert not list(named.glob(f"{CHECKPOINTS}/set-aside-*"))
    comm.barrier()
    assert train_six(path, str(older)) == named
    assert train_six(path, str(alone), True, "checkpoint.keep_last=1") == alone


def test_run_that_goes_on_from_an_older_checkpoint_is_the_uninterrupted_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"every_steps": 2, "keep_last": 3}
    model = {"name": write_tiny(tmp_path, BPE_SIZE, patch_dropout=0.5)}
    run_ranks(go_on_from_older, 2, recipe(tmp_path, steps=6, model=model, checkpoint=settings))
    whole, named, alone = (tmp_path / "runs" / name for name in ("tiny", "named", "alone"))
    kept = {path: sorted(child.name for child in (path / CHECKPOINTS).iterdir()) for path in (named, alone)}
    assert kept[named] == ["set-aside-step-00000006", *(f"step-0000000{step}" for step in (2, 4, 6))]
    assert kept[alone] == ["set-aside-step-00000006", "step-00000002", "step-00000006"]
    for run in (named, alone):
        for mine, other in zip(records(run), records(whole), strict=True):
            assert [mine.get(key) for key in SAME] == [other.get(key) for key in SAME]
        equal_checkpoints(*(path / CHECKPOINTS / "step-00000006" for path in (run, whole)))
        points = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        assert [point.step // 16 for point in points.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
