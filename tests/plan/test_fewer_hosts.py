"""The numbers of ranks that lost hosts leave to a run, and what is refused before it starts."""

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
def test_hosts_that_are_left_give_these_numbers_of_ranks(slots: list[int], at_least: int, ranks: list[int]) -> None:
    assert possible_ranks(slots, at_least) == ranks


BATCH = "global_batch 16 is not a multiple of ranks x micro_batch (4) at 3 ranks"
PRIMES = "at 17, 19, 23, 36, 40, 42 and 59 ranks"
SLOTS = "the data order's 4 slots are not a multiple of 3 ranks"


@pytest.mark.parametrize(
    ("hosts", "at_least", "overrides", "said"),
    [
        ([1, 1, 1], 2, [], [BATCH, "set global_batch=24;", SLOTS, "set data.slots=6"]),
        ([1, 1, 1], 2, ["global_batch=24", "data.slots=null"], [SLOTS, "set data.slots=6"]),
        ([1, 1, 1], 2, ["global_batch=12", "data.slots=6"], ["(4) at 2 ranks: set global_batch=24 or micro_batch=2"]),
        ([1, 1, 2], 2, ["data.slots=6"], [BATCH, "global_batch=48;", "6 slots are", "4 ranks: set data.slots=12"]),
        ([1, 1, 1, 1], 2, [], [BATCH, "or --min-hosts 4, with"]),
        ([1, 1, 1, 1], 1, ["global_batch=48"], [SLOTS, "set data.slots=12"]),
        ([17, 19, 23], 1, [], [PRIMES, "no global_batch up to 67108864 works", "no data.slots up to"]),
        ([1, 1], 1, ["ranks=3"], ["the recipe is for 3 ranks, this run has 2"]),
        ([1, 1], 1, ["data.slots=1048576"], ["every slot needs one"]),
    ],
)
def test_number_of_ranks_that_does_not_divide_is_refused(
    hosts: list[int], at_least: int, overrides: list[str], said: list[str], tmp_path: Path
) -> None:
    config = load_config(recipe(tmp_path), overrides)
    with pytest.raises(ValueError) as caught:
        check_fewer_hosts(config, hosts, at_least, gib=None)
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
        expected = f"{ranks} ranks divide batch and slots; memory is not planned, as there is no GPU here"
        assert check_fewer_hosts(config, hosts, 2, gib=None) == expected


def test_memory_is_planned_at_every_number_of_ranks(tmp_path: Path) -> None:
    """ZeRO shards the optimizer: fewer ranks need more."""
    config = load_config(
        recipe(tmp_path, model={"name": "ViT-B-32"}), ["global_batch=24", "data.slots=6", "deepspeed=zero3"]
    )
    said = check_fewer_hosts(config, [1, 1, 1], 2, gib=80)
    assert said.startswith("2 or 3 ranks divide batch and slots; a GPU needs up to ")
    need = float(said.split(" up to ")[1].split(" GiB")[0])
    with pytest.raises(
        ValueError, match=rf"with 2 ranks a GPU needs {need:.1f} GiB, as planned, and has {need - 0.1:.1f}"
    ):
        check_fewer_hosts(config, [1, 1, 1], 2, gib=need - 0.1)
    check_fewer_hosts(config, [1, 1, 1], 3, gib=need - 0.1)
