"""`make demo` as a new user runs it, twice, from a clone whose path contains a space."""

import os
import shutil
import subprocess
import sys

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def clone(tmp_path):
    """Copy the files of the demo to a path that contains a space."""
    folder = tmp_path / "a clone"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("disco_ds", "ds_configs", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


@pytest.mark.timeout(900)
def test_demo_runs_twice_from_a_folder_with_a_space(clone):
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    for name in ("quickstart", "quickstart-2"):
        command = [
            sys.executable,
            "-m",
            "tools.make.demo",
            "samples=1280",
            "optim.warmup_steps=2",
            "log.every_steps=5",
        ]
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        run = clone / "runs" / name
        assert (run / "finished.json").exists()
        assert (run / "report.png").exists()
        assert (run / "export" / "open_clip_model.safetensors").exists()
        assert "step 10/10" in done.stdout
        assert "chance" in done.stdout
        assert "[INFO]" not in done.stdout, "the launcher's log lines must go only to the log file"
        assert "[INFO]" in (clone / "runs" / "demo.log").read_text()


@pytest.mark.timeout(300)
def test_demo_tells_a_failure_and_where_to_read_on(clone):
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.make.demo", "data.shards=/nowhere"]
    done = subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode != 0
    assert "/nowhere" in done.stdout
    assert "the run did not finish; the end of runs/demo.log" in done.stderr
