"""The trainer's command line and its dry run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from disco_ds.arguments import count_ranks, parse_args

# The dry run


def disco_ds(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disco_ds", "train", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_dry_run_counts_the_slots_of_the_hostfile(tmp_path: Path) -> None:
    hosts = tmp_path / "two hosts"
    hosts.write_text("# ours\nfirst slots=3\n\nsecond slots=1  # small\n")
    done = disco_ds("--config", "quickstart", "--dry-run", "--hostfile", str(hosts), "micro_batch=8", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "global batch 128 = 4 ranks x 8 micro-batch x 4 micro-batches per rank" in done.stdout
    assert '"gradient_accumulation_steps": 4' in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["two hosts"], "a dry run writes nothing"


def test_dry_run_mistakes_exit_with_2_and_one_line(tmp_path: Path) -> None:
    done = disco_ds("--config", "quickstart", "--dry-run", "--hostfile", "missing", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no hostfile missing")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_dry_run_imports_no_model_library(tmp_path: Path) -> None:
    script = (
        "import sys; from disco_ds.__main__ import main; from disco_ds.config import load_config"
        "; load_config('quickstart')"
        "; early = {'torch', 'deepspeed'} & set(sys.modules); code = main()"
        "; print('\\nseen', code, early, {'open_clip', 'torchvision', 'timm', 'webdataset'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, "train", "--config", "quickstart", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "seen 0 set() set()"


@pytest.mark.parametrize(("text", "ranks"), [("a slots=2\nb slots=6\n", 8), ("localhost slots=1", 1)])
def test_count_ranks_sums_the_slots(text: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts"
    path.write_text(text)
    assert count_ranks(None, path) == ranks


@pytest.mark.parametrize("text", ["", "a", "a slots=x", "a slots=1\na slots=1"])
def test_count_ranks_malformed_hostfile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match="Hostfile"):
        count_ranks(None, path)


def test_count_ranks_without_a_hostfile() -> None:
    assert [count_ranks(None, None), count_ranks(5, None)] == [1, 5]


def test_parse_args_takes_overrides_and_the_launchers_rank() -> None:
    args = parse_args(["--local_rank=1", "--config", "x", "a=1", "b.c=2", "--resume", "latest"])
    assert (args.config, args.overrides, args.resume, args.dry_run) == ("x", ["a=1", "b.c=2"], "latest", False)


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config", "x", "--ranks", "1", "--hostfile", "f"]])
def test_parse_args_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert "usage: disco_ds.train" in capsys.readouterr().err
