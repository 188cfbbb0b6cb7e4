"""tools/bench/launches.py. The operations after the last backward pass must be fewer than the parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.dist import run_ranks
from tools.bench import launches

NUM_PARAMETERS = 302


def count(folder: Path, stage: int) -> dict[str, int]:
    config = launches.make_config(folder, width=32, stage=stage, optimizer="adamw", num=1)
    found, _ = launches.measure(config, repeats=0)
    return dict(found.counts)


@pytest.mark.parametrize("stage", [0, 1])
def test_end_of_a_step_has_few_operations_whatever_the_number_of_parameters(
    stage: int, tmp_path: Path
) -> None:
    (counts,) = run_ranks(count, 1, tmp_path, stage)
    assert counts["end"] < NUM_PARAMETERS / 2
    assert counts["backward"] > NUM_PARAMETERS
