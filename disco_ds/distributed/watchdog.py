"""Ends this process when the one that started it is gone: no rank trains on as an orphan. Linux only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
FRONT_ENDS = {"deepspeed", "deepspeed.launcher.runner"}
"""The script, and the module it runs, which tools/demo.py starts."""


def die_with_launcher() -> None:
    """SIGKILL this rank when its launcher dies: the process that started it, and DeepSpeed's front end above that.

    The kernel sees to the parent; a thread waits for the grandparent, if that is `deepspeed` itself.
    """
    if sys.platform != "linux" or "RANK" not in os.environ:  # the latter: started alone, by a shell that may end
        return
    parent = os.getppid()
    die_with_parent()
    front_end = _parent_of(parent)
    starts_ranks = "deepspeed.launcher.launch" in _command_of(parent)
    if starts_ranks and FRONT_ENDS & {Path(word).name for word in _command_of(front_end)}:
        threading.Thread(target=_wait_for_end, args=(front_end,), name="launcher-watch", daemon=True).start()


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    except OSError:
        return  # a kernel that cannot watch a process
    else:
        select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
