"""Downloads of remote shards: they are complete, retried if that may help, and their messages contain no secrets."""

import http.server
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from disco_ds.config.data import DataSettings, RemoteSettings
from disco_ds.data import DataError, Manifest, Shard, load_sources
from disco_ds.data.sources.cache import ShardCache
from disco_ds.data.sources.fetching import describe, fetch_temporary, read_version
from disco_ds.data.sources.shards import find_shards
from helpers.machine import many_open_files
from helpers.remote import ALL, fetching, open_cache, remote
from helpers.shards import make_loader, read_global, read_rank, read_step, settings
from helpers.waiting import wait_for, wait_until_gone
from helpers.web import Server, serve


def read_both(sources: Any, data: DataSettings) -> Any:
    """Read 8 steps with two ranks at the same time. Return the samples and the states."""
    loaders = [make_loader(sources, data, rank, 2) for rank in range(2)]
    try:
        return [read_rank(loader, 8) for loader in loaders], [
            loader.state_dict() for loader in loaders
        ]
    finally:
        for loader in loaders:
            loader.close()


def test_shards_of_a_server_are_those_of_the_folder(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    data = remote(
        f"{server.url}/{ALL}", shards.folder / "manifest.json", tmp_path / "cache", workers=2
    )
    assert read_both(load_sources(data), data) == read_both(shards, settings())
    # Four processes need the shards at the same time, but each shard is fetched once.
    assert server.asked == {f"/{shard.name}": 1 for shard in shards.shards}


def test_shards_of_commands_are_those_of_the_folder(shards: Manifest, tmp_path: Path) -> None:
    data = remote(
        f"pipe:cat '{shards.folder}/{ALL}' | cat",
        shards.folder / "manifest.json",
        tmp_path / "cache",
    )
    assert read_global(load_sources(data), data, 2, 4) == read_global(shards, settings(), 2, 4)


def test_transient_failures_are_tried_again(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    server.failures["/00001.tar"] = [503]
    url = server.url.replace("//", "//me:pass%20word@")
    with open_cache(shards, url, tmp_path / "cache", timeout_s=20.0).open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()
    assert server.asked == {"/00001.tar": 2}
    assert server.authorizations[-1] == "Basic bWU6cGFzcyB3b3Jk"


@pytest.mark.parametrize(
    ("failures", "tries", "words"),
    [
        ([404, 200], 1, "HTTP status 404 Not Found; tries: 1"),
        pytest.param(
            [500, 502], 2, "HTTP status 502 Bad Gateway; tries: 2", marks=pytest.mark.slow
        ),
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
    url = (
        server.url.replace("//", "//me:$DISCO_TEST_SECRET@")
        + f"/{ALL}?token=${{DISCO_TEST_SECRET}}"
    )
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
    """Fetch a shard whose first two answers break off. Return the number of bytes that were sent."""
    size = shards.shards[1].bytes
    server.broken["/00001.tar"] = [size // 4, size // 2]
    with open_cache(shards, server.url, folder, tries=4, **changes).open(1) as file:
        assert file.read() == (shards.folder / "00001.tar").read_bytes()
    return server.sent


def test_attempt_starts_over_after_a_broken_answer(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    size = shards.shards[1].bytes
    sent = fetch_broken(shards, server, tmp_path / "cache", timeout_s=20.0)
    assert sent == size + size // 4 + size // 2
    assert server.asked == {"/00001.tar": 3}


def test_shard_that_changes_between_attempts_is_fetched_from_its_beginning(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    """If the download continued at the old offset, the file would be a mixture of two versions."""
    server.broken["/00001.tar"] = [shards.shards[1].bytes // 2]
    cache = open_cache(shards, server.url, tmp_path / "cache", tries=3, timeout_s=20.0)
    changed = bytes(reversed((shards.folder / "00001.tar").read_bytes()))

    def change() -> None:
        wait_for(lambda: server.sent > 0)
        (shards.folder / "00001.tar").write_bytes(changed)
        server.tag = '"two"'

    thread = threading.Thread(target=change)
    thread.start()
    with cache.open(1) as file:
        assert file.read() == changed
    thread.join(300)


def test_shard_that_is_cut_short_or_another_is_not_kept(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    cache = open_cache(shards, server.url, tmp_path / "cache", tries=1)
    server.resume.set()
    server.halves.add("/00000.tar")
    with pytest.raises(DataError, match="the connection ended before the end of the content"):
        cache.open(0)
    path, size = shards.folder / "00001.tar", shards.shards[1].bytes
    whole = path.read_bytes()
    for content in (whole + b"x", whole[:10_240]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{len(content):,} bytes .* manifest .*{size:,};"):
            cache.open(1)
    assert [path.name for path in cache.folder.iterdir()] == [".lock"]


def test_failing_command_tells_its_status_and_nothing_else(
    shards: Manifest, tmp_path: Path
) -> None:
    names = [shard.name for shard in shards.shards]
    urls = [f"pipe:echo secret; exit 3 # {name}" for name in names]
    cache = ShardCache(
        urls,
        [Shard(name, 0, 7) for name in names],
        fetching(tmp_path / "cache", tries=1),
    )
    with pytest.raises(DataError) as error:
        cache.open(2)
    assert str(error.value) == (
        "shard 00002.tar cannot be fetched from its pipe: command: the command exited with status 3; tries: 1"
    )
    assert describe("https://u:p@h:81/x?y#z") == "https://h:81/x"


def test_command_is_read_by_a_process_with_many_open_files(tmp_path: Path) -> None:
    cache = ShardCache(["pipe:echo a shard"], [Shard("0.tar", 0, 8)], fetching(tmp_path, tries=1))
    with many_open_files(), cache.open(0) as file:
        assert file.fileno() >= 1024
        assert file.read() == b"a shard\n"


def test_command_that_hangs_is_ended_with_all_it_has_started(
    shards: Manifest, tmp_path: Path
) -> None:
    start, pids = time.monotonic(), tmp_path / "pids"
    for timeout_s, command, words in (
        (
            0.3,
            f"sleep 600 & echo $! >> {pids}; cat /dev/null; wait",
            r"nothing for 0.3 s \(a tenth of timeout_s\)",
        ),
        (
            2.0,
            f"sleep 600 >/dev/null & echo $! >> {pids}; exec >&-; wait",
            r"not exit within 2 s \(a tenth of timeout_s\)",
        ),
        (60.0, f"yes & echo $! >> {pids}; wait", r"[\d,]+ bytes .* manifest .*7;"),
    ):
        cache = ShardCache(
            [f"pipe:{command}"],
            [Shard("0.tar", 0, 7)],
            fetching(tmp_path, tries=1, timeout_s=timeout_s),
        )
        with pytest.raises(DataError, match=words):
            cache.open(0)
    assert time.monotonic() - start < 300
    wait_until_gone([int(pid) for pid in pids.read_text().split()])


def test_body_of_unknown_or_excessive_length_is_refused(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    server.endless.add("/00000.tar")
    with pytest.raises(DataError, match="the server does not state the length of the content"):
        open_cache(shards, server.url, tmp_path / "cache", tries=1).open(0)
    settings = fetching(tmp_path / "cache", cache_gb=0.005)
    for url in (f"pipe:yes # {ALL}", "pipe:cat /dev/zero"):
        with (
            pytest.raises(DataError, match=r"data.remote.cache_gb.*\(0.005 GB\); tries: 1"),
            fetch_temporary(url, "00000.tar", settings),
        ):
            pass


def test_attempts_that_last_longer_than_a_worker_may_be_silent_end_with_their_own_error(
    shards: Manifest, server: Server, tmp_path: Path
) -> None:
    """The fetch takes longer than worker_timeout_s, but each attempt is a sign of life."""
    server.stalled.update(f"/{shard.name}" for shard in shards.shards)
    data = remote(
        f"{server.url}/{ALL}",
        shards.folder / "manifest.json",
        tmp_path / "cache",
        workers=1,
        worker_timeout_s=4.0,
        remote={"timeout_s": 2.4, "tries": 3},
    )
    loader = make_loader(load_sources(data), data)
    start = time.monotonic()
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert f"cannot be fetched from {server.url}/0000" in error
    assert "timed out; tries: 3" in error
    assert time.monotonic() - start > 1.5 * data.worker_timeout_s


def test_variable_of_a_url_that_is_not_set_is_named_before_anything_is_fetched(
    shards: Manifest,
) -> None:
    url = "https://host/{00000..00007}.tar?token=$DISCO_TEST_NOT_SET"
    with pytest.raises(
        ValueError, match=r"data.shards: the environment variable DISCO_TEST_NOT_SET is not set"
    ):
        load_sources(settings(url, manifest=shards.folder / "manifest.json"))


def test_server_that_is_not_there_is_an_error(shards: Manifest, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        url = server.url
    with pytest.raises(
        DataError, match=r"from http://127.0.0.1:\d+/00000.tar: .*refused; tries: 1"
    ):
        open_cache(shards, url, tmp_path / "cache", tries=1).open(0)


class _OnlyGet(http.server.BaseHTTPRequestHandler):
    """A server for presigned URLs, which are valid only for GET."""

    def do_HEAD(self) -> None:
        self.send_error(403)

    def do_GET(self) -> None:
        assert self.headers["Range"] == "bytes=0-0"
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-0/12345")
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_size_is_read_from_a_server_that_refuses_head() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OnlyGet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/0.tar?sig=x"
        try:
            assert read_version(url, fetching(Path(), tries=1, timeout_s=60.0)).bytes == 12345
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("https://h/${TOKEN}/{0..1}.tar", ("0.tar", "1.tar")),
        ("https://h/a/{0..1}.tar?sig=${TOKEN}", ("0.tar", "1.tar")),
        ("https://h/a/x.tar?sig=${TOKEN}", ("x.tar",)),
        ("s3://b-${TOKEN}/x/{0..1}/{0..1}.tar", ("0/0.tar", "0/1.tar", "1/0.tar", "1/1.tar")),
    ],
)
def test_variable_in_braces_is_no_pattern_and_no_name(
    text: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    assert find_shards(text, RemoteSettings()).names == names
    with pytest.raises(ValueError, match="must contain braces"):
        find_shards("https://h/${TOKEN}/x", RemoteSettings())
