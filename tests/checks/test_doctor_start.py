"""The doctor refuses what a start refuses, under the name of the check."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_ds.cli.main import main


@pytest.mark.parametrize(
    ("override", "check", "found"),
    [
        ("loss.name=disko", "loss", "unknown loss 'disko'; did you mean disco?"),
        ("loss.options.tle=3", "loss", "loss 'disco' has no option tle"),
        ("model.name=ViT-B-33", "model", "unknown model 'ViT-B-33'; did you mean ViT-B-32?"),
        ("model.pretrained=nowhere.pt", "model", "nowhere.pt"),
        ("data.shards=/nowhere", "data", "there is no folder /nowhere"),
        ("eval.labeled.new=/nowhere", "eval", "eval.labeled.new: there is no folder /nowhere"),
        ("log.wandb.project=ours", "log", "wandb"),
    ],
)
def test_refused_setting_fails_under_the_name_of_its_check(
    override: str,
    check: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if check == "log":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor", "--config", "quickstart", override]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert failed[0].split()[1] == check
    assert found in failed[0]


def test_bundled_recipe_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--config", "quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for check, found in (("loss", "disco"), ("model", "quickstart"), ("eval", "sets: 2")):
        assert any(line.split()[:2] == ["ok", check] and found in line for line in lines), check
