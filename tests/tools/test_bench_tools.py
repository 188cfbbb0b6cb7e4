"""tools/bench/gpu.py and tools/check/kernels.py at tiny shapes on a CPU, and the slices into which they divide work.

All kinds of slices run. A slice that fails does not affect the others. An interrupted tool resumes.
"""

import multiprocessing
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from disco_ds.losses import Embeddings, build_loss
from helpers.dist import run_ranks, start_server
from helpers.paths import ROOT
from tools.bench import gpu as bench_gpu
from tools.bench import loss as bench_loss
from tools.bench import peers, slices, train_rates
from tools.check import kernels as check_kernels
from tools.check import losses as loss_checks

PROGRAM = """
    import argparse, os, sys, time
    sys.path.insert(0, {root!r})
    from tools.bench import slices
    from tools.bench.slices import Slice

    def work(name, record):
        record(started=True)
        if name == "crash":
            print("last words", file=sys.stderr)
            os._exit(9)
        if name == "hang":
            time.sleep(60)
        for number in range(3):
            with slices.case(record, number=number):
                if name == "raise" and number == 1:
                    raise ValueError("first\\nmiddle\\nlast")
                record(number=number)

    slices.surroundings = lambda: {{"device": "none"}}
    args = slices.parse(argparse.ArgumentParser(), sys.argv[1:], "runs")
    if args.slice:
        sys.exit(slices.run_here(args, lambda record: work(args.slice, record)))
    names = {{"good": 30, "crash": 30, "hang": 0.4, "raise": 30, "long": 1000}}
    todo = [Slice(name, seconds) for name, seconds in names.items()]
    outcomes, left = slices.run(todo, args, 1, lambda name, outcome: f"{{name}} {{outcome.end}}")
    print("left", left, *outcomes)
"""


def run_program(folder: Path, *options: str) -> list[str]:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(root=str(ROOT))))
    command = [sys.executable, str(program), "--out", str(folder / "x.jsonl"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()


def test_slices_fail_alone_and_are_resumed(tmp_path):
    lines = run_program(tmp_path, "--budget", "200")
    lines[2] = re.sub(r"\d+ s$", "a while", lines[2])
    assert lines == [
        "good done", "crash exit code 9: last words", "hang ended after a while", "raise done",
        "left 1 good crash hang raise",
    ]  # fmt: skip
    results = slices.Results(tmp_path / "x.jsonl")
    found = results.read()
    assert found["good"].where == {"device": "none"}
    assert [x["number"] for x in found["good"].records[1:]] == [0, 1, 2]
    # A case that raises is recorded, and the next one runs.
    assert found["raise"].records[2] == {"number": 1, "problem": "ValueError: first ... last"}
    assert found["raise"].records[3] == {"number": 2}
    assert found["crash"].records == [{"started": True}]
    assert found["hang"].records in (
        [],
        [{"started": True}],
    )  # its time may be over before it starts
    assert "last words" in (tmp_path / "x.log").read_text()
    # Slices that have ended are skipped. "good" is repeated, as if its process had been killed.
    kept = [
        x for x in results.path.read_text().splitlines() if '"good"' not in x or '"end"' not in x
    ]
    results.path.write_text("\n".join(kept) + '\n{"slice": "go')
    results.path.write_text(results.path.read_text() + "\n")
    assert run_program(tmp_path, "--budget", "200") == ["good done", "left 1 good crash hang raise"]
    assert len(results.read()["good"].records) == 4
    assert run_program(tmp_path, "--only", "ra*", "--again") == ["raise done", "left 0 raise"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_program(tmp_path, "--only", "none")
    assert "no slice matches none; there are: good, crash, hang, raise, long" in caught.value.stderr


def fail(*_: Any) -> Tensor:
    raise RuntimeError("no such kernel")


def absent(_: float) -> Any:
    raise ImportError("No module named 'absent'")


def bench(names: list[str], path: Path) -> None:
    """Run these slices in this process. The tool itself runs each slice in a separate one."""
    torch.set_num_threads(1)
    results = slices.Results(path)
    broken = {"broken": peers.Peer(lambda _: fail, 5, 5), "absent": peers.Peer(absent, 5, None)}
    with mock.patch.dict(peers.SOFTMAX, broken):
        for name in names:
            results.add(name, where=slices.surroundings())
            bench_gpu.measure(name, True, lambda name=name, **fields: results.add(name, **fields))
            results.add(name, end="done", seconds=1.0)


def test_bench_gpu_runs_every_loss_and_prints_what_has_figures(tmp_path):
    path = tmp_path / "x.jsonl"
    names = [x.name for x in bench_gpu.list_slices() if x.name.split(": ")[0] in bench_gpu.SHAPES]
    names = [name for name in names if "compiled" not in name]
    alone = [x for x in names if bench_gpu.SHAPES[x.split(": ")[0]].ranks == 1]
    bench([*alone, "one: broken", "one: absent"], path)
    start_server()
    # Use another process, because a simulated process group cannot be destroyed.
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        pool.submit(bench, [*(x for x in names if x not in alone), "share: broken"], path).result()
    outcomes = slices.Results(path).read()
    text = "\n".join(bench_gpu.tables(outcomes, "python -m tools.bench.gpu"))
    assert text.startswith("`python -m tools.bench.gpu`: CPU, ")
    assert f"torch {version('torch')}" in text
    for name in names:
        key, label = name.split(": ")
        if label in bench_gpu.OURS[bench_gpu.SHAPES[key].kind]:
            assert not bench_gpu.failed(name, outcomes[name]), outcomes[name].records
            found = outcomes[name].records[0]
            assert found["ms"] > 0
            errors = [value for what, value in found.items() if what.startswith("error")]
            assert len(errors) == (2 if bench_gpu.SHAPES[key].ranks == 1 else 0)
            assert all(value < 1e-2 for value in errors), name
    assert "error 14" in outcomes["one: open_clip amp_bf16"].records[0]
    one, share = (
        text.index("### B 32,768 on one GPU, D 512"),
        text.index("### the share of B 196,608"),
    )
    assert text.count("| `disco_fused` |", one, share) == 1
    assert "broken: RuntimeError: no such kernel" in text[one:share]
    assert "absent: No module named 'absent'" in text[one:share]
    assert "absent" not in text[share:]
    # A loss of other authors may fail, but ours may not.
    assert not bench_gpu.failed("one: broken", outcomes["one: broken"])
    assert bench_gpu.failed("one: disco_fused", outcomes["one: broken"])


def train_slices(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of training slices, run on this rank."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name, records in found.items():
        train_rates.measure(name, True, lambda records=records, **fields: records.append(fields))
    return found


ALL = [x.name for x in (*train_rates.our_slices(), *train_rates.other_slices())]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bench_gpu_measures_training_and_prints_it():
    (found,) = run_ranks(train_slices, 1, ALL, timeout_s=1700)
    outcomes = {name: slices.Outcome({}, records, "done", 1.0) for name, records in found.items()}
    outcomes["step: ViT-B-16, open_clip"] = slices.Outcome(
        {}, [{"missing": "No module named 'absent'"}], "done", 1.0
    )
    outcomes["data: ViT-L-14"] = slices.Outcome(
        {}, [{"problem": "OutOfMemoryError: no room"}], "done", 1.0
    )
    for name, records in found.items():
        if name in ("step: ViT-B-16, open_clip", "data: ViT-L-14"):
            continue
        assert len(records) == 1, name
        assert "problem" not in records[0], records
        assert not bench_gpu.failed(name, outcomes[name])
        assert all(
            value > 0
            for key, value in records[0].items()
            if key in ("ms", "mfu", "ratio", "samples_per_s")
        )
    assert not bench_gpu.failed("step: ViT-B-16, open_clip", outcomes["step: ViT-B-16, open_clip"])
    assert bench_gpu.failed("data: ViT-L-14", outcomes["data: ViT-L-14"])
    text = "\n".join(bench_gpu.tables(outcomes, "python -m tools.bench.gpu"))
    assert "| ViT-B-32 | disco_ds mean19 | 8 |" in text
    assert "| ViT-B-32 | open_clip | 8 |" in text
    assert "| ViT-L-14 | 2 x 8 |" in text
    assert "### First step with empty caches" in text
    assert "| ViT-B-32, 8 x 1024, zero1, pixels on the host |" in text
    assert "Left out of step: ViT-B-16, open_clip: No module named 'absent'." in text
    assert "Left out of data: ViT-L-14: OutOfMemoryError: no room." in text


def test_bench_gpu_begins_with_what_matters_most():
    names = [x.name for x in bench_gpu.list_slices()]
    assert len(set(names)) == len(names)
    order = (
        *train_rates.FIRST,
        "step: ViT-L-14, full",
        "one: disco_fused",
        "one: Inf-CL 1.2.1",
    )
    seconds = {x.name: x.seconds for x in bench_gpu.list_slices()}
    assert sum(seconds[name] for name in train_rates.FIRST) < 540
    assert sorted(order, key=names.index) == list(order)
    assert set(ALL) < set(names)


WORLD = 3


def leaves() -> list[Tensor]:
    return [x.detach().double() for x in bench_loss.make_leaves(5, 8, 14.3, 0)]


def pretended() -> list[float]:
    """Run the losses that send features around a ring, on simulated ranks whose features are copies."""
    bench_loss.pretend(WORLD)
    return [build_loss(name)(Embeddings(*leaves())).loss.item() for name in ("inf_cl", "siglip")]


def test_pretended_world_is_one_of_copies():
    start_server()
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        found = pool.submit(pretended).result()
    image, text, *rest = leaves()
    copies = Embeddings(image.repeat(WORLD, 1), text.repeat(WORLD, 1), *rest)
    assert found == pytest.approx(
        [build_loss(name)(copies).loss.item() for name in ("clip", "siglip")], rel=1e-12
    )


def interpreted() -> dict[str, list[dict[str, Any]]]:
    """Return the records of slices of tools/check/kernels.py by name. In "raises" and "wrong", a kernel is broken."""
    from disco_ds.losses.kernels import triton_tiles

    loss_checks.CASES = (("typical", 14.3), ("outlier", 100.0))
    some = (
        "disco_fused, comm_dtype bf16",
        "inf_cl",
        "siglip, without accuracies",
        "nt_xent, ring",
        "fastclip_v3",
        "isogclr",
    )
    loss_checks.LOSSES = {label: loss_checks.LOSSES[label] for label in some}
    found: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, as_name: str | None = None) -> None:
        do = next(
            do for x, do in check_kernels.work(check_kernels.REHEARSAL).items() if x.name == name
        )
        records = found.setdefault(as_name or name, [])
        do(lambda **fields: records.append(fields))

    for name in (
        "losses auto",
        "float64",
        "far",
        "forced fp16 64x128 w4 s4",
        "default bf16",
    ):
        run(name)

    def wrong(tile: Any, *given: Any) -> Tensor:
        return tile.out.fill_(1.0)

    with mock.patch.object(triton_tiles, "log_sums", fail):
        run("forced fp16 64x128 w4 s4", "raises")
    with mock.patch.object(triton_tiles, "exp_weights", wrong):
        run("forced fp16 64x128 w4 s4", "wrong")
    return found


@pytest.mark.slow
def test_check_kernels_runs_every_kind_of_slice_and_finds_what_is_wrong(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (found,) = run_ranks(interpreted, 1, method="spawn")
    for name, records in found.items():
        outcome = slices.Outcome(records=records, end="done")
        failures = check_kernels.failures(name, outcome)
        assert records
        if name == "raises":
            assert {x["problem"] for x in failures} == {"RuntimeError: no such kernel"}
            assert len(failures) == 3, "each tile must fail once"
        elif name == "wrong":
            assert {x["what"] for x in failures} == {"weights"}
            assert f"FAILED {failures[0]['case']}: weights: Triton" in check_kernels.show(
                name, outcome
            )
        else:
            assert not failures, f"{name}: {failures}"
    shifts = [x for x in found["losses auto"] if x["what"] == "one shift for all rows, or not"]
    assert {x["case"].split(", ")[-2] for x in shifts} == {"typical pairs", "outlier pairs"}


def test_tools_say_when_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main([]) == 1
    assert "no GPU here" in capsys.readouterr().err
