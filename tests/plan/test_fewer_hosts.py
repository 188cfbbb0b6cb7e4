"""Numbers of ranks that are possible after hosts are lost, and recipes that do not support them."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_ds.config import load_config
from disco_ds.plan.fewer_hosts import check_fewer_hosts, possible_ranks
from helpers.tiny_run import recipe


@pytest.mark.parametrize(
    ("slots", "at_least", "ranks"),
    [
        ([8, 8, 8], 2, [16, 24]),
        ([8, 8, 8], 3, [24]),
        ([1, 2, 4], 1, [1, 2, 3, 4, 5, 6, 7]),
        ([1, 2, 4], 2, [3, 5, 6, 7]),
        ([4, 4, 8], 2, [8, 12, 16]),
        ([8] * 300, 298, [2384, 2392, 2400]),
    ],
)
def test_hosts_that_are_left_give_these_numbers_of_ranks(
    slots: list[int], at_least: int, ranks: list[int]
) -> None:
    assert possible_ranks(slots, at_least) == ranks


BATCH = "global_batch 16 must be a multiple of"
SLOTS = "data.slots 4 must be a multiple of"


@pytest.mark.parametrize(
    ("hosts", "at_least", "overrides", "said"),
    [
        ([1, 1, 1], 2, [], ["2 or 3 ranks", f"{BATCH} 24 ", f"{SLOTS} 6"]),
        ([1, 1, 1], 2, ["global_batch=24", "data.slots=null"], [f"{SLOTS} 6"]),
        (
            [1, 1, 1],
            2,
            ["global_batch=12", "data.slots=6"],
            ["global_batch 12 must be a multiple of 24 (6 x micro_batch 4)"],
        ),
        (
            [1, 1, 2],
            2,
            ["data.slots=6"],
            ["2, 3 or 4 ranks", f"{BATCH} 48 ", "data.slots 6 must be a multiple of 12"],
        ),
        ([1, 1, 1, 1], 2, [], [f"{BATCH} 48 ", "raise --min-hosts"]),
        ([1, 1, 1, 1], 1, ["global_batch=48"], [f"{SLOTS} 12"]),
        (
            [1, 1, 1],
            2,
            [
                "global_batch=24",
                "data.slots=6",
                "steps=null",
                "stages=[{until: 240, global_batch: 24}, {until: 400, global_batch: 32}]",
            ],
            ["global_batch 32 must be a multiple of 24"],
        ),
        ([17, 19, 23], 1, [], ["17, 19, 23, 36, 40, 42 or 59 ranks"]),
        ([1, 1], 1, ["ranks=3"], ["the recipe expects 3 ranks, but this run has 2"]),
        ([1, 1], 1, ["data.slots=1048576"], ["every slot needs one"]),
    ],
)
def test_number_of_ranks_that_does_not_divide_is_refused(
    hosts: list[int], at_least: int, overrides: list[str], said: list[str], tmp_path: Path
) -> None:
    config = load_config(recipe(tmp_path), overrides)
    with pytest.raises(ValueError) as caught:
        check_fewer_hosts(config, hosts, at_least)
    for words in said:
        assert words in str(caught.value)


def test_settings_that_the_error_names_are_accepted(tmp_path: Path) -> None:
    for hosts, overrides in (
        ([1, 1, 1], ["global_batch=24", "data.slots=6", "ranks=3"]),
        ([1, 1, 1], ["global_batch=12", "micro_batch=2", "data.slots=6"]),
        ([1, 1, 2], ["global_batch=48", "data.slots=12"]),
    ):
        config = load_config(recipe(tmp_path), overrides)
        ranks = "2 or 3" if hosts[2] == 1 else "2, 3 or 4"
        assert check_fewer_hosts(config, hosts, 2) == ranks


def test_settings_that_need_the_same_number_of_ranks_are_refused(tmp_path: Path) -> None:
    zero = {"stage": 2, "round_robin_gradients": True}
    config = load_config(recipe(tmp_path, deepspeed={"zero_optimization": zero}))
    with pytest.raises(ValueError, match=r"--min-hosts .*round_robin_gradients"):
        check_fewer_hosts(config, [1, 1, 1], 2)
