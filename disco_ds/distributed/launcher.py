"""What a rank gets from outside: the launcher's environment variables, its end, and signals. Import-light.

A signal requests to save or to stop a run between two steps, and so does a timer. SIGTERM, SIGUSR1 or SIGINT (Ctrl-C)
may be sent to any rank. A signal only sets a flag. An all_reduce in every step (`agree` in training/step.py) shares the
flags, so that all ranks save or stop after the same step. A second Ctrl-C ends the process immediately.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

REQUIRED = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for each rank, besides RANK."""


def adopt_slurm() -> None:
    """Check the launcher's variables. Set them from srun's variables if srun is the launcher.

    MASTER_ADDR is the first host of the job step, where rank 0 runs. MASTER_PORT is derived from the
    IDs of the job and the step, so that two jobs on one host use different ports. It is below the
    range of ephemeral ports, which the kernel gives to other connections.

    Raises:
        ValueError: If some of the variables of the launcher are missing.
    """
    env = os.environ
    if "RANK" in env:
        if missing := [name for name in REQUIRED if name not in env]:
            raise ValueError(
                f"RANK is set but not {', '.join(missing)}; start the ranks with deepspeed, torchrun or srun, which "
                "set the variables of a rank"
            )
        return
    # SLURM_PROCID alone is not enough: a batch script also has it, but is not a task of a job step.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return
    # Take the first entry of the list. Its brackets may contain commas: node[003-006,010] -> node003.
    first = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", env["SLURM_STEP_NODELIST"])[0]
    env.setdefault("MASTER_ADDR", re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first))
    job = 100 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(12_000 + job % 20_000))
    env.setdefault("WORLD_SIZE", env["SLURM_STEP_NUM_TASKS"])
    # With --gpus-per-task, each task sees only its own GPUs, so the local ID may exceed their number.
    local = int(env["SLURM_LOCALID"])
    if visible := env.get("CUDA_VISIBLE_DEVICES"):
        local %= visible.count(",") + 1
    env.setdefault("LOCAL_RANK", str(local))
    env["RANK"] = env["SLURM_PROCID"]


# The end of the launcher

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
        wait([os.pidfd_open(pid)])
    except ProcessLookupError:
        pass  # it has already ended
    except OSError:
        return  # this kernel does not support pidfd_open
    os.kill(os.getpid(), signal.SIGKILL)


# Signals

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ONE_INTERRUPT_S = 2.0
"""Several SIGINTs within this time count as one Ctrl-C.

A terminal sends SIGINT to all processes of a job, and torchrun then sends it to the ranks again.
"""
_ANSWER = b"\nCtrl-C: saving after this step; press again to end at once without saving\n"


class Interrupts:
    """The requests that this rank has received, and the requests that all ranks have agreed on.

    Args:
        save_every_s: A save is requested when this many seconds have passed since the last save began; 0 disables
            these requests.
    """

    def __init__(self, save_every_s: float = 0.0) -> None:
        self.save_every_s = save_every_s
        self.since = time.monotonic()
        """When the last save began, whether or not it succeeded; before the first save, when the timer was started."""
        self.is_stop_requested = False
        """True once this rank has received a signal that asks the run to save and stop."""
        self.save = False
        """Agreed by all ranks: save after this step. A run that stops also saves."""
        self.stop = False
        """Agreed by all ranks: stop after this step."""
        self._first_interrupt: float | None = None
        """Time of the first Ctrl-C; None if there was none."""

    def listen(self) -> None:
        """Start handling signals, which from now on do not end the process. Start the timer of periodic saves."""
        self.since = time.monotonic()
        for number in SIGNALS:
            # A shell starts the background jobs of a script with SIGINT ignored. Keep it ignored.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    @property
    def is_save_due(self) -> bool:
        """Whether a periodic save is due by this rank's clock."""
        return 0 < self.save_every_s <= time.monotonic() - self.since

    def _handle(self, number: int, frame: Any) -> None:
        self.is_stop_requested = True
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            # Not print(), because the handler may run inside another print(). Writing fails
            # if the same Ctrl-C has ended a `tee` that reads our output.
            with suppress(OSError):
                os.write(2, _ANSWER if os.environ.get("RANK", "0") == "0" else b"")
        elif now - self._first_interrupt > ONE_INTERRUPT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
