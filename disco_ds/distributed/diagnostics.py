"""Diagnostics that a rank writes before the heartbeat ends it: the stacks of its threads, and NCCL's flight record.

Nothing here may keep the process from ending: the files are written in a thread that is waited for no longer than
LIMIT_S, and a timer in C ends the process if a call into CUDA blocks all of Python.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from disco_ds.distributed import flight_recorder

FOLDER = "diagnostics"
"""Name of the folder in the run folder."""
STACKS = "stacks_rank_{}.txt"
TRACE = "nccl_trace_rank_"
"""Prefix of a file name that ends with the rank, as in torch's own dumps, for torchfrtrace."""
LIMIT_S = 20.0
STDERR = 2


def collect_in(run_folder: Path) -> Path:
    """Make torch write its dumps of NCCL at a timeout into the run folder. Returns: the folder for `leave`."""
    folder = run_folder / FOLDER
    if flight_recorder.is_there():
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
        flight_recorder.send_to(folder / TRACE)
    return folder


def leave(folder: Path | None, rank: int) -> None:
    """Write the diagnostics within LIMIT_S. Without a folder the stacks go to stderr."""
    end_process_after(LIMIT_S + 5)
    writer = threading.Thread(target=_write, args=(folder, rank), daemon=True)
    writer.start()
    writer.join(LIMIT_S)


def end_process_after(seconds: float) -> None:
    """End this process with exit code 1 and all stacks on stderr, unless called again before. Works in C.

    torch.cuda.Event.query and the dump of NCCL's flight record hold Python's global lock, so a call that blocks in the
    driver stops every Python thread.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def cancel_end() -> None:
    faulthandler.cancel_dump_traceback_later()


def _write(folder: Path | None, rank: int) -> None:
    if folder is None:
        faulthandler.dump_traceback(file=STDERR)
        return
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        # Through a local file: faulthandler holds the global lock while it writes, and the run folder's disk may hang.
        with tempfile.TemporaryFile() as local:
            faulthandler.dump_traceback(file=local)
            local.seek(0)
            (folder / STACKS.format(rank)).write_bytes(local.read())
        if record := flight_recorder.read():
            (folder / f"{TRACE}{rank}").write_bytes(record)
