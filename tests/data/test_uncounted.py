"""data.index=none: the data order needs no sample counts. It is the same at any number of ranks and after a resume."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from disco_ds.config import load_config
from disco_ds.data import Manifest, load_sources, merge_states
from disco_ds.losses.fastclip import FastCLIPv1Loss
from helpers.remote import ALL, remote
from helpers.shards import make_loader, read_step, settings, write_shards
from helpers.web import Server

SLOTS = 4


def read(loaders: list[Any], steps: int) -> list[list[int]]:
    """Read steps from the loaders of all ranks. Return the ids of each step in global order."""
    by_rank = [[read_ids(loader) for _ in range(steps)] for loader in loaders]
    size = len(loaders)
    return [[by_rank[p % size][step][p // size] for p in range(24)] for step in range(steps)]


def read_ids(loader: Any) -> list[int]:
    data = read_step(loader)
    assert data.error is None, data.error
    ids = []
    for batch in data.micro_batches:
        ids += batch["index"].tolist()
    return ids


def start(data: Any, ranks: int, state: Any = None) -> list[Any]:
    sources = load_sources(data)
    return [make_loader(sources, data, rank, ranks, state=state) for rank in range(ranks)]


def stop(loaders: list[Any]) -> Any:
    state = merge_states([loader.state_dict() for loader in loaders])
    for loader in loaders:
        loader.close()
    return state


@pytest.mark.parametrize("workers", [0, 2])
def test_order_does_not_depend_on_ranks_workers_and_resumes(shards: Manifest, workers: int) -> None:
    data = settings(shards.folder, index="none", slots=SLOTS, workers=workers)
    once = start(data, 1)
    expected = read(once, 30)
    stop(once)
    found, state = [], None
    for ranks, steps in ((2, 10), (4, 12), (1, 8)):
        loaders = start(data, ranks, state)
        found += read(loaders, steps)
        state = stop(loaders)
    assert found == expected
    # Each slot reads a shard completely before it begins the next one.
    ids = [index for step in expected for index in step]
    for slot in range(SLOTS):
        mine = [index >> 24 for index in ids[slot::SLOTS]]
        runs = [shard for i, shard in enumerate(mine) if i == 0 or mine[i - 1] != shard]
        first = mine.index(runs[1])
        assert first == shards.sizes[runs[0]]
        assert sorted(index & 0xFFFFFF for index in ids[slot::SLOTS][:first]) == list(range(first))


def test_epoch_reads_every_sample_once(shards: Manifest) -> None:
    (loader,) = start(settings(shards.folder, index="none", slots=1), 1)
    total = sum(shards.sizes)
    ids = [index for step in read([loader], -(-2 * total // 24)) for index in step]
    loader.close()
    assert len(set(ids[:total])) == total
    assert set(ids[total : 2 * total]) == set(ids[:total])
    assert ids[total : 2 * total] != ids[:total]


def test_two_slots_never_draw_the_same_for_a_shard(shards: Manifest) -> None:
    """Around the end of an epoch, two slots may read the same shard. They must not read the same (sample, epoch)."""
    sizes = len(shards.sizes)
    slots = next(number for number in range(sizes - 1, 1, -1) if sizes % number)
    (loader,) = start(settings(shards.folder, index="none", slots=slots), 1)
    seen = []
    for _ in range(3 * sum(shards.sizes) // 24):
        for batch in read_step(loader).micro_batches:
            seen += zip(batch["index"].tolist(), batch["epoch"].tolist(), strict=True)
    loader.close()
    assert len(set(seen)) == len(seen)
    assert {epoch for _, epoch in seen} >= {0, 1, 2}


def test_shards_of_a_server_have_the_order_of_the_folder(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    local = start(settings(shards.folder, index="none", slots=SLOTS), 2)
    data = remote(
        f"{server.url}/{ALL}", None, tmp_path / "cache", index="none", slots=SLOTS, workers=1
    )
    loaders = start(data, 2)
    assert read(loaders, 20) == read(local, 20)
    stop(loaders)
    stop(local)


def test_what_needs_counts_is_refused(shards: Manifest) -> None:
    common = [f"data.shards={shards.folder}", "data.index=none"]
    with pytest.raises(ValueError, match=r"data.index=none, the length of an epoch is unknown"):
        load_config("quickstart", [*common, "steps=null", "samples=null", "epochs=2"])
    with pytest.raises(ValueError, match=r"FastCLIPv1Loss .* data.index must not be none"):
        FastCLIPv1Loss().set_num_samples(0, 100)
    for changes in (
        {"shards": "pipe:cat {0..1}.tar"},
        {"shards": "x.csv"},
        {"manifest": "m.json"},
        {"shards": None, "sources": [{"shards": "a"}, {"shards": "b"}]},
    ):
        with pytest.raises(ValueError, match=r"data.index=none works with"):
            settings("x", **{"index": "none", **changes})


def test_manifest_of_many_shards_is_small_when_sent_to_a_worker(shards: Manifest) -> None:
    again = pickle.loads(pickle.dumps(shards))
    assert again == shards
    assert again.fingerprint == shards.fingerprint
    for urls in (
        tuple(f"https://h/{shard.name}?x" for shard in shards.shards),
        tuple(f"https://h{i}/{i}.tar" for i in range(len(shards.shards))),
    ):
        remote = Manifest(Path(), shards.shards, urls)
        assert pickle.loads(pickle.dumps(remote)) == remote


def test_shards_without_samples_end_the_search(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").write_bytes(b"<html>404</html>" * 200)
    data = settings(f"{tmp_path}/{{0..3}}.tar", index="none", slots=2)
    loader = make_loader(None, data, batch=4)
    with pytest.warns(UserWarning, match=r"\d.tar is truncated after 0 samples"):
        error = read_step(loader).error
    loader.close()
    assert error is not None
    assert "no complete sample in 8 shards" in error


def test_missing_local_shards_are_refused_at_the_start(tmp_path: Path) -> None:
    write_shards(tmp_path, [4, 4])
    data = settings(f"{tmp_path}/{{00000..00003}}.tar", index="none", slots=2)
    with pytest.raises(ValueError, match=r"missing shards: 00002.tar, 00003.tar"):
        load_sources(data)
