"""Which checkpoint folders of a run count as complete, which are removed, and which are set aside."""

import errno
import json
import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.checkpoints.checkpoint import read
from disco_ds.checkpoints.keep import (
    FORMAT,
    META,
    DamagedError,
    find_latest,
    find_older,
    read_meta,
    remove_checkpoints,
)
from disco_ds.checkpoints.resume import set_newer_aside
from disco_ds.checkpoints.save import Save
from disco_ds.runs.run_folder import CHECKPOINTS
from helpers.checkpoints import SHAPE, describe, finish, flip, identify, write_checkpoint


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / CHECKPOINTS).iterdir())


def test_read_meta_foreign_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            ValueError, match=f"not a complete disco_ds checkpoint: {META}: FileNotFound"
        ):
            read_meta(path)


@pytest.mark.parametrize(
    "text", ["", "null", '{"format": 1, "files": {"a": 5}, "step": 3, "num_steps": 9}']
)
def test_read_meta_foreign_description_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / META).write_text(text)
    with pytest.raises(ValueError, match=f"not a complete disco_ds checkpoint: {META}"):
        read_meta(tmp_path)


def test_read_other_format_names_both(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    describe(path, json.loads((path / META).read_text()) | {"format": FORMAT + 1})
    words = f"has format {FORMAT + 1}, but this version of disco_ds reads format {FORMAT}"
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    # Older checkpoints have the same format, so an automatic resume must not fall back to them.
    assert not isinstance(caught.value, DamagedError)


def test_read_meta_notices_every_flipped_bit_of_itself(tmp_path: Path) -> None:
    meta = write_checkpoint(tmp_path, 1, ranks=1) / META
    body = meta.read_bytes()
    for place in range(0, len(body), 23):
        for bit in (1, 16):
            spoilt = bytearray(body)
            spoilt[place] ^= bit
            with suppress(ValueError):
                if json.loads(spoilt) == json.loads(body):
                    continue  # same value: other white space, or a digit beyond the precision of a float
            meta.write_bytes(spoilt)
            with pytest.raises(DamagedError):
                read_meta(meta.parent)
    meta.write_bytes(body)
    read_meta(meta.parent)


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


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_remove_old_keeps_the_last_and_no_leftovers(keep: int, tmp_path: Path) -> None:
    steps = [5, 40, 300]
    for step in steps:
        write_checkpoint(tmp_path, step)
    root = tmp_path / CHECKPOINTS
    (root / ".step-00000400.partial" / "engine").mkdir(parents=True)
    (root / "notes.txt").write_text("of the user")
    remove_checkpoints(tmp_path, keep)
    assert names(tmp_path) == ["notes.txt", *(f"step-{step:08d}" for step in steps[-keep:])]
    read_meta(find_latest(tmp_path))


def spoil(path: Path, how: str) -> None:
    if how == "no meta":
        (path / META).unlink()
    elif how == "meta":
        flip(path / META)
    elif how == "no file":
        (path / "rank_00001.pt").unlink()
    else:
        (path / "engine" / "weights.pt").write_bytes(b"01234")


@pytest.mark.parametrize("how", ["no meta", "meta", "no file", "size"])
@pytest.mark.parametrize("keep", [1, 2])
def test_remove_old_counts_only_whole_ones(keep: int, how: str, tmp_path: Path) -> None:
    """The two newest checkpoints are incomplete, as after failed saves."""
    for step in (1, 2, 3, 4, 5):
        write_checkpoint(tmp_path, step)
    for step in (4, 5):
        spoil(tmp_path / CHECKPOINTS / f"step-{step:08d}", how)
    assert remove_checkpoints(tmp_path, keep) == 3 - keep
    assert names(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 3, 4, 5) if step > 3 - keep]


def test_remove_old_leaves_what_is_not_a_complete_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (tmp_path / CHECKPOINTS / "step-00000001" / META).unlink()
    assert remove_checkpoints(tmp_path, keep_last=1) == 1
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_remove_old_without_a_limit_keeps_all_and_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step)
    monkeypatch.delattr("disco_ds.checkpoints.keep.read_meta")
    assert remove_checkpoints(tmp_path, keep_last=None) == 0
    assert len(names(tmp_path)) == 4


def test_remove_old_nine_digits_are_more_than_eight(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        write_checkpoint(tmp_path, step)
    assert find_latest(tmp_path).name == "step-100000000"
    remove_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-100000000"]


def test_symbolic_link_is_removed_without_what_it_points_to(tmp_path: Path) -> None:
    moved = shutil.move(write_checkpoint(tmp_path, 1), tmp_path / "archive")
    (tmp_path / CHECKPOINTS / "step-00000001").symlink_to(moved)
    for step in (2, 3, 4):
        write_checkpoint(tmp_path, step)
    assert remove_checkpoints(tmp_path, keep_last=1) == 3
    assert names(tmp_path) == ["step-00000004"]
    read_meta(moved)


def test_file_that_cannot_be_removed_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a removed file that another host has open is renamed to .nfs..., which cannot be removed."""
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    unlink = os.unlink

    def busy(path: Any, **options: Any) -> None:
        if Path(path).name == "weights.pt":
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, **options)

    with monkeypatch.context() as nfs:
        nfs.setattr(os, "unlink", busy)
        assert [remove_checkpoints(tmp_path, keep_last=2) for _ in range(3)] == [1, 0, 0]
        assert names(tmp_path) == [".step-00000001.partial", "step-00000002", "step-00000003"]
        left = [
            path.name for path in (tmp_path / CHECKPOINTS / ".step-00000001.partial").rglob("*")
        ]
        assert sorted(left) == ["engine", "weights.pt"]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    remove_checkpoints(tmp_path, keep_last=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_set_newer_aside_gives_names_that_nothing_touches(tmp_path: Path) -> None:
    for round_ in (1, 2):
        chosen, *newer = [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]
        flip(newer[1] / META)
        (tmp_path / CHECKPOINTS / "step-00000002-best").mkdir(exist_ok=True)
        set_newer_aside(read(chosen))
        ends = ["", "-2"][:round_]
        assert find_latest(tmp_path) == chosen
        assert find_older(chosen) is None
        remove_checkpoints(tmp_path, keep_last=1)
        aside = sorted(f"set-aside-step-0000000{step}{end}" for step in (2, 3) for end in ends)
        assert names(tmp_path) == [*aside, "step-00000001", "step-00000002-best"]
        shutil.rmtree(chosen)


def test_remove_old_keeps_those_of_every_so_many_steps(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_checkpoint(tmp_path, step)
    remove_checkpoints(tmp_path, keep_last=1, keep_every_steps=3)
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000007"]


def test_remove_old_leaves_a_copy_the_user_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5).rename(tmp_path / CHECKPOINTS / "step-00000005-best")
    for step in (6, 7):
        write_checkpoint(tmp_path, step)
    remove_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-00000005-best", "step-00000007"]


def test_complete_checkpoint_passes_read_meta_and_sets_aside_what_has_its_name(
    tmp_path: Path,
) -> None:
    final = write_checkpoint(tmp_path, 3)
    (final / "stale.pt").write_bytes(b"of an older save")
    partial = final.with_name(f".{final.name}.partial")
    meta = {"format": FORMAT, "step": 3, "num_steps": 9, "identity": identify(), "shape": SHAPE}
    save = Save(final, partial, meta, {partial / "engine" / "weights.pt": torch.ones(3)})
    assert finish(save) == final
    assert not partial.exists()
    (saved,) = (final / "engine").iterdir()
    content = saved.read_bytes()
    assert read_meta(final)["files"] == {
        "engine/weights.pt": {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    }
    assert not (final / "stale.pt").exists()
    assert (final.with_name(f"set-aside-{final.name}") / "stale.pt").exists()
