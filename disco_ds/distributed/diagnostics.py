"""Diagnostics that a rank writes before the heartbeat ends its process: thread stacks and NCCL's flight record.

torch's flight recorder keeps the last NCCL collectives of every group. torch's tool `torchfrtrace`
compares the records of all ranks and names the first collective in which they differ.

Nothing here may keep the process from ending. A timer in C ends it after LIMIT_S, even if a call into
CUDA blocks all Python threads.
"""

from __future__ import annotations

import faulthandler
import os
from contextlib import suppress
from pathlib import Path

from deepspeed.accelerator import get_accelerator

FOLDER = "diagnostics"
"""Name of the diagnostics folder inside the run folder."""
STACKS = "stacks_rank_{}.txt"
"""Name of the file with the stacks of a rank's Python threads."""
TRACE = "nccl_trace_rank_"
"""Prefix of a file name that ends with the rank, as torchfrtrace expects."""
LIMIT_S = 20.0
"""Maximum time for writing the diagnostics."""
STDERR = 2


def record_collectives() -> None:
    """Turn on NCCL's flight recorder, and let it write its record when a collective times out.

    Call this before init_process_group. Environment variables that the user has set are kept.
    """
    if _uses_nccl():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def dump_records_to(folder: Path) -> None:
    """Make torch write NCCL's flight record to this folder after a timeout, unless the user has set a path.

    torch reads the environment variable only when it first writes a record, so this works even after
    init_process_group. torch appends the rank to the path.
    """
    if _uses_nccl():
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((folder / TRACE).absolute()))


def write_diagnostics(folder: Path | None, rank: int) -> None:
    """Write this rank's diagnostics. The caller then ends the process; if writing hangs, a timer ends it after LIMIT_S.

    Args:
        folder: The folder to write into. None writes only stacks, to stderr.
        rank: This rank.
    """
    end_process_after(LIMIT_S)
    if folder is None:
        faulthandler.dump_traceback(file=STDERR)
        return
    with suppress(Exception):  # the caller must end the process in any case
        folder.mkdir(exist_ok=True)
        with (folder / STACKS.format(rank)).open("w") as file:
            faulthandler.dump_traceback(file=file)
        if _uses_nccl():
            # This function exists only in builds of torch with NCCL.
            from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

            (folder / f"{TRACE}{rank}").write_bytes(_dump_nccl_trace())


def end_process_after(seconds: float) -> None:
    """End this process after this time, with exit code 1 and all stacks on stderr. A new call restarts the timer.

    The timer runs in C: torch.cuda.Event.query and the dump of NCCL's flight record hold the GIL,
    so if one of these calls blocks in the driver, no Python thread can run.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def cancel_end() -> None:
    """Stop the timer of `end_process_after`."""
    faulthandler.cancel_dump_traceback_later()


def _uses_nccl() -> bool:
    return bool(get_accelerator().communication_backend_name() == "nccl")
