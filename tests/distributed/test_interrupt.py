"""Ctrl-C: the first one asks the run to save and stop, even if its signal arrives repeatedly. A later one ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from disco_ds.distributed import launcher
from disco_ds.distributed.launcher import SIGNALS, Interrupts
from helpers.launched import hear_interrupts
from helpers.waiting import wait_for


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # SIGINT is ignored if the tests run as a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def listening() -> Interrupts:
    interrupts = Interrupts()
    interrupts.listen()
    return interrupts


def test_first_interrupt_asks_to_stop_and_arrives_twice(capfd: pytest.CaptureFixture[str]) -> None:
    interrupts = listening()
    assert not interrupts.is_stop_requested
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.is_stop_requested
    assert capfd.readouterr().err.count("Ctrl-C: saving after this step") == 1


def test_background_job_of_a_script_ignores_the_interrupt_of_others() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = listening()
    os.kill(os.getpid(), signal.SIGINT)
    assert not interrupts.is_stop_requested


def test_interrupt_whose_terminal_is_gone_asks_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `2>&1 | tee log`, the same Ctrl-C also ends `tee`, so the message cannot be printed."""

    def gone(*arguments: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", gone)
    interrupts = listening()
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.is_stop_requested


AGAIN = f"""
import os, signal, time
from disco_ds.distributed.launcher import Interrupts
interrupts = Interrupts()
interrupts.listen()
os.kill(os.getpid(), signal.SIGINT)
time.sleep({launcher.ONE_INTERRUPT_S} + 0.2)
print(interrupts.is_stop_requested, flush=True)
os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""


def test_interrupt_once_more_ends_the_process() -> None:
    command, options = (
        [sys.executable, "-c", AGAIN],
        {"capture_output": True, "text": True, "timeout": 60},
    )
    done = subprocess.run(command, preexec_fn=hear_interrupts, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "True\n"
    assert "Traceback" not in done.stderr


def test_interrupt_of_a_command_is_one_line() -> None:
    command = [
        sys.executable,
        "-m",
        "disco_ds",
        "index",
        "pipe:sleep 600; echo {0..1}.tar",
        "--pipe",
        "--to",
        "/dev/null",
    ]
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, preexec_fn=hear_interrupts, **options) as process:
        started = psutil.Process(process.pid)
        # Wait until the command runs. An interrupt during Python's imports would end in a traceback.
        wait_for(lambda: "sleep" in {child.name() for child in started.children(recursive=True)})
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=300) == 130, said
    assert "Traceback" not in said
    assert said.endswith("interrupted\n")
