"""Checkpoints that the user's command uploads: one at a time, in the background. A failed upload stops nothing."""

import multiprocessing
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from disco_ds.checkpoints.keep import LOG, Mirror, list_complete, remove_checkpoints
from disco_ds.config import CheckpointSettings
from helpers.checkpoints import write_checkpoint


def make(folder: Path, name: str) -> Path:
    path = folder / "check points" / name
    path.mkdir(parents=True)
    (path / "weights").write_text(name)
    return path


def test_copies_run_one_by_one_and_the_newest_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, there = tmp_path / "gate", tmp_path / "there"
    there.mkdir()
    script = 'while [ ! -e "$0" ]; do sleep 0.02; done; cp -r "$1" "$2"'
    with closing(Mirror(f"sh -c '{script}' {gate} {{path}} {there}/{{name}}", tmp_path)) as copies:
        first, second, third = (make(tmp_path, f"step-{number}") for number in (1, 2, 3))
        copies.add(first)
        copies.add(second)
        copies.add(third)
        assert copies.pending == [first, third]
        assert f"{second} is not uploaded" in caplog.text
        assert copies.wait(0.1), "the first upload must still be running"
        gate.touch()
        assert not copies.wait(300)
        assert copies.pending == []
    assert sorted(path.name for path in there.iterdir()) == ["step-1", "step-3"]
    assert (there / "step-3" / "weights").read_text() == "step-3"


@pytest.mark.parametrize(
    ("command", "said"),
    [("ls {path}/no", "exit code 2; see "), ("no-such-command {path}", "No such")],
)
def test_failed_upload_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, said: str
) -> None:
    copies = Mirror(command, tmp_path)
    path = make(tmp_path, "step-1")
    copies.add(path)
    assert not copies.wait(300)
    assert f"{path} is not uploaded: " in caplog.text
    assert said in caplog.text
    assert ("/no" in (tmp_path / LOG).read_text()) == command.startswith("ls")


def test_copy_that_takes_too_long_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Mirror("tail -f {path}/weights", tmp_path)
    copies.add(make(tmp_path, "step-1"))
    assert copies.wait(0.3)
    copies.close()
    assert "was not uploaded in time" in caplog.text
    assert not copies.wait(300), "the process of the upload must have been ended"


GATED = (
    "sh -c 'echo $1; while [ ! -e $0 ]; do sleep 0.02; done; mkdir -p $2; cp $1/weights $2' "
    "gate {path} there/{name}"
)
"""An upload command that waits for a file called gate. It may run several times for the same checkpoint."""


def copy_and_hang(folder: Path, started: Any) -> None:
    os.chdir(folder)
    copies = Mirror(GATED, folder)
    for step in (1, 2):
        path = write_checkpoint(folder, step)
        (path / "weights").write_text(path.name)
        copies.add(path)
    while not (folder / LOG).exists() or not (folder / LOG).read_text():
        time.sleep(0.02)
    started.set()
    time.sleep(600)


def test_copy_that_outlives_a_killed_run_is_waited_for_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    context = multiprocessing.get_context("forkserver")
    started = context.Event()
    process = context.Process(target=copy_and_hang, args=(tmp_path, started))
    process.start()
    assert started.wait(300)
    process.kill()
    process.join()
    old, waiting = list_complete(tmp_path)
    log = tmp_path / LOG
    with closing(Mirror(GATED, tmp_path)) as copies:
        busy = list(copies.pending)
        new = write_checkpoint(tmp_path, 3)
        remove_checkpoints(tmp_path, keep_last=1, busy=busy)
        waits = copies.wait(0.3)
        copied = log.read_text().split()
        # Open the gate before the assertions: if one failed, the first upload would otherwise wait forever.
        (tmp_path / "gate").touch()
        assert busy == [old, waiting]
        assert list_complete(tmp_path) == [old, waiting, new]
        assert waits
        assert "an upload of an earlier run is not finished" in caplog.text
        assert copied == [str(old)], "two uploads must never run at the same time"
        assert not copies.wait(300)
        assert log.read_text().split() == [str(path) for path in (old, old, waiting)]
    for path in (old, waiting):
        assert (tmp_path / "there" / path.name / "weights").read_text() == path.name
    with closing(Mirror(GATED, tmp_path)) as copies:
        assert copies.pending == [new], "all others have been uploaded"


def test_copy_that_was_ended_with_its_run_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_checkpoint(tmp_path, 1)
    (path / "weights").write_text(path.name)
    with closing(Mirror(GATED, tmp_path)) as copies:
        assert copies.pending == [path]
    (tmp_path / "gate").touch()
    with closing(Mirror(GATED, tmp_path)) as copies:
        assert not copies.wait(300)
    assert (tmp_path / "there" / path.name / "weights").read_text() == path.name


def test_command_must_say_the_path() -> None:
    with pytest.raises(ValueError, match=r"\{path\}"):
        CheckpointSettings(copy_command="aws s3 sync . s3://bucket")
