"""Run folders: they are created once, found again, and locked by one run at a time."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from disco_ds.metrics.logger import METRICS_FILE, MetricsLogger, read_records
from disco_ds.runs.run_folder import (
    CHECKPOINTS,
    CONFIG,
    FINISHED,
    LAUNCHED,
    META,
    find_newest,
    find_run_folder,
    lock_folder,
    make_run_folder,
    mark_finished,
    mark_launch,
    refuse_other_name,
    split_resume,
)
from disco_ds.runs.shared_folder import removed_if_refused
from helpers.schedule import plain
from helpers.small_disk import mount_small_disk

HOLD = """
import sys
from pathlib import Path
from disco_ds.runs.run_folder import lock_folder
held = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_make_run_folder_that_exists_takes_the_next_number(tmp_path: Path) -> None:
    runs = tmp_path / "deep" / "runs"
    assert [make_run_folder(runs, "a").name for _ in range(3)] == ["a", "a-2", "a-3"]
    (runs / "b").write_text("a file")
    assert make_run_folder(runs, "b").name == "b-2"
    assert (runs / "b").read_text() == "a file"


def write_config(folder: Path, name: str, checkpoint: str = "step-00000002") -> None:
    (folder / CHECKPOINTS / checkpoint).mkdir(parents=True)
    (folder / CHECKPOINTS / checkpoint / META).touch()
    (folder / CONFIG).write_text(f"name: {name}\nsteps: 3\n")


def test_find_newest_passes_over_runs_without_a_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path / "a", "a")
    write_config(tmp_path / "a-2", "a")
    write_config(tmp_path / "a-3", "a", "set-aside-step-00000002")
    write_config(tmp_path / "a-4", "a")
    (tmp_path / "a-4" / CHECKPOINTS / "step-00000002" / META).unlink()
    assert find_newest(tmp_path, "a") == tmp_path / "a-2"
    assert f"{tmp_path}/a-4, {tmp_path}/a-3" in caplog.text
    mark_finished(tmp_path / "a-4", {})
    assert find_run_folder(tmp_path, "a", "latest") == tmp_path / "a-4"


def test_find_run_folder_latest_is_the_highest_number(tmp_path: Path) -> None:
    for folder in ("a", "a-2", "a-9", "a-10", "a-b", "b-11", "a.-12"):
        write_config(tmp_path / folder, "a")
    (tmp_path / "a-98").mkdir()
    (tmp_path / "a-99").write_text("a file")
    assert find_run_folder(tmp_path, "a", "latest") == tmp_path / "a-10"


def test_find_run_folder_names_a_damaged_config(tmp_path: Path) -> None:
    for number, text in enumerate([b"", b"[a]", b"{}", b"name: a"], 2):
        write_config(tmp_path / f"a-{number}", "a")
        (tmp_path / f"a-{number}" / CONFIG).write_bytes(text)
    assert find_run_folder(tmp_path, "a", "latest") == tmp_path / "a-5"
    (tmp_path / "a-3" / CONFIG).write_bytes(b"name: [")
    with pytest.raises(ValueError, match=r"a-3/config\.yaml has a syntax error"):
        find_run_folder(tmp_path, "a", "latest")


def test_find_run_folder_leaves_runs_of_another_name(tmp_path: Path) -> None:
    for folder, name in (("a", "a"), ("a-2", "a"), ("a-3", "a-3"), ("a-4", "a-3")):
        write_config(tmp_path / folder, name)
    assert find_run_folder(tmp_path, "a", "latest").name == "a-2"


def test_find_run_folder_name_is_taken_literally(tmp_path: Path) -> None:
    for folder in ("a.b", "axb-7"):
        write_config(tmp_path / folder, "a.b")
    assert find_run_folder(tmp_path, "a.b", "latest").name == "a.b"


@pytest.mark.parametrize("exists", [True, False])
def test_find_run_folder_without_a_run_says_so(exists: bool, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    if exists:
        (runs / "other").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"no run called a in .*runs is .*; start one without --resume"
    ):
        find_run_folder(runs, "a", "latest")
    assert runs.exists() == exists


def test_find_run_folder_path_must_have_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "a", tmp_path / "missing"):
        with pytest.raises(ValueError, match="not a run folder"):
            find_run_folder(tmp_path, "a", str(path))
    (tmp_path / "a" / CHECKPOINTS).mkdir()
    folder = find_run_folder(tmp_path / "elsewhere", "other", str(tmp_path / "a"))
    assert folder == tmp_path / "a"


@pytest.mark.parametrize("new", [True, False])
def test_start_that_fails_leaves_no_folder(new: bool, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a")
    with pytest.raises(RuntimeError), removed_if_refused(folder, new):
        raise RuntimeError("the optimizer cannot be built")
    assert folder.exists() != new


def test_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    """If a resume could change the name, the run would later be found neither by its folder nor by its config."""
    for folder in ("a", "a-2", "moved", "b"):
        write_config(tmp_path / folder, "a")
    with pytest.raises(ValueError, match=r"the run is called a, but .* name=b; set name=a"):
        refuse_other_name(tmp_path / "a-2", "b")
    for folder, name in (("a", "a"), ("a-2", "a"), ("moved", "a"), ("b", "b")):
        refuse_other_name(tmp_path / folder, name)


def test_find_run_folder_takes_the_path_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / CHECKPOINTS / "step-00000040").mkdir(parents=True)
    (tmp_path / "a" / CHECKPOINTS / "set-aside-step-00000050").mkdir()
    monkeypatch.chdir(tmp_path / "a" / CHECKPOINTS)
    for resume in (
        tmp_path / "a" / CHECKPOINTS / "step-00000040",
        "step-00000040/",
        "../checkpoints/step-00000040",
    ):
        find_run_folder(tmp_path, "b", str(resume))
        assert split_resume(str(resume)) == (
            tmp_path / "a",
            tmp_path / "a" / CHECKPOINTS / "step-00000040",
        )
    assert split_resume("../../a") == (Path("../../a"), None)
    with pytest.raises(ValueError, match=r"step-00000041: there is no such checkpoint"):
        find_run_folder(tmp_path, "b", "step-00000041")
    with pytest.raises(ValueError, match=r"not a run folder .*\(RUN/checkpoints/step-N"):
        find_run_folder(tmp_path, "b", "set-aside-step-00000050")


def test_second_run_in_one_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(ValueError, match=r"in use by process \d+ on "):
        lock_folder(tmp_path)
    lock_folder(tmp_path).close()


def test_second_run_in_another_process_is_refused_naming_the_first(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on a host of long ago, whose name is longer")
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by process {process.pid} on ") as caught:
            lock_folder(tmp_path)
        assert "long ago" not in str(caught.value)
        process.kill()
    # The kernel releases the lock of a killed process.
    lock_folder(tmp_path).close()


def test_mark_finished_is_read_back(tmp_path: Path) -> None:
    mark_finished(tmp_path, {"steps": 3, "eval/top1": 0.5})
    assert json.loads((tmp_path / FINISHED).read_text()) == {"steps": 3, "eval/top1": 0.5}


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 64 KiB that has room for only a part of a small file."""
    with mount_small_disk(tmp_path / "disk", "64k") as path:
        yield path


def test_full_disk_leaves_no_half_file_and_what_was_there(full_disk: Path) -> None:
    old = {"steps": 1}
    mark_finished(full_disk, old)
    mark_launch(full_disk, "mine")
    long = {"text": "x" * 100_000}
    with pytest.raises(OSError, match=r"No space left on device; make room.*finished\.json"):
        mark_finished(full_disk, long)
    mark_launch(full_disk, "y" * 100_000, 0)
    assert json.loads((full_disk / FINISHED).read_text()) == old
    assert json.loads((full_disk / LAUNCHED).read_text())["launch"] == "mine"
    # Records that cannot be written are written later, in order.
    metrics = MetricsLogger(full_disk, {}, plain(4, 10))
    metrics.write_values(1, {"a": 1.0})
    ballast = full_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
    values = {f"value {number}": float(number) for number in range(1000)}
    metrics.write_values(2, values)
    assert [record["step"] for record in read_records(full_disk / METRICS_FILE)] == [1]
    ballast.unlink()
    metrics.write_values(3, {})
    metrics.write_values(3, {"a": 3.0})
    assert [
        json.loads(line)["step"] for line in (full_disk / METRICS_FILE).read_text().splitlines()
    ] == [1, 2, 3]
    metrics.close()
    assert sorted(path.name for path in full_disk.iterdir()) == [FINISHED, LAUNCHED, METRICS_FILE]
