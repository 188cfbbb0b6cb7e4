"""A run that reads shards from an S3 bucket (served by rclone), is killed, and resumes on another number of ranks."""

import shutil
from pathlib import Path

import pytest

from disco_ds.cli.main import main
from disco_ds.config import PACKAGE
from helpers.dist import run_ranks
from helpers.launched import (
    CASES,
    launched,
    ranks_of,
    records,
    train_without_launcher,
    wait_for,
    write_recipe,
)
from helpers.object_store import KEY, SECRET, serve_rclone


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", ["manifest", "none"])
def test_run_on_s3_killed_and_resumed_on_one_rank_is_that_on_a_folder(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "stores" / "bucket" / "emoji"
    shutil.copytree(PACKAGE / "assets" / "emoji" / "train", bucket)
    names = sorted(path.stem for path in bucket.glob("*.tar"))
    folder = tmp_path / "work"
    common = [*write_recipe(folder, CASES["zero1-fp32"]), "data.slots=4", "lost_after_s=5"]
    common += [f"data.index={index}"]
    local = [*common, f"data.shards={bucket}", "name=local"]
    with serve_rclone("s3", bucket.parents[1], "--auth-key", f"{KEY},{SECRET}") as proxy:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        shards = f"s3://bucket/emoji/{{{names[0]}..{names[-1]}}}.tar"
        remote = [*common, f"data.shards={shards}", f"data.remote.cache={tmp_path / 'cache'}"]
        remote += ["name=s3"]
        if index == "manifest":
            to = tmp_path / "bucket.json"
            assert main(["index", shards, "--to", str(to), "--cache", str(tmp_path / "cache")]) == 0
            remote += [f"data.manifest={to}"]
        run_ranks(train_without_launcher, 1, folder, local)
        run = folder / "runs" / "s3"
        with launched("launch", 2, remote, folder) as process:
            wait_for(
                lambda: any(run.glob("checkpoints/step-*")) and records(run)[-1]["step"] >= 4,
                "step 4",
                folder,
            )
            for rank in ranks_of(process.pid):
                rank.kill()
            process.wait(timeout=200)
        assert not (run / "finished.json").exists()
        run_ranks(train_without_launcher, 1, folder, [*remote, "--resume", "latest"])
    pairs = list(zip(records(run), records(folder / "runs" / "local"), strict=True))
    assert len([mine for mine, _ in pairs if "ids" in mine]) == 8
    for mine, other in pairs:
        assert mine.get("ids") == other.get("ids")
        if "loss" in mine:
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
