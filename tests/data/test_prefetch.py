"""Prefetching of remote shards fetches the most urgent shard first, fits the cache, and does not disturb readers."""

import fcntl
import itertools
import threading
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from disco_ds.config.data import RemoteSettings
from disco_ds.data import DataError, Manifest
from disco_ds.data.order import DataOrder, Mixture
from disco_ds.data.sources.cache import FetchAhead
from disco_ds.data.sources.fetching import fetch_temporary, progress
from helpers.remote import fetching, open_cache
from helpers.shards import make_loader, read_step, settings, write_shards
from helpers.waiting import wait_for
from helpers.web import Server

SIZES = [17, 30, 9, 25, 30, 13, 20, 22]


@pytest.fixture
def shards(tmp_path: Path) -> Manifest:
    """Write shards of equal size, so that a size limit of the cache is a limit on their number."""
    return write_shards(tmp_path / "shards", [10] * 8)


# Which shards are needed next


def read_on(order: DataOrder, slot: int, epoch: int, offset: int, num: int) -> list[int]:
    """List the shards of the slot's next `num` samples, beginning at an offset in an epoch."""
    return [each.shard for each in islice(order.entries(slot, (epoch, offset), int), num)]


@pytest.mark.parametrize(("slots", "window"), [(1, 1), (3, 7), (4, 1000), (8, 16), (5, 64)])
def test_upcoming_shards_are_those_read_next(slots: int, window: int) -> None:
    order = DataOrder(SIZES, slots, seed=3, window=window)
    for slot, (epoch, offset) in itertools.product(
        range(slots), [(0, 0), (0, 9), (2, 5), (slots, 20)]
    ):
        read = read_on(order, slot, epoch, offset, num=500)
        promised: list[tuple[int, int]] = []
        for away, shard in order.upcoming(slot, epoch, offset):
            promised.append((away, shard))
            if away > 500:
                break
        assert [away for away, _ in promised] == sorted(away for away, _ in promised)
        for number, shard in enumerate(read):
            # The shard was announced in time, and at most two windows too early.
            span = SIZES[shard] + 2 * window
            assert any(away <= number < away + span for away, found in promised if found == shard)
        for away, shard in promised:
            if 0 < away <= 500 - window:
                assert shard in read[away : away + window]


def test_most_urgent_shard_comes_first_and_each_slot_has_one_beyond_its_window() -> None:
    order = Mixture([[100] * 12], [1.0], 4, seed=5, window=10)
    # Slots 0 and 1 have read 5 and 95 samples of the first epoch, so they need their second shards after 95 and 5 more.
    ahead = FetchAhead([], order, 1, {0: (0, 5), 1: (0, 95)})
    own = DataOrder([100] * 12, 4, 5, 10)
    reads = {
        slot: list(dict.fromkeys(read_on(own, slot, 0, offset, 300)))
        for slot, offset in ((0, 5), (1, 95))
    }
    expected = [*sorted([reads[0][0], reads[1][0]]), reads[1][1], reads[0][1]]
    assert ahead.find_wanted() == [(0, shard) for shard in expected]


def test_small_shards_are_wanted_a_window_ahead() -> None:
    order = Mixture([[3] * 400], [1.0], 4, seed=5, window=30)
    ahead = FetchAhead([], order, 1, {2: (0, 0)})
    own = DataOrder([3] * 400, 4, 5, 30)
    assert sorted(ahead.find_wanted()) == [
        (0, shard) for shard in sorted(set(read_on(own, 2, 0, 0, 60)))
    ]


def test_single_shard_wants_no_other() -> None:
    ahead = FetchAhead([], Mixture([[50]], [1.0], 1, seed=0, window=10), 7, {0: (0, 45)})
    assert ahead.find_wanted() == [(0, 0)]


def test_rare_source_of_a_mixture_is_less_urgent() -> None:
    order = Mixture([[20] * 8, [20] * 800], [9.0, 1.0], 2, seed=5, window=10)
    ahead = FetchAhead([], order, 1, dict.fromkeys(order.streams([0]), (0, 0)))
    sources = [source for source, _ in ahead.find_wanted()]
    assert [source for source, _ in itertools.groupby(sources)] == [0, 1, 0, 1]


# The cache


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_fetched_ahead_it_is_there_when_it_is_opened(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    cache.fetch_ahead(3)
    cache.fetch_ahead(3)
    with cache.open(3) as file:
        assert file.read() == (shards.folder / "00003.tar").read_bytes()
    assert server.asked == {"/00003.tar": 1}


def test_reader_waits_for_the_room_of_what_is_being_fetched_ahead(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(
        shards, server.url, tmp_path / "cache", cache_gb=1.5 * shards.shards[0].bytes / 1e9
    )
    server.halves.add("/00001.tar")
    ahead = threading.Thread(target=cache.fetch_ahead, args=[1])
    found: list[bytes] = []
    ahead.start()
    wait_for(lambda: server.asked["/00001.tar"] == 1)

    def read() -> None:
        with cache.open(0) as file:
            found.append(file.read())

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    assert not found
    server.halves.clear()
    server.resume.set()
    reader.join(300)
    ahead.join(300)
    assert found == [(shards.folder / "00000.tar").read_bytes()]


def test_shard_that_is_just_complete_and_still_locked_is_waited_for(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    """A fetch first renames the complete file and then releases its lock. This is the state in between."""
    cache = open_cache(
        shards, server.url, tmp_path / "cache", cache_gb=1.5 * shards.shards[0].bytes / 1e9
    )
    cache.fetch_ahead(1)
    (complete,) = cache.folder.glob("*.shard")
    with complete.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: cache.open(0).close())
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
    thread.join(300)
    assert server.asked == {"/00000.tar": 1, "/00001.tar": 1}


def test_wanted_shard_that_is_there_already_is_not_the_next_to_go(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(
        shards, server.url, tmp_path / "cache", cache_gb=2.5 * shards.shards[0].bytes / 1e9
    )
    for shard in (0, 1):
        cache.open(shard).close()
        # File times are coarse.
        time.sleep(0.05)
    cache.fetch_ahead(0)
    cache.fetch_ahead(2)
    cache.open(0).close()
    assert server.asked == {"/00000.tar": 1, "/00001.tar": 1, "/00002.tar": 1}


def test_what_a_killed_process_had_half_fetched_ahead_makes_room(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(
        shards, server.url, tmp_path / "cache", cache_gb=1.5 * shards.shards[0].bytes / 1e9
    )
    cache.fetch_ahead(1)
    (left,) = cache.folder.glob("*.shard")
    left.rename(left.with_suffix(".partial"))
    cache.fetch_ahead(0)
    assert server.asked == {"/00000.tar": 1, "/00001.tar": 1}


def test_small_source_beside_a_large_one_costs_no_time() -> None:
    """The small source has 20 samples for 512 slots, so most of its slots have no sample in an epoch."""
    order = Mixture([[20], [100] * 1000], [0.5, 0.5], 512, seed=5, window=50)
    ahead = FetchAhead([], order, 1, dict.fromkeys(order.streams(range(64)), (0, 0)))
    start = time.process_time()
    assert len(ahead.find_wanted()) > 64
    assert time.process_time() - start < 0.5


def test_failure_ahead_is_one_attempt_and_the_reader_has_all_of_its_own(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache", tries=3, timeout_s=20.0)
    server.failures["/00001.tar"] = [503, 503, 503]
    with pytest.raises(DataError, match="503"):
        cache.fetch_ahead(1)
    cache.open(1).close()
    assert server.asked == {"/00001.tar": 4}


def test_what_another_process_fetches_is_left_to_it(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    server.halves.add("/00001.tar")
    thread = threading.Thread(target=lambda: cache.open(1).close())
    thread.start()
    wait_for(lambda: server.asked["/00001.tar"] == 1)
    cache.fetch_ahead(1)
    assert thread.is_alive()
    server.halves.clear()
    server.resume.set()
    thread.join(300)
    assert server.asked == {"/00001.tar": 1}


# In the loader


def ids(loader: Any, steps: int) -> list[list[int]]:
    return [[int(i) for part in read_step(loader).index for i in part] for _ in range(steps)]


def test_workers_have_fetched_what_comes_next_and_the_order_is_the_same(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    manifest = shards.folder / "manifest.json"
    text, found = server.url + "/{00000..00007}.tar", {}
    for least in (0, 1):
        own = fetching(tmp_path / f"cache-{least}", tries=5, prefetch_shards=least)
        data = settings(
            text, manifest=manifest, remote=own, slots=2, window=5, workers=1, prefetch=1
        )
        with closing(make_loader(None, data, batch=4)) as loader:
            server.asked.clear()
            found[least] = ids(loader, 1)
            if least:
                # Each of two slots has a shard in use and one prefetched, although only one step has been read.
                wait_for(lambda: len(server.asked) == 4)
            time.sleep(0.8)
            assert len(server.asked) == 2 + 2 * least
            found[least] += ids(loader, 15)
        assert all(count == 1 for count in server.asked.values())
    assert found[0] == found[1]


def test_progress_of_what_is_fetched_ahead_does_not_hide_a_reader_that_hangs(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    shared = [0]
    progress.count = shared
    try:
        with fetch_temporary(f"{server.url}/00001.tar", "00001.tar", RemoteSettings()):
            assert shared[0] > 0
        before = shared[0]
        thread = threading.Thread(
            target=open_cache(shards, server.url, tmp_path / "cache").fetch_ahead, args=[2]
        )
        thread.start()
        thread.join(300)
        assert server.asked["/00002.tar"] == 1
        assert shared[0] == before
    finally:
        progress.count = [0]
