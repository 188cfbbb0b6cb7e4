"""`tools.study.batches` of 2 checkpoints x 2 batches x 2 learning rates, as one command and as separate commands."""

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy
import pytest

from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.run import run_training
from helpers.launched import records
from helpers.tiny_run import recipe
from tools.study.batches import main as study
from tools.study.batches import report

EVAL = {
    "validation": {"unseen": "bundled:emoji/unseen"},
    "labeled": {"unseen": "bundled:emoji/unseen"},
    "validation_batch": 64,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_branches_are_trained_and_resumed_at_equal_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        changes: dict[str, Any] = {"name": f"seed-{seed}", "seed": seed, "eval": EVAL}
        run_training(load_config(recipe(tmp_path, steps=3, **changes)))
    monkeypatch.chdir(tmp_path)
    words = "runs/seed-0 runs/seed-1 --batches 32 16 --rates 0.5 2 --out out --samples"
    assert study([*words.split(), "70"]) == 2
    assert "nearest: 64" in capsys.readouterr().err
    assert study([*words.split(), "64", "--print"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 8
    assert study([*words.split(), "64", "--print", "--set", "optim.schedule=cosine"]) == 0
    assert capsys.readouterr().out.count("optim.schedule=") == 8
    assert study(["runs/seed-0", "runs/seed-0", *words.split()[2:], "64"]) == 2
    assert "folder named seed-0" in capsys.readouterr().err
    # Train one branch as a scheduler would, and stop another one after its first step.
    assert main(commands[0][1:]) == 0
    cut = ["samples=80" if word == "samples=112" else word for word in commands[5][1:]]
    assert main(cut) == 0
    (Path(cut[cut.index("--resume") + 1]) / "finished.json").unlink()
    assert study([*words.split(), "64"]) == 0
    assert "Largest batch whose loss is at most two standard errors" in capsys.readouterr().out
    assert study([*words.split(), "128"]) == 2
    assert "another --out" in capsys.readouterr().err
    for batch in (16, 32):
        for seed in range(2):
            for factor in ("0.5", "2"):
                run = tmp_path / "out" / f"seed-{seed}-b{batch}-x{factor}"
                assert json.loads((run / "finished.json").read_text())["samples"] == 112
                rate = 1e-3 * (batch / 16) ** 0.5 * float(factor)
                assert load_config(run / "config.yaml").optim.lr == pytest.approx(rate, rel=1e-3)
                assert {r["samples"] for r in records(run)} == {*range(48, 113, batch)} - {48}


def test_report_chooses_the_rate_and_pairs_the_parents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The values are [batches, rates, parents, metrics]. The parents differ by 1, which hides the differences between
    # batches unless the branches of each parent are compared with each other.
    parents = numpy.array([0.0, 1.0, 2.0])
    loss = numpy.stack(
        [
            [parents + 3, parents + 2],
            [parents + 2 + [0.01, -0.01, 0.005], parents + 4],
            [parents + 2 + [0.1, 0.11, 0.12], parents + 5],
        ]
    )
    values = numpy.stack([loss, loss / 100], axis=-1)
    args = argparse.Namespace(
        batches=[64, 128, 256], rates=[1.0, 2.0], parents=[1, 2, 3], samples=512, out=tmp_path
    )
    report(values, ["eval/a_loss_at_64", "eval/a_top1"], args)
    out = capsys.readouterr().out
    error = 1 / 3**0.5
    assert f"| 64 | x2 | 3.0000 ± {error:.4f} | 0.0300 ± {error / 100:.4f} |" in out
    assert "| 256 | x1 | 3.1100 ± " in out
    assert "two standard errors above the smallest batch's: 128\n" in out
    assert (tmp_path / "study.md").read_text() in out
    values[0, 0, 1] = values[2] = math.nan
    report(values, ["eval/a_loss_at_64", "eval/a_top1"], args)
    out = capsys.readouterr().out
    assert "| 64 | x2 | 3.0000" in out
    assert "| 256 | x1 | nan" in out
    assert "two standard errors above the smallest batch's: 128\n" in out
    report(numpy.full_like(values, math.nan), ["eval/a_loss_at_64", "eval/a_top1"], args)
    assert "the smallest batch's: none, " in capsys.readouterr().out
    args.parents = [1]
    report(values[:, :, :1], ["eval/a_loss_at_64", "eval/a_top1"], args)
    assert "A single parent has no standard error" in capsys.readouterr().out
