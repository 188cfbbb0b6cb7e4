"""Which hosts `disco-ds launch` continues with if some do not answer. A script replaces ssh."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.launcher import runner

from disco_ds.cli.options import parse_args
from disco_ds.config import load_config
from disco_ds.launch.hosts import check_min_hosts, read_hosts, signal_ranks, wait_for_hosts
from disco_ds.launch.launcher import front_end, run
from disco_ds.launch.packing import unpack
from helpers.tiny_run import recipe

HOSTS = ("host-a", "host-b", "host-c")
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ -e {folder}/"$1" ] || exit 255
cat {folder}/"$1"
exec sh -c "$2"
"""
"""Replaces ssh: runs the command on this machine. The file of a host contains what its login shell prints."""


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a file for each host that answers."""
    folder, programs = tmp_path / "answering", tmp_path / "bin"
    for path in (folder, programs):
        path.mkdir()
    for program in ("ssh", "pdsh"):
        (programs / program).write_text(SSH.format(folder=folder))
        (programs / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for host in HOSTS:
        (folder / host).touch()
    return folder


RUNNER = """
import subprocess, sys
from pathlib import Path
import psutil
attempt = sys.argv[sys.argv.index("--launch-id") + 1]
attempts = Path("attempts").read_text().split() if Path("attempts").exists() else []
Path("attempts").write_text(" ".join([*attempts, attempt]))
for name in attempts[:1] if len(attempts) == 1 else []:
    words = [sys.executable, "-c", "import time; time.sleep(60)", "--local_rank=0", name]
    rank = subprocess.Popen(words, start_new_session=True)
    Path("thawed").write_text(str(rank.pid))
if len(attempts) == 2:
    living = [p.pid for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE]
    Path("alive").write_text(str(int(Path("thawed").read_text()) in living))
sys.exit(1)
"""
"""Replaces `deepspeed`. During the second attempt, a rank of the first one appears, as if its host had been frozen."""


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Restore the signal handlers that a launch replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_ranks_of_every_attempt_of_a_launch_are_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_handlers: None
) -> None:
    monkeypatch.setattr("disco_ds.launch.launcher.NAMING_S", 0.5)
    monkeypatch.chdir(tmp_path)  # where `python -m` looks for packages first
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "runner.py").write_text(RUNNER)
    foreign = [sys.executable, "-c", "input()", "--local_rank=0", f"launch-{'0' * 16}-0"]
    with subprocess.Popen(foreign, stdin=subprocess.PIPE) as of_another_launch:
        line = ["launch", "--config", str(recipe(tmp_path)), "--restarts", "2"]
        assert run(parse_args(line)) == 1
        assert of_another_launch.poll() is None, "a rank of another launch was ended"
        of_another_launch.communicate(b"\n")
    attempts = (tmp_path / "attempts").read_text().split()
    assert len(set(attempts)) == len(attempts) == 3
    assert (tmp_path / "alive").read_text() == "False"


def test_login_shell_that_prints_is_told_apart_from_the_count(answering: Path) -> None:
    (answering / "host-a").write_bytes(b"Welcome to node 7\n\xff\n12\n")
    (answering / "host-c").write_bytes(b"no end of line: 3 ")
    words = [sys.executable, "-c", "input()", "--local_rank=0", "launch-of-a-test-0"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as rank:
        found = signal_ranks(HOSTS, "launch-of-a-test", 0)
        rank.communicate(b"\n")
    assert found == dict.fromkeys(HOSTS, 1)
    assert wait(HOSTS, 2, 60) == list(HOSTS)


def test_host_that_prints_but_does_not_run_the_program_has_not_answered(answering: Path) -> None:
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
    assert wait(HOSTS[:1], 2, 60) == list(HOSTS), "hosts that were left out must return"
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
    # At the next restart, the host that was left out is tried only once.
    assert wait(HOSTS[:2], 2, 600) == list(HOSTS[:2])
    assert "waiting" not in capfd.readouterr().err
    # Another host that does not answer gets the full time.
    (answering / "host-b").unlink()
    assert wait(HOSTS[:2], 1, 0.5) == ["host-a"]
    assert (
        capfd.readouterr()
        .err.splitlines()[-1]
        .endswith("1 of 3 hosts: no answer from host-b, host-c")
    )


def test_launch_waits_longer_than_the_patience_if_too_few_hosts_are_left(answering: Path) -> None:
    for host in HOSTS[1:]:
        (answering / host).unlink()
    back = threading.Timer(1, (answering / "host-c").touch)
    back.start()
    assert wait(HOSTS, 2, 0) == ["host-a", "host-c"]
    back.join()
    (answering / "host-c").unlink()
    assert wait(HOSTS, 2, 0, stopped=lambda: True) is None


@pytest.mark.parametrize(("given", "left"), [([], []), (["ranks=7"], ["ranks=5"])])
def test_attempt_with_fewer_hosts_names_only_these(
    given: list[str], left: list[str], tmp_path: Path
) -> None:
    path, hostfile = recipe(tmp_path), tmp_path / "hosts"
    slots = dict(zip(HOSTS, (2, 3, 2), strict=True))
    hostfile.write_text("".join(f"{host} slots={num}\n" for host, num in slots.items()))
    words = ["launch", "--config", str(path), "--hostfile", str(hostfile), "steps=3", *given]
    args, config = parse_args(words), load_config(path, given)
    for hosts, overrides in ((HOSTS, given), (HOSTS[:2], left)):
        command = front_end(args, config, slots, hosts, "id", None)
        assert unpack(command[-1:])[1:] == ["steps=3", *overrides]
        options = command[command.index("-m") + 2 : command.index("--module")]
        assert read_hosts(hostfile, options) == {host: slots[host] for host in hosts}


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("lines", "options", "remote"),
    [
        (["host-a slots=2"], "", {"host-a": 2}),
        (["host-a slots=2", "host-c slots=4"], "--include host-c:0,2", {"host-c": 2}),
        ([f"{HERE} slots=2", "host-c slots=4"], f"--exclude {HERE}", {"host-c": 4}),
        (["host-a slots=2", "host-c slots=4"], "--num_nodes 1 --num_gpus 1", {"host-a": 1}),
        (["host-a slots=2", "host-c slots=4"], "", {"host-a": 2, "host-c": 4}),
        ([f"{HERE} slots=2", "host-c slots=4"], "--include " + HERE, {}),
        (["localhost slots=2"], "", {}),
        (["127.0.0.1 slots=2"], "", {}),
        (["host-a slots=2"], "--no_ssh --node_rank 0", {}),
    ],
)
def test_single_remote_host_is_reached_over_ssh(
    lines: list[str],
    options: str,
    remote: dict[str, int],
    tmp_path: Path,
    answering: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run the front end of DeepSpeed up to the command that it would start."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("\n".join(lines))
    assert read_hosts(hostfile, options.split()) == remote
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise InterruptedError

    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(runner.subprocess, "Popen", start)
    front = f"--master_addr 10.0.0.1 --no_ssh_check {options}"
    words = ["launch", "--config", "tiny", "--hostfile", str(hostfile), f"--deepspeed={front}"]
    config: Any = None
    command = front_end(parse_args(words), config, remote, list(remote), "launch-of-a-test-0", None)
    with pytest.raises(InterruptedError):
        runner.main(command[command.index("-m") + 2 :])
    (line,) = started
    reached = line[line.index("-w") + 1].split(",") if line[0] == "pdsh" else []
    assert reached == list(remote)


def check(folder: Path, slots: list[int], least: int, *overrides: str) -> None:
    config = load_config(recipe(folder), overrides)
    hosts = {f"host-{number}": ranks for number, ranks in enumerate(slots)}
    check_min_hosts(SimpleNamespace(min_hosts=least, deepspeed=[]), config, hosts)  # type: ignore[arg-type]


STAGES = "stages=[{until: 240, global_batch: 24}, {until: 400, global_batch: 32}]"


@pytest.mark.parametrize(
    ("slots", "least", "overrides", "said"),
    [
        ([1, 1, 1], 2, ["global_batch=24"], "data.slots must be a multiple of 6, got 4"),
        ([1, 1, 1], 2, ["data.slots=6"], "global_batch must be a multiple of 24, got 16"),
        ([1, 1, 2], 2, ["data.slots=12"], "global_batch must be a multiple of 48, got 16"),
        ([1, 1, 1, 1], 2, ["data.slots=12"], "global_batch must be a multiple of 48, got 16"),
        ([1, 2, 4], 2, ["global_batch=48"], "data.slots must be a multiple of 210, got 4"),
        ([8] * 300, 299, [], "data.slots must be a multiple of 717,600, got 4"),
        ([1, 1, 1], 2, ["data.slots=6", "steps=null", STAGES], "a multiple of 24, got 32"),
        ([1, 1], 1, ["data.slots=1048576"], "every slot needs one"),
    ],
)
def test_number_of_ranks_that_does_not_divide_is_refused(
    slots: list[int], least: int, overrides: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check(tmp_path, slots, least, *overrides)


def test_settings_that_the_error_names_are_accepted(tmp_path: Path) -> None:
    check(tmp_path, [1, 1, 1], 2, "global_batch=24", "data.slots=6", "ranks=3")
    check(tmp_path, [1, 1, 1], 2, "global_batch=12", "micro_batch=2", "data.slots=6")
    check(tmp_path, [1, 1, 2], 2, "global_batch=48", "data.slots=12")


@pytest.mark.parametrize(
    ("hosts", "words", "said"),
    [
        (2, ["--min-hosts", "3"], "--min-hosts 3 needs a hostfile"),
        (1, ["--min-hosts", "1"], "at least two; got 1"),
        (0, ["--min-hosts", "1"], "at least two; got 0"),
        (
            2,
            ["--min-hosts", "1", "--deepspeed", "--master_port 1 --include host-1"],
            "'--master_port 1 --include host-1'",
        ),
        (
            3,
            ["--min-hosts", "2"],
            "data.slots must be a multiple of 6",
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
