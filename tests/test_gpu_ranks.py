"""Tests that need several ranks, which may share one GPU (`make test-gpu RANKS=2`, or 4). REHEARSE=1 uses the CPU.

They check every loss, a step at every stage, its communication, engines of custom loops, a run that loses a rank,
checkpoints that another number of ranks reads, and examples. On a GPU, the ranks communicate over NCCL, in a rehearsal
over gloo.
"""

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.distributed import comm
from disco_ds.distributed.deepspeed_quirks import disable_custom_ops
from disco_ds.losses import list_losses
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.cluster import marked
from helpers.custom_loop import contrastive_errors
from helpers.dist import free_port, run_ranks
from helpers.fastclip_oracle import PRESETS
from helpers.launched import FP32, alone, log_of, records, wait_for
from helpers.loss_errors import loss_cases, loss_errors
from helpers.machine import DEVICE, HAS_FP16
from helpers.one_step import COUNTS, step_errors
from helpers.paths import ROOT
from helpers.precisions import REFUSED
from helpers.tiny_run import recipe
from helpers.towers import (
    write_tiny,
)
from helpers.traffic import loss_traffic, step_traffic

pytestmark = pytest.mark.gpu
ON_GPU = DEVICE == "cuda"
N = int(os.environ.get("DISCO_DS_TEST_RANKS", "2"))
"""Number of ranks."""
METHOD = "spawn" if ON_GPU else "forkserver"
if ON_GPU and torch.cuda.device_count() < 2 * N:
    # docs/gpu.md explains these variables.
    os.environ |= {comm.SHARE_GPUS: "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    os.environ |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL,Simple"}


def on_ranks(function: Any, *args: Any, ranks: int = N, **options: Any) -> list[Any]:
    return run_ranks(function, ranks, *args, method=METHOD, **{"timeout_s": 140} | options)


# Losses


@pytest.mark.timeout(150)
def test_losses_equal_float64_references() -> None:
    assert {name for name, *_ in loss_cases()} | set(PRESETS) == set(list_losses())
    for found in on_ranks(loss_errors):
        lines = [f"{case}: error {x:.1e}, limit {limit:.1e}" for case, (x, limit) in found.items()]
        wrong = [f"{case}: {x}" for case, (x, limit) in found.items() if not x <= limit]
        assert not wrong, "\n".join(wrong)
    print("\n".join(lines))


# One step

ZERO = "deepspeed__zero_optimization__"
BUCKETS = {f"{ZERO}reduce_bucket_size": 3000}
OVERLAP = BUCKETS | {f"{ZERO}overlap_comm": True}


def all_step_errors(model: str, groups: list[Any]) -> list[Any]:
    return [(changes, step_errors(model, cases, **changes)) for cases, changes in groups]


@pytest.mark.timeout(240)
def test_step_is_that_of_one_graph_in_float64(tmp_path: Path) -> None:
    """The allowed error is that of one rank (tests/test_gpu.py). Texts are packed wherever the device supports it."""
    cases = [
        (precision, stage, count, "disco")
        for stage, count, precision in itertools.product(
            range(4), COUNTS, ("fp32", "autocast", "fp16")
        )
        if (precision, stage) not in REFUSED and (precision != "fp16" or HAS_FP16)
    ]
    overlap = [("autocast", stage, count, "disco_fused") for stage in (1, 2, 3) for count in COUNTS]
    skipped = [("fp16", stage, 3, "disco") for stage in (1, 2, 3) if HAS_FP16]
    groups: list[Any] = [
        (cases, {}),
        ([("autocast", 1, 3, "inf_cl"), ("autocast", 2, 1, "siglip")], {}),
    ]
    groups += [(overlap, OVERLAP), ([("autocast", 0, 1, "disco")], BUCKETS)]
    groups += [(skipped, {"deepspeed__fp16__initial_scale_power": 28})]
    if ON_GPU:
        groups += [([("autocast", 1, 3, "disco_fused")], {"model__compile": True})]
    for found in on_ranks(all_step_errors, write_tiny(tmp_path), groups, timeout_s=190):
        lines = []
        for changes, errors in found:
            for case, x in errors.items():
                lines.append(f"{case} {changes}: {x}")
                assert x["error"] <= x["limit"], lines[-1]
                assert x["skipped"] > 0 or "deepspeed__fp16__initial_scale_power" not in changes
    print("\n".join(lines))


# Communication of a step


@pytest.mark.timeout(150)
def test_received_bytes_are_the_planned_ones(tmp_path: Path) -> None:
    for case, got, exact, planned in on_ranks(loss_traffic, 24)[0]:
        print(f"{case}: {got:,.0f} bytes, planned {planned:,}")
        assert got == exact, case
    for case, got, planned in on_ranks(step_traffic, write_tiny(tmp_path))[0]:
        # ZeRO pads each group of parameters, and rounds to whole elements per rank.
        assert abs(got - planned) <= 64 * N, f"{case}: {got:,.0f} bytes, planned {planned:,}"


# Custom loops


@pytest.mark.timeout(150)
def test_contrastive_step_is_exact_under_every_engine() -> None:
    for found in on_ranks(contrastive_errors):
        assert max(found.values()) <= 1e-5, found
    print(found)


# Whole runs

SAME = ("step", "ids", "lr")


def write_run(folder: Path, micro_batch: int, **changes: Any) -> Path:
    data = {"shards": "bundled:emoji/unseen", "image_key": "png", "workers": 1, "slots": 8}
    given = {"global_batch": 16, "micro_batch": micro_batch, "data": data, "lost_after_s": 10}
    return recipe(folder, **given, deepspeed={"base": "zero1", **FP32}, **changes)


def train_run(path: Path, resume: str | None, *overrides: str) -> None:
    with ExitStack() as stack:
        train(build(load_config(path, overrides), resume, stack))


def compare_runs(run: Path, whole: Path, tolerance: float) -> None:
    got, true = ([x for x in records(each) if "ids" in x] for each in (run, whole))
    assert [[x[key] for key in SAME] for x in got] == [[x[key] for key in SAME] for x in true]
    losses = [x["loss"] for x in true]
    assert [x["loss"] for x in got] == pytest.approx(losses, rel=tolerance)
    print(max(abs(x["loss"] / y - 1) for x, y in zip(got, losses, strict=True)))


@contextlib.contextmanager
def launched(arguments: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `disco-ds launch --restarts 1`. Yield it, and the name of a variable that all of its processes have."""
    marker, front = (
        f"DISCO_TEST_{free_port()}",
        f"--num_accelerators {N} --master_port {free_port()}",
    )
    command = [sys.executable, "-m", "disco_ds", "launch", "--deepspeed", front, "--restarts", "1"]
    environment = alone() | {"DS_ACCELERATOR": os.environ["DS_ACCELERATOR"], marker: "1"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip
    try:
        yield process, marker
    finally:
        for left in marked(marker):
            left.kill()
        process.wait()


def is_rank_1(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("LOCAL_RANK") == "1" and "disco_ds.train" in process.cmdline()
    return False


@pytest.mark.timeout(600)
def test_killed_rank_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    path = write_run(tmp_path, 4, steps=20, checkpoint={"every_steps": 5, "keep_last": 9})
    on_ranks(train_run, path, None, "name=whole")
    cut, whole = (tmp_path / "runs" / name for name in ("cut", "whole"))
    with launched(["--config", str(path), "name=cut"], tmp_path) as (process, marker):
        newest = cut / "checkpoints" / "step-00000005"
        wait_for(newest.exists, "step 5", tmp_path, 240, poll_s=0.005)
        next(each for each in marked(marker) if is_rank_1(each)).kill()
        assert process.wait(timeout=240) == 0, log_of(tmp_path)[-3000:]
    log = log_of(tmp_path)
    assert re.search(r"launch: restart 1 of 1, from \S*runs/cut, step-000000", log), log
    assert re.search(r"rank 0 stops: rank 1 on ", log), log
    compare_runs(cut, whole, 2e-2 if ON_GPU else 0)


def evaluate(run: Path, out: Path) -> int:
    return main(["eval", str(run), "eval.labeled.unseen=bundled:emoji/unseen", "--json", str(out)])


@pytest.mark.timeout(360)
def test_other_numbers_of_ranks_resume_export_and_evaluate(tmp_path: Path) -> None:
    path = write_run(tmp_path, 2)
    constant = "optim.schedule=constant"  # another schedule would depend on `steps`
    on_ranks(train_run, path, None, "name=whole", constant, "steps=6")
    cut, whole = (tmp_path / "runs" / name for name in ("cut", "whole"))
    for ranks, steps, resume in ((N, 2, None), (2 * N, 4, "latest"), (1, 6, "latest")):
        overrides = "name=cut", constant, f"steps={steps}"
        on_ranks(train_run, path, resume, *overrides, ranks=ranks)
    compare_runs(cut, whole, 2e-2 if ON_GPU else 1e-4)
    assert main(["export", str(cut), "--to", str(tmp_path / "export")]) == 0
    assert (tmp_path / "export" / "open_clip_model.safetensors").exists()
    assert on_ranks(evaluate, cut, tmp_path / "many.json", joined=False) == [0] * N
    assert on_ranks(evaluate, cut, tmp_path / "one.json", ranks=1, joined=False) == [0]
    many, one = (json.loads((tmp_path / name).read_text()) for name in ("many.json", "one.json"))
    assert [x["name"] for x in many["sets"]] == [x["name"] for x in one["sets"]] == ["unseen"]
    assert ON_GPU or many["sets"] == one["sets"]


# The examples


def run_example(name: str, arguments: list[str]) -> str:
    if os.environ.get(comm.SHARE_GPUS) == "1":
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    disable_custom_ops()  # otherwise DeepSpeed would compile collectives for CPUs
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["open_clip_loop.py", "fsdp_clip.py", "deepspeed_bi_encoder.py"])
def test_example_learns(name: str) -> None:
    said = on_ranks(run_example, name, ["--steps=8", "--batch=16"], joined=False)[0]
    print(said)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", said)[0])
    assert last < first
