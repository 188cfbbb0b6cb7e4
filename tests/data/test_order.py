"""The data order is a pure function, reads every sample once per epoch, and balances slots. Also: number of slots."""

from functools import partial
from itertools import chain, takewhile

import pytest
import torch
from torch import Tensor

from disco_ds.data import Source
from disco_ds.data.counter_rng import keyed_float, keyed_permutation, keyed_uniform, random_key
from disco_ds.data.order import DataOrder, Mixture
from disco_ds.data.sources.load import count_slots
from helpers.shards import settings


def read_epoch(order: DataOrder, slot: int, epoch: int, offset: int = 0) -> list[tuple[int, int]]:
    """Return the (shard, entry) of the samples of a slot in an epoch, from an offset on."""
    entries = order.entries(slot, (epoch, offset), int)
    return [
        (each.shard, each.entry) for each in takewhile(lambda each: each.epoch == epoch, entries)
    ]


@pytest.mark.parametrize(
    ("sizes", "slots"), [([7, 3, 12, 5, 9], 4), ([50], 6), ([1] * 9, 9), ([400, 1, 1], 8)]
)
def test_order_any_sizes_covers_every_epoch_exactly_once(sizes: list[int], slots: int) -> None:
    order = DataOrder(sizes, slots, seed=1, window=5)
    everything = sorted((shard, entry) for shard, size in enumerate(sizes) for entry in range(size))
    for epoch in range(2 * slots):
        read = [read_epoch(order, slot, epoch) for slot in range(slots)]
        lengths = [len(entries) for entries in read]
        assert max(lengths) - min(lengths) <= 1
        assert sorted(chain(*read)) == everything


def test_order_over_many_epochs_no_slot_drifts() -> None:
    order = DataOrder([10, 7, 6], 4, seed=0, window=8)
    totals = [sum(len(read_epoch(order, slot, epoch)) for epoch in range(4)) for slot in range(4)]
    assert totals == [23] * 4


def test_order_is_a_function_of_its_arguments() -> None:
    def read(seed: int = 1, window: int = 5) -> list[tuple[int, int]]:
        order = DataOrder([30, 20, 30], 4, seed, window)
        return [
            entry for epoch in (3, 0) for slot in (2, 1) for entry in read_epoch(order, slot, epoch)
        ]

    assert read() == read()
    assert read() != read(seed=2)
    assert read() != read(window=4)
    # A new order continues with the same entry, so earlier calls have no influence.
    assert read_epoch(DataOrder([30, 20, 30], 4, 1, 5), 1, 0, offset=7)[0] == read()[67]


def test_order_differs_between_epochs_and_slots() -> None:
    order = DataOrder([64], 2, seed=0, window=32)
    first = [
        [entry % 32 for _, entry in read_epoch(order, slot, epoch)]
        for epoch in (0, 1)
        for slot in (0, 1)
    ]
    assert all(first[i] != first[j] for i in range(4) for j in range(i))


def test_order_ids_are_contiguous_in_manifest_order() -> None:
    order = Mixture([[3, 4], [2]], [1.0, 1.0], 1, seed=0, window=8)
    entries = [(0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 3), (1, 0, 1)]
    assert [order.sample_id(*entry) for entry in entries] == [0, 2, 3, 6, 8]


@pytest.mark.parametrize(("shards", "slots"), [(1, 1), (5, 4), (24, 24), (500, 384), (40_000, 512)])
def test_default_slots_follow_the_shards(shards: int, slots: int) -> None:
    source = Source()
    source.sizes = [30] * shards
    assert count_slots(settings(), [source], 1) == slots


@pytest.mark.parametrize(
    ("saved", "samples", "requested", "ranks", "words"),
    [
        (3, 100, None, 2, ["3 slots", "ranks (2)", "ranks that divides 3"]),
        (0, 10**6, None, 7, ["the default for 600 shards", "ranks (7)", " or data.slots="]),
        (512, 10**6, 100, 8, ["100 slots", "set by data.slots", "data.slots=96 or data.slots=104"]),
        (512, 50, 100, 1, ["data.slots is 100", "50 samples", "at most 50"]),
        (2, 3, None, 8, ["8 ranks", "3 samples"]),
    ],
)
def test_slots_that_do_not_fit_are_refused_with_what_would(
    saved: int, samples: int, requested: int | None, ranks: int, words: list[str]
) -> None:
    source = Source()
    source.sizes = [samples] + [0] * 599
    with pytest.raises(ValueError) as error:
        count_slots(settings(slots=requested), [source], ranks, saved)
    assert all(word in str(error.value) for word in words), str(error.value)


def _splitmix(*keys: int) -> int:
    """Compute the 64 random bits of a sample with Python's integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = keys[0] & mask
    for value in keys[1:]:
        key = mix((mix(key) + (value + 1) * 0x9E3779B97F4A7C15) & mask)
    return key


def keys(seed: int, epoch: Tensor, index: Tensor) -> Tensor:
    return torch.tensor(list(map(partial(random_key, seed), epoch.tolist(), index.tolist())))


def test_keyed_uniform_equals_the_algorithm_in_integers() -> None:
    epoch, index = torch.tensor([0, 5, 1]), torch.tensor([0, 7, 2**40 + 3])
    drawn = keyed_uniform(keys(2**63 + 11, epoch, index), 4, start=2)
    for row, (e, i) in enumerate(zip(epoch.tolist(), index.tolist(), strict=True)):
        bits = [_splitmix(2**63 + 11, e, i, column) for column in range(2, 6)]
        assert drawn[row].tolist() == [(each >> 40) * 2.0**-24 for each in bits]


def test_keyed_numbers_stay_what_they_are() -> None:
    # If these values changed, the data order and the augmentation of every resumed run would change.
    drawn = keyed_uniform(torch.tensor([random_key(0, 0, 0)]), 3) * 2**24
    assert drawn.int().tolist() == [[8763058, 12896813, 14429467]]
    assert keyed_permutation(8, 1, 2, 3).tolist() == [6, 1, 3, 0, 4, 7, 5, 2]


def test_keyed_uniform_columns_do_not_depend_on_the_request() -> None:
    epoch, index = torch.tensor([1, 2, 2]), torch.tensor([4, 4, 5])
    key = keys(9, epoch, index)
    whole = keyed_uniform(key, 40)
    assert whole.dtype == torch.float32
    assert torch.equal(whole[:, 32:], keyed_uniform(key, 8, start=32))
    assert torch.equal(whole[1:2], keyed_uniform(key[1:2], 40))
    assert len({tuple(row.tolist()) for row in whole}) == 3


def test_keyed_float_is_a_number_of_keyed_uniform() -> None:
    epoch, index = torch.tensor([0, 3, 1]), torch.tensor([0, 2**33 + 1, 99])
    for seed in (0, 17, 2**64 - 1):
        key = keys(seed, epoch, index)
        rows = [[keyed_float(each, column) for column in range(4, 27)] for each in key.tolist()]
        assert rows == keyed_uniform(key, 23, 4).tolist()


def test_keyed_uniform_is_uniform_and_uncorrelated() -> None:
    index = torch.arange(50_000)
    numbers = keyed_uniform(keys(0, torch.zeros_like(index), index), 4).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    # Chi-square with 19 degrees of freedom: 43.8 at p = 0.001.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 43.8
    joint = torch.corrcoef(torch.cat([numbers, numbers.roll(1, 0)], dim=1).T) - torch.eye(8)
    assert joint.abs().max() < 0.02


def test_keyed_permutation_is_a_permutation_by_its_keys() -> None:
    assert sorted(keyed_permutation(100, 1, 2).tolist()) == list(range(100))
    orders = {
        tuple(keyed_permutation(20, *keys).tolist())
        for keys in [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1,)]
    }
    assert len(orders) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_keyed_uniform_on_the_gpu_equals_the_cpu() -> None:
    key = keys(7, torch.arange(100) % 3, torch.arange(100) * 12_345)
    assert torch.equal(keyed_uniform(key, 12), keyed_uniform(key.cuda(), 12).cpu())
