"""Which hosts a launch goes on with: asked through an ssh that stands in for theirs, and left out of its hostfile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_ds.cli.launch import run
from disco_ds.cli.launch_hosts import narrow, signal_ranks, wait_for_hosts
from disco_ds.cli.parser import parse_args
from disco_ds.config import load_config
from disco_ds.launch.hostfile import read_hostfile
from helpers.tiny_run import recipe

HOSTS = ("host-a", "user@host-b", "host-c")
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ -e {folder}/"$1" ] || exit 255
cat {folder}/"$1"
case "$2" in
*" 9") echo launch-of-a-test=0 ;;
*) exec sh -c "$2" ;;
esac
"""
"""Runs the program here, but not where it would kill those that are sent to the other hosts.

The file of a host contains what its login shell prints."""


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each host that answers."""
    folder, programs = tmp_path / "answering", tmp_path / "bin"
    for path in (folder, programs):
        path.mkdir()
    (programs / "ssh").write_text(SSH.format(folder=folder))
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for host in HOSTS:
        (folder / host).touch()
    return folder


def test_login_shell_that_prints_is_told_apart_from_the_count(answering: Path) -> None:
    (answering / "host-a").write_bytes(b"Welcome to node 7\n\xff\n12\n")
    (answering / "host-c").write_bytes(b"no end of line: 3 ")
    words = [sys.executable, "-c", "input()", "--local_rank=0", "launch-of-a-test"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as rank:
        found = signal_ranks(HOSTS, "launch-of-a-test", 0)
        rank.communicate(b"\n")
    assert found == dict.fromkeys(HOSTS, 1)
    assert wait(HOSTS, 2, 60) == list(HOSTS)


def test_host_that_prints_without_having_run_the_program_has_not_answered(answering: Path) -> None:
    (answering.parent / "bin" / "ssh").write_text("#!/bin/sh\necho This account is disabled: 0\n")
    assert signal_ranks(HOSTS, "launch-of-a-test", 0) == dict.fromkeys(HOSTS)


def wait(
    last: tuple[str, ...], least: int, patience_s: float, stopped: Callable[[], bool] = bool
) -> list[str] | None:
    return wait_for_hosts(HOSTS, last, "launch-of-a-test", least, patience_s, stopped)


def test_all_hosts_that_answer_take_part_at_once(
    answering: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wait(HOSTS, 2, 60) == list(HOSTS)
    assert wait(HOSTS[:1], 2, 60) == list(HOSTS), "those that were left out before too"
    assert capfd.readouterr().err == ""


def test_host_that_does_not_answer_is_left_out_after_the_patience(
    answering: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (answering / "host-c").unlink()
    start = time.monotonic()
    assert wait(HOSTS, 2, 2.5) == list(HOSTS[:2])
    assert time.monotonic() - start >= 2.5
    assert capfd.readouterr().err.splitlines()[-1] == (
        "disco-ds launch: continuing with 2 of 3 hosts: no answer from host-c"
    )
    # It has had its time: the next restart asks it once more.
    assert wait(HOSTS[:2], 2, 600) == list(HOSTS[:2])
    assert "waiting" not in capfd.readouterr().err
    # Another one has not.
    (answering / "user@host-b").unlink()
    assert wait(HOSTS[:2], 1, 0.5) == ["host-a"]
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .endswith("1 of 3 hosts: no answer from user@host-b, host-c")
    )


def test_too_few_hosts_are_waited_for_beyond_the_patience(answering: Path) -> None:
    for host in HOSTS[1:]:
        (answering / host).unlink()
    back = threading.Timer(1, (answering / "host-c").touch)
    back.start()
    assert wait(HOSTS, 2, 0) == ["host-a", "host-c"]
    back.join()
    (answering / "host-c").unlink()
    assert wait(HOSTS, 2, 0, stopped=lambda: True) is None


@pytest.mark.parametrize(("given", "left"), [([], []), (["ranks=7"], ["ranks=5"])])
def test_attempt_with_fewer_hosts_has_a_hostfile_of_these(
    given: list[str], left: list[str], tmp_path: Path
) -> None:
    words = [
        "launch",
        "--config",
        "tiny",
        "--hostfile",
        "hosts",
        "--deepspeed",
        "--master_port 1",
        "steps=3",
        *given,
    ]
    args, config = parse_args(words), load_config(recipe(tmp_path), given)
    slots = dict(zip(HOSTS, (2, 3, 2), strict=True))
    with narrow(args, config, slots, HOSTS) as same:
        assert same is args
    with narrow(args, config, slots, HOSTS[:2]) as narrowed:
        assert read_hostfile(narrowed.hostfile) == {"host-a": 2, "user@host-b": 3}
        assert narrowed.overrides == ["steps=3", *left]
        assert narrowed.deepspeed == args.deepspeed
    assert not narrowed.hostfile.exists()
    # deepspeed would start the ranks of a single host here.
    with narrow(args, config, slots, HOSTS[1:2]) as narrowed:
        assert narrowed.deepspeed == "--master_port 1 --force_multi"


@pytest.mark.parametrize(
    ("hosts", "words", "said"),
    [
        (2, ["--min-hosts", "3"], "needs a hostfile with at least that many hosts"),
        (1, ["--min-hosts", "1"], "at least two; got 1"),
        (0, ["--min-hosts", "1"], "at least two; got 0"),
        (2, ["--min-hosts", "1", "--restarts", "0"], "needs --restarts"),
        (2, ["--min-hosts", "1", "--patience", "60"], "--patience 60 is below lost_after_s (120)"),
        (
            2,
            ["--min-hosts", "1", "--deepspeed", "--include host-1"],
            "--deepspeed --include cannot be used with --min-hosts",
        ),
        (
            3,
            ["--min-hosts", "2"],
            "global_batch 16 must be a multiple of 24",
        ),
    ],
)
def test_min_hosts_that_a_lost_host_would_make_fail_is_refused(
    hosts: int, words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text(
        "".join(f"host-{number} slots=1\n" for number in range(1, hosts + 1))
    )
    given = ["--hostfile", str(tmp_path / "hosts")] if hosts else []
    line = ["launch", "--config", str(recipe(tmp_path)), "--restarts", "1", *given, *words]
    assert run(parse_args(line)) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()
