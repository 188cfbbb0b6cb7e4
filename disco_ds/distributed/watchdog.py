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
"""Option of prctl that sets the signal that a process receives when its parent ends."""
FRONT_ENDS = {"deepspeed", "deepspeed.launcher.runner"}
"""A process is DeepSpeed's front end if a word of its command line is one of these names or a path to one of them."""


def die_with_launcher() -> None:
    """Make sure that this rank is killed by SIGKILL when its launcher ends.

    The launcher consists of up to two processes. The first is the rank's parent, which the kernel
    watches. The second is the `deepspeed` command that started this parent; a thread of this rank
    watches it.
    """
    # Without RANK, there is no launcher. The parent may be a shell, and this process may outlive it.
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
    """Ask the kernel to send SIGKILL to this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before our request
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after(pid: int) -> None:
    # psutil's wait is not used, because it never returns for a zombie that nobody reaps, for example in a container
    # without an init process.
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    except OSError:
        return  # this kernel does not support pidfd_open
    else:
        wait([handle])
    os.kill(os.getpid(), signal.SIGKILL)
