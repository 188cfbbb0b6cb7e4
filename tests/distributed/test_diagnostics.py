"""Files that a hanging rank writes for diagnosis: its stacks, and NCCL's flight record."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from disco_ds.distributed import comm, heartbeat
from helpers.dist import run_ranks

dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_file", None)


def test_stacks_name_every_thread(tmp_path):
    run_ranks(write_stacks, 1, tmp_path / "hangs")
    assert "in write_stacks" in (tmp_path / "hangs" / "stacks_rank_3.txt").read_text()
    assert not list(tmp_path.glob("hangs/nccl_trace*"))  # gloo has no flight record


def write_stacks(folder: Path) -> None:
    heartbeat.write_diagnostics(folder, 3)


def test_folder_that_cannot_be_written_is_no_reason_to_stay(tmp_path):
    (tmp_path / "file").touch()
    run_ranks(write_stacks, 1, tmp_path / "file" / "hangs")


def test_process_ends_while_python_is_blocked():
    blocked = "import ctypes; from disco_ds.distributed.heartbeat import end_process_after as end; end(1); "
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", blocked + "ctypes.PyDLL(None).sleep(600)"], capture_output=True
    )
    assert done.returncode == 1
    assert b"Timeout (0:00:01)!" in done.stderr
    assert time.monotonic() - start < 300


def test_users_own_settings_of_the_recorder_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/own/file_")
    heartbeat.dump_records_to(tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "/own/file_"


@pytest.mark.skipif(dump is None, reason="this torch can write only NCCL's flight record")
def test_torch_asks_for_the_name_of_its_file_when_it_writes(tmp_path):
    """The run folder is set after process groups exist, but torch must use it. gloo's record stands for NCCL's."""
    run_ranks(write_record, 2, tmp_path)
    for rank in range(2):
        record = pickle.loads((tmp_path / f"{heartbeat.TRACE}{rank}").read_bytes())
        assert any("all_reduce" in entry["profiling_name"] for entry in record["entries"])


def write_record(folder: Path) -> None:
    comm.all_reduce_sum(torch.ones(2))
    heartbeat.dump_records_to(folder)
    dump(comm.rank())


def test_record_of_nccl_can_be_read_without_a_group():
    """The private function of torch that returns the flight record must exist and work."""
    assert "entries" in pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())
