"""Checkpoints, tested without an engine: settings that must not change on resume, damaged files, and tensor shapes."""

import errno
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from disco_ds.checkpoints import checkpoint
from disco_ds.checkpoints.checkpoint import (
    checksum,
    read,
    read_rng,
    restore_rng,
    verify_on_all_ranks,
)
from disco_ds.checkpoints.keep import DamagedError
from disco_ds.checkpoints.resume import identity_of, refuse_changes, shape_of
from disco_ds.distributed import comm
from disco_ds.runs.run_folder import META
from helpers.checkpoints import SHAPE, describe, identify, plant, write_checkpoint
from helpers.dist import run_ranks
from helpers.towers import TINY, tiny_config


def stored(same: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as they are read back from checkpoint.json."""
    return json.loads(json.dumps(same))


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
    lines = str(caught.value).partition("\n  --allow-change")[0].splitlines()[1:]
    assert [line.strip().split(":")[0] for line in lines] == [name]
    assert " in the checkpoint, " in lines[0]
    assert lines[0].endswith(" now")


def test_schedule_of_gamma_may_be_allowed_to_change() -> None:
    now = identify(loss__options={"gamma_min": 0.2, "gamma_epochs": 16})
    with pytest.raises(ValueError, match=r"--allow-change loss\.options\.gamma_epochs,") as caught:
        refuse_changes(stored(identify()), now)
    allowed = str(caught.value).rpartition("--allow-change ")[2].split()[0].split(",")
    refuse_changes(stored(identify()), now, allowed)


def test_ranks_stage_and_precision_are_the_shape_and_no_refused_change() -> None:
    config = tiny_config("tiny", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    refuse_changes(stored(identify()), identity_of(config, "abc", TINY))
    now = shape_of(config, 4)
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
        {
            "data__workers": 2,
            "data__prefetch": 9,
            "data__max_broken": 0.5,
        },
        {"model__activation_checkpointing": True, "model__compile": True},
        {
            "log__every_steps": 3,
            "log__tensorboard": True,
            "checkpoint__every_steps": 1,
            "checkpoint__keep_last": 9,
        },
        {"image_staging": "host", "timeout_s": 400.0},
    ],
)
def test_refuse_changes_lets_the_rest_change(changes: dict[str, Any]) -> None:
    # A tuple in the settings becomes a list in checkpoint.json, which is not a change.
    kept = {"data__crop_scale": (0.5, 1.0), "optim__betas": (0.9, 0.95)}
    refuse_changes(stored(identify(**kept)), identify(**kept, **changes))


def test_read_whole_checkpoint_gives_every_rank_in_order(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 7, ranks=3)
    saved = read(path)
    assert saved.step == 7
    assert saved.meta["identity"] == stored(identify())
    assert [part["rank"] for part in saved.states("data")] == [0, 1, 2]
    assert [len(part) for part in saved.states("loss")] == [0, 1, 2]


def test_file_that_can_be_read_again_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, 1)
    errors = [OSError(errno.ESTALE, "stale file handle")] * 2

    def read_later(file: Path) -> str:
        if errors:
            raise errors.pop()
        return checksum(file)

    monkeypatch.setattr(checkpoint, "checksum", read_later)
    monkeypatch.setattr(checkpoint, "_RETRY_AFTER_S", (0, 0))
    assert len(list(read(path).states("data"))) == 2
    errors += [OSError(errno.EIO, "input/output error")] * 3
    with pytest.raises(DamagedError, match=r"rank_00000.pt cannot be read: .*input/output error"):
        list(read(path).states("data"))


def test_code_in_a_file_of_ours_never_runs(tmp_path: Path) -> None:
    path, mark = write_checkpoint(tmp_path, 1), tmp_path / "ran"
    plant(path, "rank_00000.pt", mark)
    with pytest.raises(
        DamagedError, match=r"step-00000001 is damaged: rank_00000.pt is not what was written"
    ):
        list(read(path).states("data"))
    # An attacker may have written the checksums too.
    describe(path, json.loads((path / META).read_text()))
    with pytest.raises(DamagedError, match=r"rank_00000.pt cannot be read: UnpicklingError"):
        list(read(path).states("data"))
    assert not mark.exists()
    torch.load(path / "rank_00000.pt", weights_only=False)
    assert mark.exists(), "the planted code does nothing, so this test proves nothing"


def test_generators_resume_from_a_checkpoint(tmp_path: Path) -> None:
    numpy.random.standard_normal()  # numpy draws pairs; the generator now keeps the second number
    state = read_rng()
    drawn = random.random(), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist()
    path = write_checkpoint(tmp_path, 1, ranks=0)
    torch.save({"rng": state, "data": {}, "loss": {}}, path / "rank_00000.pt")
    describe(path, json.loads((path / META).read_text()))
    restore_rng(read(path).states("rng")[0])
    again = random.random(), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist()
    assert again == drawn


def test_generators_resume_on_the_cpu_from_a_checkpoint_of_a_gpu() -> None:
    state = read_rng() | {
        "device": torch.zeros(16, dtype=torch.uint8)
    }  # the size of a CUDA generator's state
    drawn = torch.rand(3).tolist()
    restore_rng(state)
    assert torch.rand(3).tolist() == drawn


def test_refuse_changes_compares_the_model_by_its_config_not_its_name() -> None:
    config = tiny_config(
        "moved/tiny.json", {"zero_optimization": {"stage": 1}}, model__pretrained="weights.pt"
    )
    refuse_changes(stored(identify()), identity_of(config, "abc", TINY))
    with pytest.raises(ValueError, match=r"model.config.embed_dim: 16 in the checkpoint, 32 now"):
        refuse_changes(stored(identify()), identity_of(config, "abc", TINY | {"embed_dim": 32}))


def test_preprocessing_of_weights_whose_folder_is_gone_is_not_lost_silently() -> None:
    saved = stored(identify()) | {"model.preprocess": {"mean": [0.5, 0.5, 0.5]}}
    with pytest.raises(
        ValueError,
        match=r"model.preprocess.mean: \[0.5, 0.5, 0.5\] in the checkpoint, None now",
    ):
        refuse_changes(saved, identify() | {"model.preprocess": {}})


def test_shapes_differ_by_who_holds_what_not_by_communication_settings() -> None:
    def shape_with(ranks: int, **zero: Any) -> dict[str, Any]:
        return shape_of(tiny_config("tiny", {"zero_optimization": zero}), ranks)

    assert shape_with(2, stage=1, overlap_comm=False, reduce_bucket_size=7) == SHAPE
    assert shape_with(2, stage=2) != SHAPE
    assert shape_with(9, stage=1) != SHAPE
    assert shape_with(2, stage=1, round_robin_gradients=True) != SHAPE


def verify_on_a_slow_disk(path: Path) -> None:
    """Verify a checkpoint when reading rank 0's file takes longer than the timeout of a collective."""
    slow = path / "rank_00000.pt"

    def answer(data: bytes) -> None:
        time.sleep(6)
        slow.write_bytes(data)

    with comm.session(timeout_s=4):
        saved = read(path)
        comm.barrier()
        if comm.rank() == 1:  # this rank verifies the file that is slow
            data = slow.read_bytes()
            slow.unlink()
            os.mkfifo(slow)
            threading.Thread(target=answer, args=(data,), daemon=True).start()
        verify_on_all_ranks(saved)
        assert saved.verified == saved.meta["files"].keys()


def test_slow_disk_does_not_end_a_resume(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 3)
    run_ranks(verify_on_a_slow_disk, 2, path, joined=False)
