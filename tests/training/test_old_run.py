"""A run that an earlier version wrote goes on as it would have then."""

from __future__ import annotations

import json
import os
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from disco_ds.config import load_config
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.checkpoints import describe
from helpers.dist import run_ranks

FIXTURE = Path(__file__).parent / "fixtures" / "run_2026_11.tar.xz"
"""Written in November 2026 by one rank at ZeRO 1: six steps of FastCLIP-v3 with a locked text tower, of which the
checkpoint of step 3 and all records are there."""


def go_on(folder: Path) -> None:
    os.chdir(folder)
    with ExitStack() as stack:
        train(build(load_config("runs/run/config.yaml", []), "latest", stack))


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def set_comm_dtype_as_it_was_called(run: Path) -> None:
    """Give the run an option by its former name; with one rank nothing is sent, so its numbers are the same."""
    checkpoint = run / "checkpoints" / "step-00000003"
    meta = json.loads((checkpoint / "checkpoint.json").read_text())
    meta["identity"]["loss"]["options"] = {"wire": "fp32"}
    describe(checkpoint, meta)
    config = (run / "config.yaml").read_text()
    assert "  options: {}\n" in config
    (run / "config.yaml").write_text(config.replace("  options: {}\n", "  options: {wire: fp32}\n", 1))


@pytest.mark.parametrize("renamed", [False, True])
def test_run_of_november_2026_goes_on(renamed: bool, tmp_path: Path) -> None:
    with tarfile.open(FIXTURE) as tar:
        tar.extractall(tmp_path, filter="data")
    if renamed:
        set_comm_dtype_as_it_was_called(tmp_path / "runs" / "run")
    before = read_records(tmp_path)
    assert [record["step"] for record in before] == [1, 2, 3, 4, 5, 6]
    run_ranks(go_on, 1, tmp_path)
    after = read_records(tmp_path)
    assert after[:3] == before[:3]
    for old, new in zip(before[3:], after[3:], strict=True):
        assert [new[key] for key in ("step", "ids", "lr")] == [old[key] for key in ("step", "ids", "lr")]
        # bf16 products differ from processor to processor.
        assert [new[key] for key in ("loss", "scale")] == pytest.approx(
            [old[key] for key in ("loss", "scale")], rel=2e-3
        )
