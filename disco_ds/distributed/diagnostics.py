"""Files that a rank leaves for debugging before the heartbeat ends it: thread stacks and NCCL's
flight record.

torch's flight recorder keeps the last NCCL collectives of every group. `torchfrtrace` compares the
records of all ranks and names the first collective in which they differ.

Nothing here may keep the process from ending: the files are written in a thread, for at most
LIMIT_S, and a timer in C ends the process if a call into CUDA blocks all of Python.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from deepspeed.accelerator import get_accelerator

FOLDER = "diagnostics"
"""Name of the folder in the run folder."""
STACKS = "stacks_rank_{}.txt"
TRACE = "nccl_trace_rank_"
"""Prefix of a file name that ends with the rank, as torchfrtrace expects."""
LIMIT_S = 20.0
STDERR = 2


def record_collectives() -> None:
    """Turn on NCCL's flight recorder, and its dump at a timeout. Call this before init_process_group.

    These are the defaults of newer torch versions. Variables that the user has set are kept.
    """
    if _uses_nccl():
        set_unless_given("2000", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
        set_unless_given("1", "TORCH_NCCL_DUMP_ON_TIMEOUT")


def collect_in(run_folder: Path) -> Path:
    """Let torch dump NCCL's flight record into the run folder at a timeout.

    Returns:
        The folder for `write_diagnostics`.
    """
    folder = run_folder / FOLDER
    if _uses_nccl():
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
        name_dump_file(folder)
    return folder


def name_dump_file(folder: Path) -> None:
    """Set where torch dumps flight records. torch reads the name at its first dump and adds the rank."""
    prefix = str((folder / TRACE).absolute())
    set_unless_given(prefix, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_diagnostics(folder: Path | None, rank: int) -> None:
    """Write the files of this rank within LIMIT_S. Without a folder the stacks go to stderr."""
    end_process_after(LIMIT_S + 5)
    writer = threading.Thread(target=_write, args=(folder, rank), daemon=True)
    writer.start()
    writer.join(LIMIT_S)


def end_process_after(seconds: float) -> None:
    """End this process with exit code 1 and all stacks on stderr, unless this is called again earlier.

    The timer runs in C: torch.cuda.Event.query and the dump of NCCL's flight record hold the GIL,
    so a call that blocks in the driver stops every Python thread.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def cancel_end() -> None:
    """Stop the timer of `end_process_after`."""
    faulthandler.cancel_dump_traceback_later()


def set_unless_given(value: str, *names: str) -> None:
    """Set the environment variable names[0], unless it or one of its older names is set."""
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = value


def _uses_nccl() -> bool:
    return bool(get_accelerator().communication_backend_name() == "nccl")


def _write(folder: Path | None, rank: int) -> None:
    if folder is None:
        faulthandler.dump_traceback(file=STDERR)
        return
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        # Through a local file: faulthandler holds the GIL while it writes, and the run folder's
        # file system may hang.
        with tempfile.TemporaryFile() as local:
            faulthandler.dump_traceback(file=local)
            local.seek(0)
            (folder / STACKS.format(rank)).write_bytes(local.read())
        if _uses_nccl():
            from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]  # in NCCL builds

            (folder / f"{TRACE}{rank}").write_bytes(_dump_nccl_trace())
