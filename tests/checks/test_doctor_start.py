"""`disco-ds doctor` refuses the settings that a run refuses, with the same message."""

from pathlib import Path

import pytest

from disco_ds.cli.main import main


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("loss.name=disko", "unknown loss 'disko'; did you mean disco?"),
        ("model.name=ViT-B-33", "unknown model 'ViT-B-33'; did you mean ViT-B-32?"),
        ("model.pretrained=nowhere.pt", "nowhere.pt"),
        ("data.shards=/nowhere", "there is no folder /nowhere"),
        ("data.source=webdataset", "data.source must match pattern"),
        ("eval.labeled.new=/nowhere", "eval.labeled.new: there is no folder /nowhere"),
    ],
)
def test_refused_setting_fails(
    override: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--config", "quickstart", override]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert failed[0].split()[1] == ("data" if "data.shards" in override else "recipe")
    assert found in failed[0]


def test_bundled_recipe_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--config", "quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for words in ("ok    recipe          global batch ", "ok    samples"):
        assert any(line.startswith(words) for line in lines), words
    # This line is a warning if the disk is full.
    assert any(line[6:].startswith("runs folder") for line in lines)
