"""Wait for another thread or process, with a timeout."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil


def wait_for(condition: Callable[[], Any], timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s"
        time.sleep(0.01)


def wait_until_gone(pids: Sequence[int]) -> None:
    wait_for(lambda: not any(map(_is_running, pids)))


def _is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie, which has ended but was not reaped, does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def sleep_for_ever() -> None:
    while True:
        time.sleep(0.1)
