"""End a rank when its launcher ends, so that no rank keeps training as an orphan. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that a process gets when its parent ends."""
FRONT_ENDS = {"deepspeed", "deepspeed.launcher.runner"}
"""Names of DeepSpeed's front end: the script, and the module that it runs."""


def die_with_launcher() -> None:
    """SIGKILL this rank when its launcher ends.

    The launcher is the parent process, which the kernel watches, and `deepspeed` above it, which a
    thread waits for.
    """
    # Without RANK, the parent is a shell, which may end while the process keeps running.
    if sys.platform != "linux" or "RANK" not in os.environ:
        return
    parent = os.getppid()
    die_with_parent()
    with suppress(psutil.Error):
        launcher = psutil.Process(parent)
        if "deepspeed.launcher.launch" not in launcher.cmdline():
            return
        front_end = launcher.parent()
        if front_end and FRONT_ENDS & {Path(word).name for word in front_end.cmdline()}:
            threading.Thread(
                target=_end_after, args=(front_end.pid,), name="launcher-watch", daemon=True
            ).start()


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after(pid: int) -> None:
    # psutil would wait forever for a zombie that nobody reaps, as in a container without an init process.
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    except OSError:
        return  # this kernel cannot watch a process
    else:
        wait([handle])
    os.kill(os.getpid(), signal.SIGKILL)
