"""A user's mistakes cause clear errors on every rank, before any work and within seconds."""

import io
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

from disco_ds.config import Config, load_config
from disco_ds.data import index_shards, write_manifest
from disco_ds.distributed import comm
from disco_ds.losses import build_loss
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.tiny_run import expect, image_sample, recipe, refused, stopped, write_shard
from helpers.towers import write_tiny


def bad_settings(path: Path, folder: Path) -> None:
    def config(*overrides: str) -> Config:
        return load_config(path, list(overrides))

    expect(refused(config("loss.name=disko")), "unknown loss 'disko'", "did you mean disco", "clip")
    expect(refused(config("loss.options={tilt: 4}")), "no option tilt", "tile")
    said = refused(config("loss.name=fastclip_v1", "optim.tau_lr=1e-3"))
    expect(said, "optim.tau_lr ", "loss.name=fastclip_v1")
    expect(refused(config("model.name=ViT-B-33")), "unknown model 'ViT-B-33'", "ViT-B-32")
    expect(refused(config(f"model.name={write_tiny(folder / 'small')}")), "vocab_size 100", "49408")
    expect(refused(config("model.pretrained=nowhere.pt")), "nowhere.pt is not a file")
    expect(
        refused(config("global_batch=20")),
        "not a multiple of ranks x micro_batch (2 x 4 = 8)",
        "nearest: global_batch=16",
    )
    expect(refused(config("ranks=8")), "expects 8 ranks, but this run has 2", "hostfile")
    expect(
        refused(config("deepspeed.zero_optimisation.stage=2")),
        "unknown key zero_optimisation",
        "zero_optimization",
    )
    said = refused(config("deepspeed.gradient_clipping=1.0"))
    expect(said, "gradient_clipping", "optim.clip_norm")
    expect(refused(config("data.shards=nowhere")), "nowhere")
    expect(refused(config(f"data.shards={folder / 'empty'}")), "no .tar file")
    expect(refused(config(f"data.shards={folder / 'unindexed'}")), "manifest", "disco-ds index")
    expect(refused(config("eval.labeled={far: nowhere}")), "nowhere")
    expect(
        refused(config("eval={labeled: {far: 'bundled:emoji/unseen'}, label_key: '{json[no]}'}")),
        "far",
        "eval.label_key",
    )
    expect(refused(config("data.slots=5")), "data.slots=4 or data.slots=6")
    expect(
        refused(config("data.slots=null", f"data.shards={folder / 'one'}")),
        "1 slots",
        "number of ranks (2)",
        "data.slots=2",
    )
    # The optimizer refuses this, after the run folder was created.
    expect(
        refused(config("model.name=quickstart", "optim.image.layer_decay=0.5")),
        "layers of this model's image tower",
    )
    expect(refused(config(), resume="latest"), "no run called tiny")
    expect(refused(config(), resume=str(folder)), "not a run folder")
    assert not (folder / "runs").exists() or not any((folder / "runs").iterdir()), (
        "a refused run must not leave a folder"
    )
    said = stopped(config("data.image_key=jpg", "name=wrong-key"))
    expect(said, "data failed on ranks 0-1", "no image under jpg", "the sample has json, png, txt")


def changed_on_resume(path: Path) -> None:
    with ExitStack() as stack:
        run = build(load_config(path, ["name=first"]), None, stack)
        train(run)
        folder = str(run.folder)
        expect(refused(load_config(path, ["name=first"]), resume=folder), "in use by process")
    changes = {
        "loss.name=clip": "loss.name: 'disco_fused' in the checkpoint, 'clip' now",
        "model.max_scale=50": "model.max_scale",
        "model.name=quickstart": "model.config.embed_dim: 16 in the checkpoint, 128 now",
        "optim.weight_decay=0.1": "optim.weight_decay",
        "global_batch=32": "global_batch: 16 in the checkpoint, 32 now",
        "seed=1": "seed",
        "data.window=7": "data.window",
        "data.slots=2": "data.slots",
        "data.shards=bundled:emoji/validation": "data.shards",
    }
    for change, said in changes.items():
        expect(refused(load_config(path, ["name=first", change]), resume=folder), said)
    expect(
        refused(load_config(path, ["name=first", "steps=2"]), resume=folder),
        "is at step 4",
        "end at step 2",
    )
    # Settings that may change: workers, micro-batch, logging, and a longer run.
    with ExitStack() as stack:
        overrides = [
            "name=first",
            "steps=6",
            "micro_batch=8",
            "data.workers=1",
            "log.every_steps=2",
        ]
        run = build(load_config(path, overrides), folder, stack)
        assert run.schedule.first_step == 4
        train(run)


def broken_data(path: Path, folder: Path) -> None:
    with ExitStack() as stack:
        overrides = [
            f"data.shards={folder / 'broken'}",
            "name=broken",
            "data.slots=2",
            "data.max_broken=0.5",
        ]
        run = build(load_config(path, overrides), None, stack)
        train(run)
        comm.barrier()
        names = [
            line.partition(": ")[2]
            for path in run.folder.glob("broken-*.txt")
            for line in path.open()
        ]
        records = (run.folder / METRICS_FILE).read_text().splitlines()
    # 4 steps of 16 read only some of the 80 samples. A broken sample may be counted several times, but is named once.
    damaged = [name for name in names if "the shard is damaged" in name]
    broken = set(names) - set(damaged)
    assert json.loads(records[-1])["broken_samples"] >= len(broken) >= 2, names
    assert 1 <= len(damaged) <= 2, "a damaged shard may be named at most once on each rank"
    assert damaged[0].startswith("00001.tar/"), names
    said = stopped(
        load_config(
            path,
            [
                f"data.shards={folder / 'rotten'}",
                "name=rotten",
                "data.slots=2",
                "data.max_broken=0.1",
            ],
        )
    )
    expect(said, "samples are broken", "data.max_broken")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write folders of shards: empty, unindexed, one (a single shard), broken (some samples), rotten (most samples)."""
    good = [image_sample(number) for number in range(40)]
    bad = {"png": b"\x89PNG\r\n\x1a\n" + b"junk", "txt": b"no picture"}
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    bomb = {"png": buffer.getvalue(), "txt": b"a bomb"}
    for name in ("empty", "unindexed", "one", "broken", "rotten", "small"):
        (tmp_path / name).mkdir()
    write_shard(tmp_path / "unindexed" / "00000.tar", good)
    write_shard(tmp_path / "one" / "00000.tar", good)
    write_shard(tmp_path / "broken" / "00000.tar", [*good[:10], bad, *good[10:20], bomb, bad])
    write_shard(tmp_path / "broken" / "00001.tar", good)
    write_shard(tmp_path / "rotten" / "00000.tar", [good[0], *[bad] * 60])
    write_shard(tmp_path / "rotten" / "00001.tar", [good[1], *[bad] * 60])
    for name in ("one", "broken", "rotten"):
        write_manifest(index_shards(tmp_path / name))
    # The shard was cut after it was counted, so the lost samples count as broken.
    cut = tmp_path / "broken" / "00001.tar"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    return tmp_path


@pytest.mark.parametrize("tile", [4, [4], [4, 0], [4, "x"], {"a": 1, "b": 2}, "ab"])
def test_bad_tile_is_refused(tile):
    with pytest.raises(ValueError, match="tile"):
        build_loss("disco_fused", tile=tile)


def test_bad_settings_are_refused_on_every_rank(shards):
    run_ranks(bad_settings, 2, recipe(shards), shards)


@pytest.mark.slow
def test_resume_refuses_changes_by_name(tmp_path):
    run_ranks(changed_on_resume, 2, recipe(tmp_path))


@pytest.mark.filterwarnings("ignore:.*manifest.*")
def test_broken_samples_are_counted_and_named_and_too_many_stop_the_run(shards):
    run_ranks(broken_data, 2, recipe(shards), shards)
