"""Ends this process when its launcher has ended, so that no rank trains on as an orphan. Linux only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
FRONT_ENDS = {"deepspeed", "deepspeed.launcher.runner"}
"""Names of DeepSpeed's front end: the script, and the module that it runs."""


def die_with_launcher() -> None:
    """SIGKILL this rank when its launcher dies: its parent process, or DeepSpeed's front end above that.

    The kernel watches the parent; a thread waits for the grandparent, if that is `deepspeed` itself.
    """
    if sys.platform != "linux" or "RANK" not in os.environ:  # without RANK a shell started it, which may end
        return
    parent = os.getppid()
    die_with_parent()
    with suppress(psutil.Error):
        launcher = psutil.Process(parent)
        front_end = launcher.parent()
        starts_ranks = "deepspeed.launcher.launch" in launcher.cmdline()
        if starts_ranks and front_end and FRONT_ENDS & {Path(argument).name for argument in front_end.cmdline()}:
            threading.Thread(target=_wait_for_end, args=(front_end.pid,), name="launcher-watch", daemon=True).start()


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
