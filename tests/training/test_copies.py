"""Checkpoints copied by a user's command: one at a time, in the background, and a failure stops nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from disco_ds.config import CheckpointSettings
from disco_ds.training.copies import Copies


def make(folder: Path, name: str) -> Path:
    path = folder / "check points" / name
    path.mkdir(parents=True)
    (path / "weights").write_text(name)
    return path


def test_copies_run_one_by_one_and_the_newest_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate, there = tmp_path / "gate", tmp_path / "there"
    there.mkdir()
    script = 'while [ ! -e "$0" ]; do sleep 0.02; done; cp -r "$1" "$2"'
    with closing(Copies(f"sh -c '{script}' {gate} {{path}} {there}/{{name}}", tmp_path / "log")) as copies:
        first, second, third = (make(tmp_path, f"step-{number}") for number in (1, 2, 3))
        copies.start(first)
        copies.start(second)
        copies.start(third)
        assert copies.busy == [first, third]
        assert f"{second} is not copied" in caplog.text
        assert copies.wait(0.1), "the copy is under way"
        gate.touch()
        assert not copies.wait(10)
        assert copies.busy == []
    assert sorted(path.name for path in there.iterdir()) == ["step-1", "step-3"]
    assert (there / "step-3" / "weights").read_text() == "step-3"


@pytest.mark.parametrize(
    ("command", "said"), [("ls {path}/no", "exit code 2 of ls"), ("no-such-command {path}", "No such")]
)
def test_failed_copy_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, said: str) -> None:
    copies = Copies(command, tmp_path / "log")
    path = make(tmp_path, "step-1")
    copies.start(path)
    assert not copies.wait(10)
    assert f"{path} was not copied: " in caplog.text
    assert said in caplog.text
    assert ("/no" in (tmp_path / "log").read_text()) == command.startswith("ls")


def test_copy_that_takes_too_long_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = Copies("tail -f {path}/weights", tmp_path / "log")
    copies.start(make(tmp_path, "step-1"))
    assert copies.wait(0.3)
    copies.close()
    assert "was not copied in time" in caplog.text
    assert not copies.wait(5), "its process has ended"


def test_command_must_say_the_path() -> None:
    with pytest.raises(ValueError, match=r"copy_command does not say \{path\}"):
        CheckpointSettings(copy_command="aws s3 sync . s3://bucket")
