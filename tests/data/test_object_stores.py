"""Shards on object stores, with rclone as the server: counted without a download, read in order, and resumed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_ds.cli.main import main
from disco_ds.data import load_sources
from disco_ds.data.sources import fetching
from helpers.object_store import KEY, SECRET, Proxy, serve_rclone
from helpers.remote import remote
from helpers.shards import read_global, settings, write_shards

SIZES = [20, 31, 17, 25, 22, 19]
ALL = "{00000..00005}.tar"


def run(*args: object) -> int:
    return main(["index", *map(str, args)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "stores" / "bucket" / "part", SIZES).folder


@pytest.fixture
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    # Write the published counts first, because rclone lists a folder only once.
    (folder / "sizes.json").write_text(json.dumps({"00000.tar": 20, "00001.tar": 31}))
    for number in (2, 3, 4):
        stats = {"count": 100, "successes": SIZES[number]}
        (folder / f"{number:05d}_stats.json").write_text(json.dumps(stats))
    with serve_rclone("s3", folder.parents[1], "--auth-key", f"{KEY},{SECRET}") as proxy:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        fetching._open_store.cache_clear()
        yield proxy
    fetching._open_store.cache_clear()


def test_bucket_is_counted_by_what_it_publishes_and_read_in_the_order_of_the_folder(
    s3: Proxy, folder: Path, tmp_path: Path
) -> None:
    to, cache = tmp_path / "m.json", tmp_path / "cache"
    part = "s3://bucket/part/{00000..00004}.tar"
    assert run(part, "--to", to, "--cache", cache) == 0
    # Only listings and small files may be transferred.
    assert s3.sent < 20_000
    assert not cache.exists()
    # The last shard publishes no count, so it is fetched, and kept for the run.
    assert run(f"s3://bucket/part/{ALL}", "--to", to, "--cache", cache, "--workers", 0) == 0
    assert len(list(cache.glob("*/*.shard"))) == 1
    local = read_global(load_sources(settings(folder)), settings(folder), 2, 6)[0]
    for shards in (f"s3://bucket/part/{ALL}", "s3://bucket/part/*.tar", "s3://bucket/*/*.tar"):
        if "*/" in shards:
            assert run(shards, "--to", to, "--cache", cache, "--workers", 0) == 0
        data = remote(shards, to, cache)
        assert read_global(load_sources(data), data, 2, 6)[0] == local


def test_folder_named_by_an_environment_variable_is_listed(
    s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART_FOLDER", "part")
    to, shards = tmp_path / "m.json", "s3://bucket/${PART_FOLDER}/*.tar"
    assert run(shards, "--to", to, "--cache", tmp_path / "cache", "--workers", 0) == 0
    assert [shard["samples"] for shard in json.loads(to.read_text())["shards"]] == SIZES


def test_special_characters_of_a_key_are_part_of_it(
    s3: Proxy, folder: Path, tmp_path: Path
) -> None:
    odd = folder.parent / "run #1?"
    folder.rename(odd)
    (odd / "00000.tar").rename(odd / "#0?.tar")
    to, shards = tmp_path / "m.json", "s3://bucket/run #1?/*.tar"
    assert run(shards, "--to", to, "--cache", tmp_path / "cache", "--workers", 0) == 0
    (source,) = load_sources(remote(shards, to, tmp_path / "cache"))
    assert source.sizes == SIZES
    with source._open_cache().open(0) as file:
        assert file.read() == (odd / "#0?.tar").read_bytes()


def test_missing_shards_are_left_out_on_request(
    s3: Proxy, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, cache = tmp_path / "m.json", tmp_path / "cache"
    more = "s3://bucket/part/{00000..00007}.tar"
    assert run(more, "--to", to, "--cache", cache, "--workers", 0) == 2
    assert "missing shards (2): 00006.tar, 00007.tar" in capsys.readouterr().err
    assert not to.exists(), "with a manifest, a run would silently use only a part of the shards"
    assert len(json.loads((tmp_path / "m.json.partial").read_text())["shards"]) == 6
    before = s3.sent
    assert run(more, "--to", to, "--cache", cache, "--missing", "skip") == 0
    assert s3.sent - before < 8_000
    (found,) = load_sources(remote(more, to, cache))
    assert found.sizes == SIZES
    data = remote(more, to, cache, slots=2)
    assert len({index for step in read_global([found], data, 2, 20)[0] for index, _ in step}) > 100


def test_shard_is_whole_after_a_cut_connection(s3: Proxy, folder: Path, tmp_path: Path) -> None:
    to, cache = tmp_path / "m.json", tmp_path / "cache"
    assert run("s3://bucket/part/{00000..00004}.tar", "--to", to) == 0
    size = (folder / "00001.tar").stat().st_size
    s3.cuts += [size // 3]
    only = "s3://bucket/part/{00001..00001}.tar"
    data = remote(only, to, cache, remote={"timeout_s": 1.0, "tries": 4})
    (source,) = load_sources(data)
    with source._open_cache().open(0) as file:
        assert file.read() == (folder / "00001.tar").read_bytes()
    assert not s3.cuts


def test_wrong_credentials_are_an_error_that_names_the_reason(
    s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    assert run(f"s3://bucket/part/{ALL}", "--to", tmp_path / "m.json") == 2
    error = capsys.readouterr().err
    assert "HTTP status 403 Forbidden (SignatureDoesNotMatch)" in error
    assert "not-the-secret" not in error
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    fetching._open_store.cache_clear()
    assert run(f"s3://none/part/{ALL}", "--to", tmp_path / "m.json") == 2
    assert "HTTP status 404 Not Found (NoSuchBucket)" in capsys.readouterr().err


def test_web_server_with_a_password_and_the_hub_get_their_credentials(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_TEST_PASSWORD", "p-w")
    local = read_global(load_sources(settings(folder)), settings(folder), 2, 3)
    to, cache = tmp_path / "m.json", tmp_path / "cache"
    with serve_rclone("http", folder, "--user", "me", "--pass", "p-w") as proxy:
        shards = f"http://me:$DISCO_TEST_PASSWORD@127.0.0.1:{proxy.port}/{ALL}"
        assert run(shards, "--to", to, "--cache", cache, "--workers", 0) == 0
        data = remote(shards, to, cache)
        assert read_global(load_sources(data), data, 2, 3) == local
    store, path = fetching.locate("hf://datasets/org/name@v1/data/0.tar", 1.0)
    assert f"{store.url}/{path}".endswith("/datasets/org/name/resolve/v1/data/0.tar")
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    store, path = fetching.locate("hf://org/name/0.tar", 1.0)
    assert f"{store.url}/{path}".endswith("/org/name/resolve/main/0.tar")
    assert b"hub-token" in repr(store.client_options).encode()
