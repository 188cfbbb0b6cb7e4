"""Shards by braces, from a web server and from commands: named, allowed, fetched once, kept within bounds."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from disco_ds.config.data import DataSettings, RemoteSettings
from disco_ds.data import DataError, Manifest, list_shards, load_sources
from disco_ds.data.fetching import describe, fetch_temporary
from disco_ds.data.shard_cache import ShardCache
from disco_ds.data.tar import CacheFullError, TarReader
from helpers.paths import ROOT
from helpers.shards import SIZES, make_loader, read_global, read_rank, read_step, settings, write_shards
from helpers.web import Server, serve

ALL = "{00000..00007}.tar"


@pytest.fixture
def shards(tmp_path: Path) -> Manifest:
    return write_shards(tmp_path / "shards", SIZES)


@pytest.fixture
def server(shards: Manifest) -> Iterator[Server]:
    with serve(shards.folder) as server:
        yield server


def remote(shards: str, manifest: Path | None, cache: Path, **changes: Any) -> DataSettings:
    own = {"http": True, "pipe": True, "cache": cache, "tries": 2, "timeout_s": 20.0, **changes.pop("remote", {})}
    return settings(shards, manifest=manifest, remote=own, **changes)


def open_cache(shards: Manifest, url: str, folder: Path, **changes: Any) -> ShardCache:
    names = [shard.name for shard in shards.shards]
    urls = [f"{url}/{name}" for name in names]
    options = RemoteSettings(**{"cache": folder, "tries": 2, "timeout_s": 20.0, **changes})
    return ShardCache(urls, names, [shard.bytes for shard in shards.shards], options)


# Names


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
        ("http://h/get?part={0..1}&key=k", ["0", "1"], "http://h/get?part=0&key=k"),
        (
            "pipe:curl -s 's3://b/{x,y}/{0..1}.tar' | cat",
            ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"],
            "pipe:curl -s 's3://b/x/0.tar' | cat",
        ),
        ("pipe:cat /x/one.tar", ["one.tar"], "pipe:cat /x/one.tar"),
    ],
)
def test_shards_by_braces_have_names_without_secrets(text: str, names: list[str], first: str | None) -> None:
    listing = list_shards(text)
    assert list(listing.names) == names
    assert listing.urls[:1] == ((first,) if first else ())
    assert len(listing.urls) in (0, len(names))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/data/{0..", "do not match"),
        ("/data/{a,a}.tar", "names a shard twice"),
        ("http://h/shards", "names its shards by braces"),
        ("pipe:aws s3 ls", "names its shards by braces"),
    ],
)
def test_shards_by_braces_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list_shards(text)


def test_local_braces_take_their_part_of_the_folders_manifest(shards: Manifest, tmp_path: Path) -> None:
    (part,) = load_sources(settings(shards.folder / "{00002..00004}.tar"))
    assert isinstance(part, Manifest)
    assert part.shards == shards.shards[2:5]
    (one,) = load_sources(settings(shards.folder / "00007.tar"))
    assert one.sizes == SIZES[7:]
    (whole,) = load_sources(settings(shards.folder / ALL))
    assert whole.fingerprint == shards.fingerprint
    with pytest.raises(ValueError, match=r"data.shards: .*manifest.json does not list 00008.tar, 00009.tar; count"):
        load_sources(settings(shards.folder / "{00007..00009}.tar"))
    with pytest.raises(
        ValueError, match=r"there is no .*manifest.json; count the shards: disco-ds index 'SHARDS' --to"
    ):
        load_sources(settings(tmp_path / "{a,b}.tar"))
    (shards.folder / "00003.tar").unlink()
    with pytest.raises(ValueError, match=r"has no 00003.tar"):
        load_sources(settings(shards.folder / ALL))


def test_remote_shards_are_off_unless_allowed(tmp_path: Path) -> None:
    both = settings(shards=None, sources=[{"shards": "http://h/{0..1}.tar"}, {"shards": "pipe:touch /x {0..1}.tar"}])
    with pytest.raises(ValueError, match=r"data.sources\[0\]: .* data.remote.http=true"):
        load_sources(both)
    only = both.model_copy(update={"remote": RemoteSettings(http=True)})
    manifest = tmp_path / "m.json"
    manifest.write_text(
        json.dumps({"version": 1, "shards": [{"name": f"{i}.tar", "samples": 1, "bytes": 1} for i in (0, 1)]})
    )
    parts = [part.model_copy(update={"manifest": manifest}) for part in both.sources or ()]
    with pytest.raises(
        ValueError, match=r"data.sources\[1\]: a pipe: runs its command in a shell.*data.remote.pipe=true"
    ):
        load_sources(only.model_copy(update={"sources": tuple(parts)}))
    with pytest.raises(ValueError, match=r"data.shards: remote shards need a manifest; count them: disco-ds index"):
        load_sources(settings("http://h/{0..1}.tar", remote={"http": True}))
    with pytest.raises(ValueError, match=r"s3:// is not read directly: .* or a pipe:"):
        load_sources(settings("s3://b/{0..1}.tar", remote={"http": True, "pipe": True}))


# Fetching


def read_both(sources: Any, data: DataSettings) -> Any:
    """What two ranks at a time read in 8 steps, and where they stand then."""
    loaders = [make_loader(sources, data, rank, 2) for rank in range(2)]
    try:
        return [read_rank(loader, 8) for loader in loaders], [loader.state_dict() for loader in loaders]
    finally:
        for loader in loaders:
            loader.close()


def test_shards_of_a_server_are_those_of_the_folder(shards: Manifest, server: Server, tmp_path: Path) -> None:
    data = remote(f"{server.url}/{ALL}", shards.folder / "manifest.json", tmp_path / "cache", workers=2)
    assert read_both(load_sources(data), data) == read_both(shards, settings())
    # Four processes want them at once, and each comes over the wire once.
    assert server.asked == {f"/{shard.name}": 1 for shard in shards.shards}


def test_shards_of_commands_are_those_of_the_folder(shards: Manifest, tmp_path: Path) -> None:
    data = remote(f"pipe:cat '{shards.folder}/{ALL}' | cat", shards.folder / "manifest.json", tmp_path / "cache")
    assert read_global(load_sources(data), data, 2, 4) == read_global(shards, settings(), 2, 4)


def test_passing_failures_are_tried_again(shards: Manifest, server: Server, tmp_path: Path) -> None:
    server.failures["/00001.tar"] = [503]
    with open_cache(shards, server.url.replace("//", "//me:pass%20word@"), tmp_path / "cache").open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()
    assert server.asked == {"/00001.tar": 2}
    assert server.authorizations[-1] == "Basic bWU6cGFzcyB3b3Jk"


@pytest.mark.parametrize(
    ("failures", "tries", "words"),
    [
        ([404, 200], 1, "HTTP status 404 Not Found; tries: 1"),
        pytest.param([500, 502], 2, "HTTP status 502 Bad Gateway; tries: 2", marks=pytest.mark.slow),
    ],
)
def test_lasting_failure_names_url_and_status_without_secrets(
    shards: Manifest,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: list[int],
    tries: int,
    words: str,
) -> None:
    server.failures["/00001.tar"] = failures
    monkeypatch.setenv("DISCO_TEST_SECRET", "secret")
    url = server.url.replace("//", "//me:$DISCO_TEST_SECRET@") + f"/{ALL}?token=${{DISCO_TEST_SECRET}}"
    data = remote(url, shards.folder / "manifest.json", tmp_path / "cache", slots=2)
    loader = make_loader(load_sources(data), data, batch=160)
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert f"shard 00001.tar cannot be fetched from {server.url}/00001.tar: {words}" in error
    assert "secret" not in error
    assert server.asked["/00001.tar"] == tries
    assert server.authorizations[-1] == "Basic bWU6c2VjcmV0"
    assert not list(tmp_path.glob("cache/**/*.partial"))


def fetch_broken(shards: Manifest, server: Server, folder: Path, **changes: Any) -> int:
    """Fetch a shard whose first two answers break off. Returns: how many bytes were sent."""
    size = shards.shards[1].bytes
    server.broken["/00001.tar"] = [size // 4, size // 2]
    with open_cache(shards, server.url, folder, tries=4, **changes).open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()
    return server.sent


def test_attempt_goes_on_where_the_one_before_has_failed(shards: Manifest, server: Server, tmp_path: Path) -> None:
    assert fetch_broken(shards, server, tmp_path / "cache", timeout_s=0.5) == shards.shards[1].bytes
    assert server.asked == {"/00001.tar": 3}


@pytest.mark.parametrize("tag", [None, 'W/"weak"'])
def test_without_a_strong_version_an_attempt_begins_anew(
    shards: Manifest, server: Server, tmp_path: Path, tag: str | None
) -> None:
    server.tag = tag
    size = shards.shards[1].bytes
    assert fetch_broken(shards, server, tmp_path / "cache", timeout_s=0.5) == size + size // 4 + size // 2


@pytest.mark.parametrize("ignores_if_range", [False, True])
def test_shard_that_changes_between_attempts_is_fetched_from_its_beginning(
    shards: Manifest, server: Server, tmp_path: Path, ignores_if_range: bool
) -> None:
    """Or else the file would be put together from two contents."""
    server.ignores_if_range = ignores_if_range
    server.broken["/00001.tar"] = [shards.shards[1].bytes // 2]
    cache = open_cache(shards, server.url, tmp_path / "cache", tries=3, timeout_s=2.0)
    changed = bytes(reversed((shards.folder / "00001.tar").read_bytes()))

    def change() -> None:
        wait_for(lambda: server.sent > 0)
        (shards.folder / "00001.tar").write_bytes(changed)
        server.tag = '"two"'

    thread = threading.Thread(target=change)
    thread.start()
    with cache.open(1) as file:
        assert file.read() == changed
    thread.join(20)


@pytest.mark.parametrize("said", ["bytes 0-5/6", "bytes 1-2/3", "nonsense", "bytes 99999999-99999999/*"])
def test_answer_with_another_range_is_not_written_into_the_shard(
    shards: Manifest, server: Server, tmp_path: Path, said: str
) -> None:
    server.content_range = said
    assert fetch_broken(shards, server, tmp_path / "cache", timeout_s=0.5) > shards.shards[1].bytes


def test_shard_that_is_cut_short_or_another_is_not_kept(shards: Manifest, server: Server, tmp_path: Path) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache", tries=1)
    server.resume.set()
    server.halves.add("/00000.tar")
    size = shards.shards[0].bytes
    with pytest.raises(DataError, match=f"the connection ended after {size // 2:,} of {size:,} bytes"):
        cache.open(0)
    for change, words in ((b"x", f"more than {shards.shards[1].bytes:,}"), (None, "10,240 of")):
        path = shards.folder / "00001.tar"
        path.write_bytes(path.read_bytes() + change if change else path.read_bytes()[:10_240])
        with pytest.raises(DataError, match=f"{words}.* bytes as its manifest counts them; if it was written anew"):
            cache.open(1)
    assert [path.name for path in cache.folder.iterdir()] == [".lock"]


def test_failing_command_tells_its_status_and_nothing_else(shards: Manifest, tmp_path: Path) -> None:
    names = [shard.name for shard in shards.shards]
    urls = [f"pipe:echo secret; exit 3 # {name}" for name in names]
    cache = ShardCache(urls, names, [7] * len(names), RemoteSettings(cache=tmp_path / "cache", tries=1))
    with pytest.raises(DataError) as error:
        cache.open(2)
    assert str(error.value) == (
        "shard 00002.tar cannot be fetched from its pipe:: the command ended with status 3; tries: 1"
    )
    assert describe("https://u:p@h:81/x?y#z") == "https://h:81/x"


def test_command_that_hangs_is_ended_with_all_it_has_started(shards: Manifest, tmp_path: Path) -> None:
    start, pids = time.monotonic(), tmp_path / "pids"
    for command, words in (
        (f"sleep 600 & echo $! >> {pids}; cat /dev/null; wait", "wrote nothing for data.remote.timeout_s=0.3 s"),
        (f"sleep 600 >/dev/null & echo $! >> {pids}; exec >&-; wait", "did not end within data.remote.timeout_s=0.3 s"),
        (f"yes & echo $! >> {pids}; wait", "more than 7 bytes as its manifest counts them"),
    ):
        cache = ShardCache([f"pipe:{command}"], ["0.tar"], [7], RemoteSettings(cache=tmp_path, tries=1, timeout_s=0.3))
        with pytest.raises(DataError, match=words):
            cache.open(0)
    assert time.monotonic() - start < 20
    for pid in pids.read_text().split():
        with suppress(FileNotFoundError):  # ended; or a zombie, where nobody reaps it
            assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_body_without_a_length_is_read_no_further_than_the_shard_may_be(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    server.endless.add("/00000.tar")
    with pytest.raises(DataError, match=f"more than {shards.shards[0].bytes:,} bytes as its manifest counts them"):
        open_cache(shards, server.url, tmp_path / "cache", tries=1).open(0)
    settings = RemoteSettings(tries=2, cache_gb=0.005)
    with (
        pytest.raises(DataError, match=r"more than data.remote.cache_gb \(0.005 GB\), .* tries: 1"),
        fetch_temporary(f"{server.url}/00000.tar", "00000.tar", settings),
    ):
        pass
    assert server.sent < 50e6


def test_attempts_that_last_longer_than_a_worker_may_be_silent_end_with_their_own_error(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    """Each attempt is a sign of life, and the fetch lasts longer than data.timeout_s."""
    server.stalled.update(f"/{shard.name}" for shard in shards.shards)
    data = remote(
        f"{server.url}/{ALL}",
        shards.folder / "manifest.json",
        tmp_path / "cache",
        workers=1,
        timeout_s=2.0,
        remote={"timeout_s": 1.2, "tries": 3},
    )
    loader = make_loader(load_sources(data), data)
    start = time.monotonic()
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert f"cannot be fetched from {server.url}/0000" in error
    assert "timed out; tries: 3" in error
    assert time.monotonic() - start > 1.5 * data.timeout_s


def test_variable_of_a_url_that_is_not_set_is_named_before_anything_is_fetched(shards: Manifest) -> None:
    url = "https://host/{00000..00007}.tar?token=$DISCO_TEST_NOT_SET"
    with pytest.raises(ValueError, match=r"data.shards: the environment variable DISCO_TEST_NOT_SET is not set"):
        load_sources(settings(url, manifest=shards.folder / "manifest.json", remote={"http": True}))


def test_server_that_is_not_there_is_an_error(shards: Manifest, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        url = server.url
    with pytest.raises(DataError, match=r"from http://127.0.0.1:\d+/00000.tar: .*refused; tries: 1"):
        open_cache(shards, url, tmp_path / "cache", tries=1).open(0)


# The cache


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_cache_keeps_its_bounds_and_what_is_read(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "even", [10] * 8)
    with serve(shards.folder) as server:
        check_bounds(shards, server, tmp_path)


def check_bounds(shards: Manifest, server: Server, tmp_path: Path) -> None:
    limit = 3.5 * shards.shards[0].bytes
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=limit / 1e9)
    held = cache.open(0)
    for shard in (1, 2, 3, 4, 1, 5, 6, 7):
        cache.open(shard).close()
        assert size_of(cache.folder) <= limit
        assert os.fstat(held.fileno()).st_nlink == 1
    assert server.asked["/00000.tar"] == 1
    assert server.asked["/00001.tar"] in (1, 2)
    # All of it in use: an error that says what to do. A process that reads more than fits lets go of its own.
    files = [held, cache.open(6), cache.open(7)]
    with pytest.raises(
        CacheFullError,
        match=r"there is no room for a shard of [\d,]+ bytes in .*: [\d,]+ bytes are being read, data.remote.cache_gb",
    ):
        cache.open(1)
    for file in files:
        file.close()
    reader = TarReader(cache.folder, [shard.name for shard in shards.shards], 8, cache.open)
    with pytest.warns(UserWarning, match="cache_gb is small"):
        texts = [reader.read(shard, 1)["txt"] for shard in range(8)]
    reader.close()
    local = TarReader(shards.folder, [shard.name for shard in shards.shards], 8)
    assert texts == [local.read(shard, 1)["txt"] for shard in range(8)]
    local.close()
    assert size_of(cache.folder) <= limit


def test_files_of_the_user_stay_and_are_neither_read_nor_counted(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    sizes = [shard.bytes for shard in shards.shards]
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=1.5 * max(sizes) / 1e9)
    cache.open(0).close()
    (first,) = cache.folder.glob("*.shard")
    mine = [
        folder / name
        for folder in (tmp_path / "cache", cache.folder)
        for name in ("mine.tar", "mine.shard", "x.partial", f"{first.stem[:32]}.tar", f"{first.stem}.tar")
    ]
    for path in mine:
        path.write_bytes(path.name.encode() * 100_000)
        os.utime(path, (0, 0))  # the longest unused
    (cache.folder / f"{'0' * 64}.shard").symlink_to(mine[0])
    for shard in (1, 2, 1, 0):
        with cache.open(shard) as file:
            assert file.read() == (shards.folder / f"0000{shard}.tar").read_bytes()
    assert [path.read_bytes() for path in mine] == [path.name.encode() * 100_000 for path in mine]


def test_folders_and_files_of_the_cache_are_the_users_alone(shards: Manifest, server: Server, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = open_cache(shards, server.url, tmp_path / "a" / "b")
        cache.open(0).close()
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a" / "b", cache.folder]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700"] * 3
    assert {oct(path.stat().st_mode & 0o777) for path in cache.folder.iterdir()} == {"0o600"}


def test_cached_shard_that_was_cut_short_is_fetched_again(shards: Manifest, server: Server, tmp_path: Path) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    cache.open(1).close()
    (path,) = cache.folder.glob("*.shard")
    os.truncate(path, 512)
    with cache.open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()
    assert server.asked == {"/00001.tar": 2}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link", "it is a link"),
        ("pipe", "it is not a regular file"),
        ("foreign", r"it belongs to user \d+"),
    ],
)
def test_file_in_the_place_of_a_cached_shard_is_refused(
    shards: Manifest, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    cache.open(1).close()
    (path,) = cache.folder.glob("*.shard")
    content = path.read_bytes()
    if kind == "foreign":
        owners = {path.stat().st_ino: os.geteuid() + 1}
        change_owners(monkeypatch, owners)
    else:
        path.unlink()
        (tmp_path / "other").write_bytes(content)
        path.symlink_to(tmp_path / "other") if kind == "link" else os.mkfifo(path)
    with pytest.raises(DataError, match=f"{path} is in the way of a cached shard: {words}; remove it"):
        cache.open(1)
    assert server.asked == {"/00001.tar": 1}
    assert os.path.lexists(path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link", "a link"),
        ("open", "writable by others"),
        ("foreign", r"of user \d+"),
    ],
)
def test_cache_in_a_folder_of_somebody_else_is_refused(
    shards: Manifest, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache")
    cache.folder.parent.mkdir()
    if kind == "link":
        (tmp_path / "other").mkdir(0o700)
        cache.folder.symlink_to(tmp_path / "other")
    else:
        cache.folder.mkdir(0o700)
        cache.folder.chmod(0o777 if kind == "open" else 0o700)
    if kind == "foreign":
        change_owners(monkeypatch, {cache.folder.stat().st_ino: os.geteuid() + 1})
    with pytest.raises(DataError, match=f"{cache.folder} must be a folder of this user alone, and is {words}"):
        cache.open(1)
    assert not server.asked
    assert not list(cache.folder.iterdir())


def change_owners(monkeypatch: pytest.MonkeyPatch, owners: dict[int, int]) -> None:
    """Files as if another user had made them, by inode; a real one would take root."""
    for name in ("fstat", "lstat"):
        real = getattr(os, name)

        def found(path: Any, *, real: Any = real, **kwargs: Any) -> os.stat_result:
            fields = list(real(path, **kwargs))
            fields[4] = owners.get(fields[1], fields[4])
            return os.stat_result(fields)

        monkeypatch.setattr(os, name, found)


def test_shard_that_is_being_fetched_is_waited_for_and_has_its_room(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    server.halves.add("/00001.tar")
    limit = shards.shards[1].bytes + shards.shards[0].bytes / 2
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=limit / 1e9)
    found: list[bytes] = []

    def read() -> None:
        with cache.open(1) as file:
            found.append(file.read())

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.asked["/00001.tar"] > 0)
    with pytest.raises(CacheFullError):
        cache.open(0)
    time.sleep(0.2)
    assert not found
    server.halves.clear()
    server.resume.set()
    for thread in threads:
        thread.join(20)
    assert found == [(shards.folder / "00001.tar").read_bytes()] * 3
    assert server.asked == {"/00001.tar": 1}


FETCH = """
import pickle, sys
pickle.loads(bytes.fromhex(sys.argv[1])).open(1)
"""


def start_fetch(cache: ShardCache) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", FETCH, pickle.dumps(cache).hex()]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})


def test_process_that_waits_for_a_fetch_does_not_wait_for_its_readers(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    """It is stopped until the shard is there and read, so that its turn comes when the readers hold the lock."""
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=1.0)
    server.halves.add("/00001.tar")
    thread = threading.Thread(target=lambda: held.append(cache.open(1)))
    held: list[Any] = []
    thread.start()
    wait_for(lambda: server.asked["/00001.tar"] == 1)
    with start_fetch(cache) as process:
        (partial,) = cache.folder.glob("*.partial")
        wait_for(lambda: str(partial) in opened_by(process.pid))
        process.send_signal(signal.SIGSTOP)
        server.halves.clear()
        server.resume.set()
        thread.join(20)
        process.send_signal(signal.SIGCONT)
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
    held[0].close()
    assert server.asked == {"/00001.tar": 1}


def opened_by(pid: int) -> set[str]:
    """Files that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return found


def test_fetch_that_is_killed_leaves_no_trace(shards: Manifest, server: Server, tmp_path: Path) -> None:
    server.halves.add("/00001.tar")
    cache = open_cache(shards, server.url, tmp_path / "cache", cache_gb=1.5 * shards.shards[1].bytes / 1e9)
    with start_fetch(cache) as process:
        wait_for(lambda: server.asked["/00001.tar"] == 1)
        (partial,) = cache.folder.glob("*.partial")
        with open(partial, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
    server.halves.clear()
    # What it had begun neither blocks the next fetch nor takes the room of another shard.
    cache.open(0).close()
    assert not list(cache.folder.glob("*.partial"))
    with cache.open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
