"""Wait for another thread or process, with a timeout."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s"
        time.sleep(0.01)


def sleep_for_ever() -> None:
    while True:
        time.sleep(0.1)
