"""Checkpoints without an engine: what must stay the same, what is whole, what is removed."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from towers import TINY, tiny_config

from disco_ds import checkpoint
from disco_ds.checkpoint import FORMAT, META, find_latest, identity, read, read_meta, refuse_changes, remove_old, shape
from disco_ds.run_folder import CHECKPOINTS


def identify(fingerprint: str = "abc", **changes: Any) -> dict[str, Any]:
    return identity(tiny_config("tiny", {"zero_optimization": {"stage": 1}}, **changes), fingerprint, TINY)


SHAPE = shape(tiny_config("tiny", {"zero_optimization": {"stage": 1}}), 2)


def stored(same: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from checkpoint.json."""
    return json.loads(json.dumps(same))


def write_checkpoint(run: Path, step: int, ranks: int = 2) -> Path:
    """A whole checkpoint folder, written by hand."""
    path = run / CHECKPOINTS / f"step-{step:08d}"
    (path / "engine").mkdir(parents=True)
    (path / "engine" / "weights.pt").write_bytes(b"0123456789")
    for rank in range(ranks):
        torch.save({"rng": None, "data": {"rank": rank}, "loss": torch.arange(rank)}, path / f"rank_{rank:05d}.pt")
    files = {
        str(p.relative_to(path)): {"bytes": p.stat().st_size, "sha256": sha256(p.read_bytes()).hexdigest()}
        for p in path.rglob("*")
        if p.is_file()
    }
    describe(
        path, {"format": FORMAT, "step": step, "num_steps": 10, "identity": identify(), "shape": SHAPE, "files": files}
    )
    return path


def describe(path: Path, meta: Any) -> None:
    (path / META).write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss__name": "clip"}, "loss.name"),
        ({"loss__options": {"tile": 3}}, "loss.options.tile"),
        ({"model__lock_image": True}, "model.lock_image"),
        ({"model__patch_dropout": 0.5}, "model.patch_dropout"),
        ({"model__max_scale": 50.0}, "model.max_scale"),
        ({"optim__name": "adamw"}, "optim.name"),
        ({"optim__lr": 0.5}, "optim.lr"),
        ({"optim__betas": (0.9, 0.95)}, "optim.betas"),
        ({"optim__clip_norm": 1.0}, "optim.clip_norm"),
        ({"global_batch": 32}, "global_batch"),
        ({"seed": 1}, "seed"),
        ({"data__slots": 4}, "data.slots"),
        ({"data__window": 7}, "data.window"),
        ({"data__crop_scale": (0.5, 1.0)}, "data.crop_scale"),
        ({"data__augment": {"zoom": 0.5}}, "data.augment.zoom"),
        ({"data__captions": {"{txt}": 2.0}}, "data.captions.{txt}"),
        ({"data__num_samples": 99}, "data.num_samples"),
        ({"fingerprint": "abd"}, "data.shards"),
    ],
)
def test_refuse_changes_names_the_changed_setting(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="made with other settings") as caught:
        refuse_changes(stored(identify()), identify(**changes))
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().split(":")[0] for line in lines] == [name]
    assert " in the checkpoint, " in lines[0]
    assert lines[0].endswith(" now")


def test_refuse_changes_of_a_default_says_how_to_go_on() -> None:
    """A recipe that says nothing of the loss, and a run that was started when the default was another."""
    with pytest.raises(ValueError) as caught:
        refuse_changes(stored(identify(loss__name="disco")), identify())
    said = "loss.name: 'disco' in the checkpoint, 'disco_fused' now; the default used to be disco: "
    assert f"{said}set loss.name=disco to go on, or start a new run without --resume" in str(caught.value)


def test_ranks_stage_and_precision_are_the_shape_and_no_refused_change() -> None:
    config = tiny_config("tiny", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    refuse_changes(stored(identify()), identity(config, "abc", TINY))
    now = shape(config, 4)
    assert (now["ranks"], now["stage"], now["precision"]) == (4, 3, "bf16")
    assert (SHAPE["ranks"], SHAPE["stage"], SHAPE["precision"]) == (2, 1, "fp32")


def test_refuse_changes_names_every_changed_setting_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        refuse_changes(stored(identify()), identify(seed=3, global_batch=32, optim__lr=0.5))
    assert [line.strip().split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "optim.lr",
        "global_batch",
        "seed",
    ]


def test_refuse_changes_setting_that_went_or_came_is_named() -> None:
    now = identify()
    saved = stored(now)
    saved["optim"]["nesterov"] = True
    del saved["model"]["lock_text"]
    with pytest.raises(ValueError) as caught:
        refuse_changes(saved, now)
    assert "optim.nesterov: True in the checkpoint, None now" in str(caught.value)
    assert "model.lock_text: None in the checkpoint, False now" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch": 4},
        {"name": "other", "runs": "elsewhere"},
        {"data__workers": 2, "data__prefetch": 9, "data__timeout_s": 1.0, "data__max_broken": 0.5},
        {"model__activation_checkpointing": True, "model__compile": True},
        {"log__every_steps": 3, "log__tensorboard": True, "checkpoint__every_steps": 1, "checkpoint__keep_last": 9},
        {"pixels": "host", "timeout_s": 400.0},
    ],
)
def test_refuse_changes_lets_the_rest_change(changes: dict[str, Any]) -> None:
    # Tuples come back as lists.
    kept = {"data__crop_scale": (0.5, 1.0), "optim__betas": (0.9, 0.95)}
    refuse_changes(stored(identify(**kept)), identify(**kept, **changes))


def test_read_whole_checkpoint_gives_every_rank_in_order(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 7, ranks=3)
    saved = read(path)
    assert saved.step == 7
    assert saved.meta["identity"] == stored(identify())
    assert [part["data"]["rank"] for part in saved.ranks] == [0, 1, 2]
    assert [len(part["loss"]) for part in saved.ranks] == [0, 1, 2]


def test_read_meta_foreign_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"not a complete disco_ds checkpoint: it has no {META}"):
            read_meta(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"step": 3}',
        '{"format": 1}',
        pytest.param(
            '{"format": 1, "files": ["a"], "step": 3, "num_steps": 9, "identity": {}}',
        ),
        pytest.param(
            '{"format": 1, "files": {}}',
        ),
        pytest.param(
            '{"format": 1, "files": {"a": 5}, "step": 3, "num_steps": 9, "identity": {}}',
        ),
    ],
)
def test_read_meta_foreign_description_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / META).write_text(text)
    with pytest.raises(ValueError, match=f"{META} is not a disco_ds checkpoint description"):
        read_meta(tmp_path)


def test_read_meta_other_format_names_both(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    describe(path, json.loads((path / META).read_text()) | {"format": FORMAT + 1})
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, this version of disco_ds reads {FORMAT}"):
        read_meta(path)


@pytest.mark.parametrize("name", ["engine/weights.pt", "rank_00001.pt"])
def test_read_meta_missing_file_is_named(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"incomplete: {name} is missing"):
        read_meta(path)


def test_read_meta_cut_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    (path / "engine" / "weights.pt").write_bytes(b"01234")
    with pytest.raises(ValueError, match=r"damaged: engine/weights.pt has 5 bytes, expected 10"):
        read_meta(path)


def test_read_spoilt_file_of_the_right_size_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    spoilt = path / "rank_00001.pt"
    spoilt.write_bytes(b"\0" * spoilt.stat().st_size)
    with pytest.raises(ValueError, match=r"rank_00001.pt cannot be read"):
        read(path)


def test_find_latest_ignores_what_is_not_whole(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write_checkpoint(tmp_path, step)
    root = tmp_path / CHECKPOINTS
    (root / "step-00000300").mkdir()
    partial = root / ".step-00000400.partial"
    partial.mkdir()
    describe(partial, {"format": FORMAT})
    assert find_latest(tmp_path).name == "step-00000100"


@pytest.mark.parametrize("kind", ["no folder", "empty", "partial"])
def test_find_latest_without_a_whole_one_says_so(kind: str, tmp_path: Path) -> None:
    if kind != "no folder":
        (tmp_path / CHECKPOINTS).mkdir()
    if kind == "partial":
        (tmp_path / CHECKPOINTS / ".step-00000001.partial").mkdir()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        find_latest(tmp_path)


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_remove_old_keeps_the_last_and_no_leftovers(keep: int, tmp_path: Path) -> None:
    steps = [5, 40, 300]
    for step in steps:
        write_checkpoint(tmp_path, step)
    root = tmp_path / CHECKPOINTS
    (root / ".step-00000400.partial" / "engine").mkdir(parents=True)
    (root / "notes.txt").write_text("of the user")
    remove_old(tmp_path, keep)
    assert sorted(path.name for path in root.iterdir()) == [
        "notes.txt",
        *(f"step-{step:08d}" for step in steps[-keep:]),
    ]
    read_meta(find_latest(tmp_path))


def test_remove_old_keeps_those_of_every_so_many_steps(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_checkpoint(tmp_path, step)
    remove_old(tmp_path, keep_last=1, keep_every_steps=3)
    names = sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir())
    assert names == ["step-00000003", "step-00000006", "step-00000007"]


def test_remove_old_leaves_a_copy_the_user_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5).rename(tmp_path / CHECKPOINTS / "step-00000005-best")
    for step in (6, 7):
        write_checkpoint(tmp_path, step)
    remove_old(tmp_path, keep_last=1)
    names = sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir())
    assert names == ["step-00000005-best", "step-00000007"]


def test_complete_checkpoint_passes_read_meta_and_replaces_an_older_visit(tmp_path: Path) -> None:
    final = write_checkpoint(tmp_path, 3)
    (final / "stale.pt").write_bytes(b"of the older visit")
    partial = final.with_name(f".{final.name}.partial")
    (partial / "engine").mkdir(parents=True)
    (partial / "engine" / "weights.pt").write_bytes(b"new")
    meta = {"format": FORMAT, "step": 3, "num_steps": 9, "identity": identify(), "shape": SHAPE}
    checkpoint._complete(partial, final, meta, {"engine/weights.pt": sha256(b"new").hexdigest()})
    assert not partial.exists()
    assert read_meta(final)["files"] == {"engine/weights.pt": {"bytes": 3, "sha256": sha256(b"new").hexdigest()}}
    assert not (final / "stale.pt").exists()


def test_refuse_changes_compares_the_model_by_its_config_not_its_name() -> None:
    config = tiny_config("moved/tiny.json", {"zero_optimization": {"stage": 1}}, model__pretrained="weights.pt")
    refuse_changes(stored(identify()), identity(config, "abc", TINY))
    with pytest.raises(ValueError, match=r"model.config.embed_dim: 16 in the checkpoint, 32 now"):
        refuse_changes(stored(identify()), identity(config, "abc", TINY | {"embed_dim": 32}))
