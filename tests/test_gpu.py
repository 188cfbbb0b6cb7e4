"""Tests that need one GPU (`make test-gpu`). REHEARSE=1 runs them on the CPU.

They check the kernels, a step at every stage and precision, that the demo learns, a run that is killed and resumed, and
the doctor. Each test runs in a separate process with a timeout.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from disco_ds.checkpoints.weights import read_weights
from disco_ds.distributed import comm
from disco_ds.runs.run_folder import FINISHED
from helpers.dist import run_ranks
from helpers.launched import alone, members, records, run_program, wait_for, write_recipe
from helpers.machine import DEVICE, HAS_FP16
from helpers.one_step import COUNTS, ROUNDINGS, UNIT, one_graph, one_step, settings, step_errors
from helpers.precisions import REFUSED
from helpers.towers import batches, distance, write_tiny

pytestmark = pytest.mark.gpu
ON_GPU = DEVICE == "cuda"


def jobs() -> int:
    """Return how many slices of tools/check/kernels.py may run at once. Each needs up to 10 GB."""
    return (
        max(1, min(6, torch.cuda.get_device_properties(0).total_memory // (12 * 10**9)))
        if ON_GPU
        else 2
    )


@pytest.mark.timeout(300)
def test_kernels_are_right(tmp_path: Path) -> None:
    """Run the first slices of tools/check/kernels.py: the configurations used without autotuning, and whole losses.

    `python -m tools.check.kernels` also runs every configuration that the autotuner may choose.
    """
    out = tmp_path / "results.jsonl"
    names = (
        ["default *", "losses auto", "float64", "far"]
        if ON_GPU
        else ["default bf16", "losses auto", "far"]
    )
    command = ["-m", "tools.check.kernels", "--only", *names, "--jobs", str(jobs())]
    command += ["--budget", "270", "--out", str(out)]
    said = run_program(command if ON_GPU else [*command, "--rehearse"], 290, tmp_path)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    ended = {x["slice"] for x in results if x.get("end") == "done"}
    assert ended >= (
        {f"default {p}" for p in ("fp16", "bf16", "tf32")} if ON_GPU else {"default bf16"}
    ), said
    assert sum("ok" in x for x in results) > 10, said


# One step


@pytest.mark.timeout(150)
def test_step_is_that_of_one_graph_in_float64(tmp_path: Path) -> None:
    """Compare steps of every stage and precision with one graph of the whole batch in float64 on the CPU.

    The allowed error is twice that of the same precision and device without an engine, but not more than the sum of the
    roundings on the longest path through the towers. A missing or doubled term would cause a far larger error.
    """
    cases = [
        (precision, stage, count, "disco")
        for precision, stage, count in itertools.product(
            ("fp32", "autocast", "bf16", "fp16"), range(4), COUNTS
        )
        if (precision, stage) not in REFUSED and (precision != "fp16" or HAS_FP16)
    ]
    cases += [
        ("autocast", 1, count, loss)
        for count, loss in itertools.product(COUNTS, ("disco_fused", "siglip"))
    ]
    (found,) = run_ranks(step_errors, 1, write_tiny(tmp_path), cases, timeout_s=140, method="spawn")
    lines = [
        " ".join(map(str, case)) + "".join(f"  {k} {v:.1e}" for k, v in x.items())
        for case, x in found.items()
    ]
    print("\n".join(lines))
    assert not [
        line for line, x in zip(lines, found.values(), strict=True) if not x["error"] <= x["limit"]
    ], lines


def replay_errors(model: str) -> list[tuple[float, float]]:
    """Compare a step with dropout with a graph that has the same random numbers, and with one that has others."""
    device, found = comm.local_device(), []
    for stage in (1, 3):
        config = settings(model, "fp32", stage, 3, "disco")
        chunks = batches(3, config.micro_batch)
        got, states, _ = one_step(config, chunks, dropout=0.3)
        same, other = (
            one_graph(config, chunks, device, "fp32", dropout=0.3, states=each)
            for each in (states, states[::-1])
        )
        found.append((distance(got, same), distance(got, other)))
    return found


@pytest.mark.timeout(100)
def test_random_draws_are_replayed(tmp_path: Path) -> None:
    """Dropout draws from the generator of the device, which must be restored before a forward is repeated."""
    (found,) = run_ranks(
        replay_errors, 1, write_tiny(tmp_path, patch_dropout=0.5), timeout_s=90, method="spawn"
    )
    limit = ROUNDINGS * UNIT["tf32"] if ON_GPU else 1e-5
    assert all(same <= limit < 0.2 < other for same, other in found), (found, limit)


# Whole runs


@pytest.mark.timeout(200)
def test_demo_learns(tmp_path: Path) -> None:
    """Train on an eighth of the quickstart's samples, in a rehearsal on a twentieth.

    On a CPU, an eighth gives accuracies of 4% on the set `validation` and 7% on the set `unseen`.
    """
    samples, times_chance = (20_000, (20, 5)) if ON_GPU else (8_000, (2, 2))
    run_program(
        ["-m", "tools.make.demo", f"samples={samples}", f"runs={tmp_path / 'runs'}"], 190, tmp_path
    )
    folder = tmp_path / "runs" / "quickstart"
    found = json.loads((folder / FINISHED).read_text())
    print(found)
    for name, times in zip(("validation", "unseen"), times_chance, strict=True):
        assert found[f"eval/{name}_top1"] > times * found[f"eval/{name}_chance"], found
    assert (folder / "export" / "open_clip_model.safetensors").exists()


def change(later: dict[str, Tensor], earlier: dict[str, Tensor]) -> float:
    """Return the norm of all changes of the weights."""
    return (
        sum((later[name].double() - earlier[name].double()).square().sum().item() for name in later)
        ** 0.5
    )


@pytest.mark.timeout(250)
def test_killed_and_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = str(folder / write_recipe(folder, {"base": "zero1"})[1])
    train = [
        "-m",
        "disco_ds",
        "train",
        "--config",
        recipe,
        f"runs={tmp_path}",
        "steps=24",
        "checkpoint.keep_last=9",
        "model.compile=false",  # compiling in three processes would take too long
    ]
    run_program([*train, "name=whole"], 80, tmp_path)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    environment = alone() | {"DS_ACCELERATOR": os.environ["DS_ACCELERATOR"]}
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *train, "name=cut"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(
                lambda: any(x["step"] >= 10 for x in records(cut)),
                "step 10",
                tmp_path,
                80,
                poll_s=0.01,
            )
        finally:
            for member in members(process.pid):
                member.send_signal(signal.SIGKILL)
            process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (cut / FINISHED).exists()
    done = max(x["step"] for x in records(cut))
    assert 10 <= done < 24
    time.sleep(0.5)  # the kernel releases the lock and the device memory of the dead process
    said = run_program([*train, "name=cut", "--resume", "latest"], 80, tmp_path)
    mine, other = ([x for x in records(path) if "ids" in x] for path in (cut, whole))
    assert [(x["step"], x["ids"]) for x in mine] == [(x["step"], x["ids"]) for x in other], said
    assert len(mine) == 24
    for a, b in zip(mine, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2 if ON_GPU else 0), (
            a["step"],
            a["loss"],
            b["loss"],
        )
    start, end, resumed = (
        read_weights(path / "checkpoints" / f"step-{step:08d}").tensors
        for path, step in ((whole, 3), (whole, 24), (cut, 24))
    )
    # On a GPU, the order of additions varies. A run that had lost its moments or a step would differ far more.
    assert change(resumed, end) <= (0.05 if ON_GPU else 0.0) * change(end, start)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "changes", [[], ["loss.name=disco_fused", "deepspeed=zero1", "micro_batch=32"]]
)
def test_doctor_finds_nothing_wrong(changes: list[str], tmp_path: Path) -> None:
    said = run_program(
        ["-m", "disco_ds", "doctor", "--config", "quickstart", *changes, "--gradients"],
        110,
        tmp_path,
    )
    print(said)
    assert any(line.split()[:2] == ["ok", "gradients"] for line in said.splitlines()), said
