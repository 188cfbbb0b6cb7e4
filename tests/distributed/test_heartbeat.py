"""Heartbeats of ranks of which one is killed or suspended: every other rank ends in time and names the lost rank."""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.distributed import comm
from disco_ds.distributed.heartbeat import HURRY_S, Heartbeat
from helpers.dist import start_ranks
from helpers.machine import many_open_files
from helpers.waiting import sleep_for_ever, wait_for

SIZE = 3
FAULTY = 1
LOST_AFTER_S = 3.0
SLACK_S = 20
TIMEOUT_S = {"hangs": 2 * LOST_AFTER_S} | dict.fromkeys(
    ("all hang", "all block", "fine"), LOST_AFTER_S
)
"""Case -> its timeout_s, if that is not 60. Ranks that wait for a hung rank stop after nine tenths of timeout_s. The
hung rank must be told before its own timeout_s ends."""


def enter(number: int, port: int, folder: Path, kind: str, lost_after_s: float) -> None:
    """Run one rank in this process."""
    with (folder / f"{number}.log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(SIZE), LOCAL_RANK=str(number))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    timeout_s = TIMEOUT_S.get(kind, 60)
    with many_open_files(), comm.session(60), Heartbeat(lost_after_s, timeout_s) as heart:
        heart.folder = folder / "hangs"
        for step in range(10 if kind == "fine" else 10**6):
            heart.mark(step, "reading data", timed=True)
            if step == 10 and (number == FAULTY or "all" in kind):
                misbehave(kind)
            heart.mark(step, "computing", timed=True)
            comm.all_reduce_sum(torch.ones(1))
            if step == 20 and kind == "stops":
                heart.mark(step, "saving")
                heart.stop_agreed()
                (folder / f"{number}.saves").touch()
                wait_for((folder / "saved").exists, 100)
                return
            if step == 9:
                if kind == "fine":
                    heart.mark(step, "saving")
                    time.sleep(1.5 * LOST_AFTER_S)
                (folder / f"{number}.ready").touch()
            time.sleep(0.03)


def misbehave(kind: str) -> None:
    if kind == "fails":
        raise ValueError("bad luck")
    if kind == "all block":  # a driver call hangs while it holds Python's global lock
        ctypes.PyDLL(None).sleep(1000)
    elif "hang" in kind or kind == "interrupted":
        sleep_for_ever()


class Ranks:
    """A group of ranks that take steps together, and in which a test causes a fault."""

    def __init__(self, folder: Path, kind: str = "", lost_after_s: float = LOST_AFTER_S):
        self.folder = folder / (kind or "steps")
        self.folder.mkdir()
        self.resources = ExitStack()
        ranks = start_ranks(enter, SIZE, self.folder, kind, lost_after_s)
        self.processes = self.resources.enter_context(ranks)
        self.since = 0.0

    def wait_ready(self) -> None:
        wait_for(lambda: all((self.folder / f"{n}.ready").exists() for n in range(SIZE)))

    def send(self, number: int, *ranks: int) -> None:
        self.wait_ready()
        for rank in ranks or range(SIZE):
            os.kill(self.processes[rank].pid, number)
        self.since = time.monotonic()

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()

    def said(self, number: int, within_s: float = LOST_AFTER_S + SLACK_S) -> str:
        """Wait until rank `number` stops by itself, and fail if it does not. Return its log line with the reason."""
        process = self.processes[number]
        process.join(max(self.since + within_s - time.monotonic(), 0))
        assert process.exitcode == 1, (number, process.exitcode, self.log(number))
        assert "Exception in thread" not in self.log(number)
        return next(
            line for line in self.log(number).splitlines() if f"rank {number} stops: " in line
        )

    def stacks(self, number: int) -> str:
        return (self.folder / "hangs" / f"stacks_rank_{number}.txt").read_text()

    def check_named(
        self, faulty: int, *words: str, within_s: float = LOST_AFTER_S + SLACK_S
    ) -> None:
        """Check that all other ranks stop with an error that names the faulty rank, its host and last step."""
        for number in set(range(SIZE)) - {faulty}:
            said = self.said(number, within_s)
            for word in (f"rank {faulty} on {socket.gethostname()} (last step ", *words):
                assert word in said, said


def check_fine(group: Ranks) -> None:
    for process in group.processes:
        process.join(300)
    assert [process.exitcode for process in group.processes] == [0] * SIZE
    assert not any(group.log(number) for number in range(SIZE))


def check_frozen(group: Ranks) -> None:
    """Check that no rank counts as lost after the whole machine was suspended."""
    time.sleep(LOST_AFTER_S + 2)
    group.send(signal.SIGCONT)
    time.sleep(LOST_AFTER_S + 2)
    assert all(process.is_alive() for process in group.processes)
    assert not any(group.log(number) for number in range(SIZE))


def check_hung(group: Ranks) -> None:
    """Check that the hung rank is named, and that it writes the stack of the call in which it hangs."""
    within_s = 2 * LOST_AFTER_S + SLACK_S
    group.check_named(FAULTY, "last step 10, reading", "the others have waited ", within_s=within_s)
    assert f"for rank {FAULTY} on " in group.said(FAULTY, within_s)
    assert "misbehave" in group.stacks(FAULTY)
    assert "misbehave" not in group.stacks(0)


def check_interrupted(group: Ranks) -> None:
    """Check Ctrl-C before the run has installed its signal handler, while some ranks may wait in a collective."""
    for process in group.processes:
        process.join(300)
        assert process.exitcode == 1
    assert "KeyboardInterrupt" in group.log(FAULTY)


def check_all_hung(group: Ranks) -> None:
    for number in range(SIZE):
        said = group.said(number)
        assert "no rank has made progress for 3 s: all ranks wait at step 10, reading data" in said
        assert "misbehave" in group.stacks(number)


def check_blocked(group: Ranks) -> None:
    """Check that ranks whose Python threads are blocked end and print their stacks. They cannot name a rank."""
    for number, process in enumerate(group.processes):
        process.join(max(group.since + 2 * LOST_AFTER_S + SLACK_S - time.monotonic(), 0))
        assert process.exitcode == 1, (number, process.exitcode, group.log(number))
        assert "Timeout (0:00:03)!" in group.log(number)
        assert "in misbehave" in group.log(number)


SILENT = "has sent no heartbeat for"
STORE = "no answer from the rendezvous store for"
CASES: dict[str, tuple[Callable[[Ranks], Any], Callable[[Ranks], None]]] = {
    "fine": (Ranks.wait_ready, check_fine),
    "fails": (
        Ranks.wait_ready,
        lambda r: r.check_named(FAULTY, "last step 10, reading", "failed: ValueError: bad luck"),
    ),
    "interrupted": (lambda r: r.send(signal.SIGINT), check_interrupted),
    "killed": (lambda r: r.send(signal.SIGKILL, FAULTY), lambda r: r.check_named(FAULTY, SILENT)),
    "stopped": (lambda r: r.send(signal.SIGSTOP, FAULTY), lambda r: r.check_named(FAULTY, SILENT)),
    "hangs": (Ranks.wait_ready, check_hung),
    "all hang": (Ranks.wait_ready, check_all_hung),
    "all block": (Ranks.wait_ready, check_blocked),
    "store killed": (lambda r: r.send(signal.SIGKILL, 0), lambda r: r.check_named(0, STORE)),
    "store stopped": (lambda r: r.send(signal.SIGSTOP, 0), lambda r: r.check_named(0, STORE)),
    "all frozen": (lambda r: r.send(signal.SIGSTOP), check_frozen),
}


@pytest.mark.parametrize(
    "kinds",
    [
        ("fails", "killed", "stopped", "interrupted"),
        ("all hang", "hangs"),
        pytest.param(("all block",), marks=pytest.mark.slow),
        pytest.param(
            ("fine", "store killed", "store stopped", "all frozen"), marks=pytest.mark.slow
        ),
    ],
)
def test_every_survivor_names_the_lost_rank(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """The cases `kinds` run at the same time, because they mostly wait."""
    groups = {kind: Ranks(tmp_path, kind) for kind in kinds}
    try:
        for kind, group in groups.items():
            CASES[kind][0](group)
            group.since = time.monotonic()
        for kind, group in groups.items():
            CASES[kind][1](group)
    finally:
        for group in groups.values():
            group.resources.close()


def test_ranks_are_joined_in_words() -> None:
    assert [comm.join_ranks(ranks) for ranks in ([3], [0, 1], [2, 0, 1, 7])] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0-2, 7",
    ]


@pytest.mark.slow
def test_signal_of_a_launcher_shortens_the_wait(tmp_path: Path) -> None:
    """Launchers send SIGTERM a second after a rank has died, and SIGKILL half a minute later."""
    group = Ranks(tmp_path, lost_after_s=60.0)
    try:
        group.send(signal.SIGSTOP, FAULTY)
        group.send(signal.SIGTERM, 0)
        group.check_named(FAULTY, SILENT, within_s=HURRY_S + SLACK_S)
    finally:
        group.resources.close()


@pytest.mark.slow
def test_signal_that_the_ranks_have_agreed_on_leaves_time_for_the_save(tmp_path: Path) -> None:
    group = Ranks(tmp_path, "stops", lost_after_s=60.0)
    try:
        group.send(signal.SIGTERM, 0, 2)
        for number in range(SIZE):
            wait_for((group.folder / f"{number}.saves").exists)
        group.send(signal.SIGTERM, 0, 2)  # launchers repeat it
        group.send(signal.SIGSTOP, FAULTY)  # as if a file system blocked the whole process
        time.sleep(HURRY_S + 8)
        group.send(signal.SIGCONT, FAULTY)
        (group.folder / "saved").touch()
        for process in group.processes:
            process.join(300)
        assert [process.exitcode for process in group.processes] == [0] * SIZE
    finally:
        group.resources.close()
