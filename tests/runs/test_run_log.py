"""log.txt contains the run's messages with times, and warnings. A full disk or a closed terminal is not an error."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest

from disco_ds.runs.messages import LOG, log_only, say, write_log
from helpers.own_code import disco_ds
from helpers.tiny_run import recipe


def test_log_has_what_is_said_and_warned_of_with_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with write_log(tmp_path):
        assert not (tmp_path / LOG).exists()
        say("step 1")
        logging.getLogger("disco_ds.some.module").warning("a shard is gone")
        log_only("the end")
        log_only("asked to stop", logging.INFO)
    say("afterwards")
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [re.sub(time, "T", line) for line in lines] == [
        "T INFO step 1",
        "T WARNING a shard is gone",
        "T ERROR the end",
        "T INFO asked to stop",
    ]
    assert capsys.readouterr().out == "step 1\nafterwards\n"


def test_neither_a_full_disk_nor_a_closed_terminal_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with write_log(Path("/proc")):  # no file can be created there
        monkeypatch.setattr(sys, "stdout", Gone())
        say("step 1")


@pytest.mark.slow
def test_run_and_its_resume_share_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    path = recipe(tmp_path, steps=2)
    assert disco_ds("train", "--config", str(path), cwd=tmp_path).returncode == 0
    log = (tmp_path / "runs" / "tiny" / LOG).read_text()
    assert re.search(r"INFO .*tiny: global batch 16", log)
    assert re.search(r"INFO step 2/2 .*samples/s", log)
    done = disco_ds("train", "--config", str(path), "steps=3", "--resume", "latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "after step 2, global batch" in (tmp_path / "runs" / "tiny" / LOG).read_text()


def test_name_that_a_terminal_cannot_print_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    say("runs/k\u00f6ln")
    assert buffer.getvalue() == b"runs/k\\xf6ln\n"
