"""Remote shards: lists of shards with braces, permission to read, and the disk space that the cache needs."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_ds.config import DataSettings
from disco_ds.config.data import RemoteSettings
from disco_ds.data import Manifest, Shard, load_sources, merge_states
from disco_ds.data.sources.cache import ShardCache, find_limit
from disco_ds.data.sources.counting import index_shards
from disco_ds.data.sources.load import check_cache, count_slots
from disco_ds.data.sources.shards import find_shards
from helpers.remote import ALL, fetching
from helpers.shards import SIZES, make_loader, read_step, settings, write_shards
from helpers.web import Server, serve


@pytest.mark.parametrize(
    ("text", "names", "first"),
    [
        ("/data/{00..02}.tar", ["00.tar", "01.tar", "02.tar"], None),
        (
            "/my data/x{b,a}/{8..10}.tar",
            ["xa/10.tar", "xa/8.tar", "xa/9.tar", "xb/10.tar", "xb/8.tar", "xb/9.tar"],
            None,
        ),
        ("/data/one.tar", ["one.tar"], None),
        (
            "https://u:secret@h/x/{0..1}.tar?sig=a/b&c={d}",
            ["0.tar", "1.tar"],
            "https://u:secret@h/x/0.tar?sig=a/b&c={d}",
        ),
        ("http://h/x/one.tar?sig=a/b.tar", ["one.tar"], "http://h/x/one.tar?sig=a/b.tar"),
        ("pipe:cat 's-{0..1}.tar?x'", ["s-0.tar", "s-1.tar"], "pipe:cat 's-0.tar?x'"),
        (
            "pipe:curl -s 's3://b/{x,y}/{0..1}.tar' | cat",
            ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"],
            "pipe:curl -s 's3://b/x/0.tar' | cat",
        ),
        ("pipe:cat /x/one.tar", ["one.tar"], "pipe:cat /x/one.tar"),
        ("s3://b/x/#{0..1}?.tar", ["#0?.tar", "#1?.tar"], "s3://b/x/#0?.tar"),
        ("gs://b/run #1?/{0..1}.tar", ["0.tar", "1.tar"], "gs://b/run #1?/0.tar"),
        ("pipe:get --id {0..1} --key SECRET", ["0", "1"], "pipe:get --id 0 --key SECRET"),
        ("pipe:zcat /d/{0..1}.tgz;true KEY", ["0.tgz", "1.tgz"], "pipe:zcat /d/0.tgz;true KEY"),
    ],
)
def test_shards_by_braces_have_names_without_secrets(
    text: str, names: list[str], first: str | None
) -> None:
    listing = find_shards(text, RemoteSettings(pipe=True))
    assert list(listing.names) == names
    assert list(listing.urls[:1]) == ([first] if first else [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/data/{0..", "not balanced"),
        ("/data/{0..99999999}.tar", "more than 1,000,000 shards"),
        ("s3://b/{0000..9999}/{0000..9999}.tar", "more than 1,000,000 shards"),
        ("/data/{a,a}.tar", "a.tar is named twice"),
        ("http://h/shards", "must contain braces"),
        ("pipe:aws s3 ls", "must contain braces"),
        ("http://h/get?key=SECRET/&part={0..1}", "the shard get is named twice"),
    ],
)
def test_shards_by_braces_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_shards(text, RemoteSettings(pipe=True))


def test_many_shards_by_braces_are_allowed() -> None:
    text = "s3://b/{0..1}/{00000..99999}.tar"
    assert len(find_shards(text, RemoteSettings()).names) == 200_000


def test_local_braces_use_their_part_of_the_folders_manifest(
    shards: Manifest, tmp_path: Path
) -> None:
    (part,) = load_sources(settings(shards.folder / "{00002..00004}.tar"))
    assert isinstance(part, Manifest)
    assert part.shards == shards.shards[2:5]
    (one,) = load_sources(settings(shards.folder / "00007.tar"))
    assert one.sizes == SIZES[7:]
    (whole,) = load_sources(settings(shards.folder / ALL))
    assert whole.fingerprint == shards.fingerprint
    with pytest.raises(
        ValueError, match=r"data.shards: .*manifest.json does not list 00008.tar, 00009.tar; index"
    ):
        load_sources(settings(shards.folder / "{00007..00009}.tar"))
    with pytest.raises(
        ValueError,
        match=r"manifest.json does not exist; index the shards: disco-ds index 'SHARDS' --to",
    ):
        load_sources(settings(tmp_path / "{a,b}.tar"))
    (shards.folder / "00003.tar").unlink()
    with pytest.raises(ValueError, match=r"00003.tar"):
        load_sources(settings(shards.folder / ALL))


def test_commands_are_off_unless_allowed(tmp_path: Path) -> None:
    both = settings(
        shards=None,
        sources=[{"shards": "http://h/{0..1}.tar"}, {"shards": "pipe:touch /x {0..1}.tar"}],
    )
    manifest = tmp_path / "m.json"
    manifest.write_text(
        json.dumps(
            {
                "version": 1,
                "shards": [{"name": f"{i}.tar", "samples": 1, "bytes": 1} for i in (0, 1)],
            }
        )
    )
    parts = [part.model_copy(update={"manifest": manifest}) for part in both.sources or ()]
    with pytest.raises(
        ValueError,
        match=r"data.sources\[1\]: a pipe: command runs in a shell.*data.remote.pipe=true",
    ):
        load_sources(both.model_copy(update={"sources": tuple(parts)}))
    with pytest.raises(
        ValueError,
        match=r"data.shards: manifest.json does not exist; index the shards: disco-ds index",
    ):
        load_sources(settings("http://h/{0..1}.tar"))
    with pytest.raises(ValueError, match=r"ftp:// is not supported: .*s3://.* or a pipe:"):
        load_sources(settings("ftp://b/{0..1}.tar", remote={"pipe": True}))


def test_patterns_and_lists_name_local_shards(tmp_path: Path) -> None:
    for part, sizes in (("a", [3, 4]), ("b", [5])):
        write_shards(tmp_path / part, sizes)
    (tmp_path / "some.txt").write_text("# two shards\n\nb/00000.tar\na/00001.tar\n")
    remote = RemoteSettings()
    every = find_shards(f"{tmp_path}/*/*.tar", remote)
    assert every.names == ("a/00000.tar", "a/00001.tar", "b/00000.tar")
    assert index_shards(every).sizes == [3, 4, 5]
    assert find_shards(f"{tmp_path}/{{a,b}}/*0.tar", remote).names == ("a/00000.tar", "b/00000.tar")
    two = find_shards(str(tmp_path / "some.txt"), remote)
    assert two.names == ("a/00001.tar", "b/00000.tar")
    assert index_shards(two).sizes == [4, 5]
    with pytest.raises(ValueError, match="no shard matches"):
        find_shards(f"{tmp_path}/c*/*.tar", remote)


def test_pattern_in_a_folder_with_brackets_matches(tmp_path: Path) -> None:
    write_shards(tmp_path / "set[1]?", [3, 4])
    assert find_shards(f"{tmp_path}/set[1]?/*.tar", RemoteSettings()).names == (
        "00000.tar",
        "00001.tar",
    )
    known = ["a[1]/0.tar", "a1/0.tar"]
    assert find_shards("s3://b/*[1]/*.tar", RemoteSettings(), known).names == ("a[1]/0.tar",)


def test_link_to_a_shard_does_not_count_it_twice(tmp_path: Path) -> None:
    write_shards(tmp_path / "v2", [3, 4])
    (tmp_path / "latest").symlink_to(tmp_path / "v2")
    (tmp_path / "some.txt").write_text("v2/00000.tar\nlatest/00000.tar\n")
    remote, words = RemoteSettings(), r"is named twice, the first time as \w+/0000[01]\.tar"
    for text in (
        f"{tmp_path}/*/*.tar",
        f"{tmp_path}/{{v2,latest}}/00000.tar",
        f"{tmp_path}/some.txt",
    ):
        with pytest.raises(ValueError, match=words):
            find_shards(text, remote)
    assert find_shards(f"{tmp_path}/latest", remote).names == ("00000.tar", "00001.tar")
    (tmp_path / "v2" / "last.tar").symlink_to("00001.tar")
    with pytest.raises(ValueError, match="is named twice"):
        find_shards(f"{tmp_path}/v2", remote)


def test_text_file_of_urls_has_names_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("https://h/x/b/1.tar?sig=$DISCO_B\nhttps://h/x/a/0.tar?sig=$DISCO_A\n")
    with pytest.raises(ValueError, match="environment variable DISCO_B is not set"):
        find_shards(str(path), RemoteSettings())
    path.write_text("https://h/x/b/1.tar?v=2\nhttps://h/x/a/0.tar?v=1\n")
    found = find_shards(str(path), RemoteSettings())
    assert found.names == ("a/0.tar", "b/1.tar")
    assert found.urls == ("https://h/x/a/0.tar?v=1", "https://h/x/b/1.tar?v=2")
    for text, words in (
        ("https://h/0.tar\nhttps://h/0.tar", "0.tar is named twice"),
        ("https://h/0.tar\n/local/1.tar", "either local shards or URLs"),
        ("# nothing", "one per line"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            find_shards(str(path), RemoteSettings())
    with pytest.raises(ValueError, match=r"use braces or a .txt file"):
        find_shards("https://h/*.tar", RemoteSettings())


# Disk space. The shuffle window is 0.4 of a shard, as with LAION-400M.

SLOTS, SAMPLES, WINDOW, NUM_SHARDS = 8, 20, 8, 120
BATCH = 16


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Manifest, Server]]:
    shards = write_shards(tmp_path_factory.mktemp("many"), [SAMPLES] * NUM_SHARDS)
    with serve(shards.folder) as server:
        yield shards, server


def name_many(many: tuple[Manifest, Server], cache: Path, **changes: Any) -> DataSettings:
    shards, server = many
    text = f"{server.url}/{{00000..{NUM_SHARDS - 1:05d}}}.tar"
    part = {"shards": text, "manifest": shards.folder / "manifest.json"}
    own = fetching(cache, tries=5, **changes.pop("remote", {}))
    return settings(
        None,
        shards=None,
        sources=[part],
        **{"slots": SLOTS, "window": WINDOW, "remote": own, **changes},
    )


def fetched_per_used(many: tuple[Manifest, Server], data: DataSettings, size: int = 1) -> float:
    """Read an epoch on one of `size` hosts. Return how many bytes this host fetches for each byte that it uses."""
    shards, server = many
    steps = SAMPLES * NUM_SHARDS // BATCH
    server.asked.clear()
    with closing(make_loader(None, data, 0, size, BATCH, ranks_here=1)) as loader:
        for _ in range(steps):
            assert read_step(loader).error is None
    sizes = {f"/{shard.name}": shard.bytes for shard in shards.shards}
    fetched = sum(sizes[name] * count for name, count in server.asked.items())
    return fetched / (sum(sizes.values()) / size)


@pytest.mark.parametrize(
    ("size", "workers"), [(1, 0), pytest.param(1, 8, marks=pytest.mark.slow), (4, 1)]
)
def test_cache_that_is_too_small_is_refused_and_the_size_named_holds_the_shards_in_use(
    many: tuple[Manifest, Server], tmp_path: Path, size: int, workers: int
) -> None:
    ahead = int(workers > 0)
    small = {"cache_gb": many[0].shards[0].bytes / 1e9, "prefetch_shards": ahead}
    data = name_many(many, tmp_path, workers=workers, remote=small)
    with pytest.raises(ValueError, match=rf"the {SLOTS // size} slots .* \S+ GB") as refused:
        make_loader(None, data, 0, size, BATCH, ranks_here=1)
    enough = float(re.findall(r"cache_gb=([\d.e-]+)", str(refused.value))[0])
    remote = {**small, "cache_gb": enough}
    data = name_many(many, tmp_path, workers=workers, remote=remote)
    # The shards that are prefetched at the end have not been read yet: one for each slot.
    assert fetched_per_used(many, data, size) < 1.1 + ahead * SLOTS / NUM_SHARDS


def set_free(monkeypatch: pytest.MonkeyPatch, free_bytes: float) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=int(free_bytes)))


def sized(num_shards: int, gb: float, remote: bool = True) -> Manifest:
    """Make a manifest of shards that do not exist, with 10,000 samples each."""
    names = [f"{number:06d}.tar" for number in range(num_shards)]
    return Manifest(
        Path(),
        tuple(Shard(name, 10_000, int(1e9 * gb)) for name in names),
        tuple(names) if remote else (),
    )


LAION, DATACOMP = (41_455, 0.24), (140_000, 0.352)


@pytest.mark.parametrize(
    ("shape", "slots", "needed_gb"), [(LAION, 256, 184.32), (DATACOMP, 128, 135.168)]
)
def test_default_slots_fit_into_the_default_cache_unless_the_disk_is_small(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shape: tuple[int, float],
    slots: int,
    needed_gb: float,
) -> None:
    data, source = settings(window=4096, remote={"cache": tmp_path}), sized(*shape)
    assert count_slots(data, [source], 64) == slots
    assert count_slots(data, [sized(*shape, remote=False)], 64) == 512
    assert count_slots(data, [sized(1000, shape[1] / 10)], 64) == 512
    set_free(monkeypatch, 1e12)
    check_cache(data, [source], slots, 8, 8)
    set_free(monkeypatch, 100e9)
    with pytest.raises(
        ValueError, match=rf"{slots} slots .* {needed_gb} GB .* 90 GB; .*cache_gb={needed_gb} "
    ):
        check_cache(data, [source], slots, 8, 8)
    check_cache(data, [source], slots, 64, 8)
    # Space that the cache already uses counts as free.
    folder = ShardCache([], [], data.remote).folder
    folder.mkdir()
    (folder / f"{0:064d}.shard").write_bytes(bytes(2**20))
    assert find_limit(data.remote) == int(0.9 * (100e9 + 2**20))


def test_resumed_run_keeps_its_slots_and_refuses_another_window(
    many: tuple[Manifest, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = name_many(many, tmp_path, slots=None)
    with closing(make_loader(None, data, batch=96)) as loader:
        read_step(loader)
        state = merge_states([loader.state_dict()])
        second = [int(index) for part in read_step(loader).index for index in part]
    assert state["slots"] == 96
    # Pretend that the default was different when the checkpoint was written.
    monkeypatch.setattr("disco_ds.data.sources.load._DEFAULT_BYTES", 20 * many[0].shards[0].bytes)
    with closing(make_loader(None, data, batch=96)) as new:
        assert new.state_dict()["slots"] == 8
    with closing(make_loader(None, data, batch=96, state=state)) as loader:
        assert [int(index) for part in read_step(loader).index for index in part] == second
    other = name_many(many, tmp_path, slots=None, window=WINDOW + 1)
    with pytest.raises(ValueError, match=f"window {WINDOW}, this run has {WINDOW + 1}"):
        make_loader(None, other, batch=96, state=state)
