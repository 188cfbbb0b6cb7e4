"""`disco-ds index`: the written manifest, counting of new shards only, --check, and errors."""

import gzip
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from disco_ds.cli.main import main
from disco_ds.config.data import RemoteSettings
from disco_ds.data import Manifest, index_shards, load_manifest, load_sources
from disco_ds.data.sources.shards import NAME, find_shards, read_manifest
from disco_ds.data.sources.tar import TarIndex
from helpers.shards import SIZES, settings, write_shards, write_tar
from helpers.web import serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write shards without a manifest."""
    folder = write_shards(tmp_path / "shards", [3, 5, 2]).folder
    (folder / NAME).unlink()
    return folder


def run(*words: object) -> int:
    return main(["index", *map(str, words), "--workers=0"])


def test_index_writes_then_counts_only_what_has_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder) == 0
    assert capsys.readouterr().out == (f"{folder / NAME}: 3 shards, 10 samples\n")
    # The content changed, but neither the size nor the time: the count is kept, so the file was not read.
    path = folder / "00001.tar"
    found = path.stat()
    write_tar(path, [("0.txt", b"")])
    os.truncate(path, found.st_size)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert run(folder) == 0
    assert load_manifest(folder).sizes == [3, 5, 2]
    write_tar(path, [("0.txt", b"")])
    write_tar(folder / "00003.tar", [("0.txt", b"")])
    assert run(folder) == 0
    assert load_manifest(folder).sizes == [3, 1, 2, 1]
    # A damaged manifest is replaced.
    (folder / NAME).write_text("{")
    assert run(folder) == 0
    assert load_manifest(folder).num_samples == 7


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"a" * 10_000, mtime=0),
        b"<!DOCTYPE html><html><body>403 Forbidden</body>",
        b"",
    ],
)
def test_shard_that_is_no_tar_is_named(
    content: bytes,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder / "00001.tar").write_bytes(content)
    assert run(folder) == 0
    assert load_manifest(folder).sizes == [3, 0, 2]
    (record,) = caplog.records
    assert "00001.tar cannot be read as a tar: " in record.getMessage()
    # Without any sample, there is no manifest.
    for path in (*folder.glob("*.json*"), folder / "00000.tar", folder / "00002.tar"):
        path.unlink()
    capsys.readouterr()
    assert run(folder) == 2
    assert "has a complete sample" in capsys.readouterr().err
    assert not list(folder.glob("*.json*"))


def test_skipped_shards_are_named_and_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards, to = folder / "{00000..00020}.tar", tmp_path / "m.json"
    (folder / "00001.tar").unlink()
    assert run(shards, "--to", to, "--missing", "skip") == 0
    names = ", ".join(f"{i:05d}.tar" for i in (1, *range(3, 12)))
    assert f"left out missing shards (19): {names} and 9 more" in caplog.text
    assert [shard["name"] for shard in json.loads(to.read_text())["shards"]] == [
        "00000.tar",
        "00002.tar",
    ]
    (found,) = load_sources(settings(shards, manifest=to))
    assert found.sizes == [3, 2]
    assert run(shards, "--to", to, "--missing", "skip", "--check") == 0
    with pytest.raises(ValueError, match=r"does not list 00021\.tar"):
        load_sources(settings(folder / "{00000..00021}.tar", manifest=to))


def test_check_tells_what_has_changed_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--check") == 2
    message = capsys.readouterr().err
    assert "manifest.json is not a manifest" in message
    assert ": FileNotFoundError" in message
    run(folder)
    text = (folder / NAME).read_text()
    before = [shard.bytes for shard in load_manifest(folder).shards]
    os.utime(folder / "00002.tar", (1, 1))
    assert run(folder, "--check") == 0
    assert capsys.readouterr().out.endswith(
        f"{folder / NAME} is up to date: 3 shards, 10 samples\n"
    )
    path, whole = folder / "00001.tar", (folder / "00001.tar").read_bytes()
    write_tar(path, [("0.txt", b"")])
    os.truncate(path, len(whole))
    assert run(folder, "--check") == 1
    assert "00001.tar: 1 sample " in capsys.readouterr().out
    path.write_bytes(whole)
    write_shards(folder.parent / "other", [4])
    (folder / "00000.tar").write_bytes((folder.parent / "other" / "00000.tar").read_bytes())
    (folder / "00001.tar").rename(folder / "x.tar")
    with open(folder / "00002.tar", "ab") as file:
        file.write(b"\0" * 512)
    sizes = {i: os.path.getsize(folder / f"0000{i}.tar") for i in (0, 2)}
    assert run(folder, "--check") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"00000.tar: 4 samples ({sizes[0]:,} bytes), but 3 samples ({before[0]:,} bytes) in the manifest",
        f"00001.tar: missing, but 5 samples ({before[1]:,} bytes) in the manifest",
        f"00002.tar: 2 samples ({sizes[2]:,} bytes), but 2 samples ({before[2]:,} bytes) in the manifest",
        f"x.tar: 5 samples ({before[1]:,} bytes), but missing in the manifest",
        f"{folder / NAME} is stale: 3 shards, 11 samples",
    ]
    assert (folder / NAME).read_text() == text


def test_index_elsewhere_and_of_a_part(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = folder / "{00000..00001}.tar"
    for some in (part, tmp_path / "*/*.tar"):
        assert run(some) == 2
        assert "--to FILE" in capsys.readouterr().err
    assert run(part, "--to", tmp_path / "part.json") == 0
    assert not (folder / NAME).exists()
    (found,) = load_sources(settings(part, manifest=tmp_path / "part.json"))
    assert found.sizes == [3, 5]
    assert run(part, "--to", tmp_path / "part.json", "--check") == 0
    # Braces that name every shard of a folder count as the folder.
    assert run(folder / "{00000..00002}.tar") == 0
    assert (folder / NAME).exists()
    (folder / NAME).unlink()
    assert run(folder, "--to", tmp_path / "whole.json") == 0
    (whole,) = load_sources(settings(folder, manifest=tmp_path / "whole.json"))
    assert whole.sizes == [3, 5, 2]


def test_published_counts_are_used_and_files_that_are_not_json_are_ignored(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "sizes.json").write_text(json.dumps({"00000.tar": 2, "00001.tar": 4}))
    (folder / "00002_stats.json").write_text("{")
    assert run(folder) == 0
    assert load_manifest(folder).sizes == [2, 4, 2]
    assert f"{folder}/00002_stats.json is ignored" in caplog.text


@pytest.mark.parametrize("count", [-5, True, 10**30, 21, 2.0, "2", None, [2]])
def test_published_counts_that_are_impossible_are_not_used(folder: Path, count: Any) -> None:
    assert max(path.stat().st_size for path in folder.glob("*.tar")) == 20 * 1024
    (folder / "sizes.json").write_text(json.dumps({"00000.tar": count}))
    (folder / "00001_stats.json").write_text(json.dumps({"successes": count}))
    assert run(folder) == 0
    assert load_manifest(folder).sizes == [3, 5, 2]


def test_only_regular_files_are_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe.tar")
    (folder / "zero.tar").symlink_to("/dev/zero")
    assert run(folder) == 2
    error = capsys.readouterr().err
    assert "unreadable shards (2): " in error
    assert error.count("not a regular file") == 2
    with pytest.raises(ValueError, match=r"missing shards: pipe\.tar, zero\.tar"):
        load_sources(settings(folder, index="none", slots=1))
    (folder / "list.txt").write_text(f"00000.tar\n../{folder.name}/00000.tar\n")
    assert run(folder / "list.txt", "--to", folder / "m.json") == 2
    assert "is named twice" in capsys.readouterr().err


def test_index_of_a_server_and_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_TEST_TOKEN", "secret")
    local = write_shards(tmp_path / "shards", SIZES)
    cache = ["--cache", tmp_path / "cache"]
    with serve(local.folder) as server:
        url = f"{server.url}/{{00000..00007}}.tar?token=secret"
        assert run(url, "--to", tmp_path / "remote.json", *cache) == 0
        named = url.replace("secret", "$DISCO_TEST_TOKEN")
        (found,) = load_sources(settings(named, manifest=tmp_path / "remote.json"))
        assert run(url, "--to", tmp_path / "remote.json", "--check", *cache) == 0
        assert capsys.readouterr().out.count("8 shards, 166 samples") == 2
        (tmp_path / "cache").rename(tmp_path / "old")
        server.failures["/00003.tar"] = [403]
        assert run(url, "--to", tmp_path / "part.json", *cache) == 2
        assert (
            "error: unreadable shards (1): 00003.tar: shard 00003.tar cannot be fetched from "
            f"{server.url}/00003.tar: HTTP status 403" in (capsys.readouterr().err)
        )
        # The second call counts only what the first could not.
        before = server.asked.copy()
        assert run(url, "--to", tmp_path / "part.json", *cache) == 0
        assert server.asked - before == {"/00003.tar": 1}
        assert (tmp_path / "part.json").read_text() == (tmp_path / "remote.json").read_text()
    assert isinstance(found, Manifest)
    assert found.fingerprint == local.fingerprint
    assert [shard.bytes for shard in found.shards] == [shard.bytes for shard in local.shards]
    assert "secret" not in (tmp_path / "remote.json").read_text()
    command = f"pipe:cat {local.folder}/{{00000..00007}}.tar"
    assert run(command, "--to", tmp_path / "pipe.json") == 2
    assert "pipe:" in capsys.readouterr().err
    assert run(command, "--to", tmp_path / "pipe.json", "--pipe") == 0
    piped, remote = (read_manifest(tmp_path / name).shards for name in ("pipe.json", "remote.json"))
    assert piped == tuple(shard._replace(tag="") for shard in remote)


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified"])
def test_corrected_shard_of_the_same_size_is_fetched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tag: str
) -> None:
    local = write_shards(tmp_path / "shards", [3, 3], lambda index, _: {"txt": b"wrong %d" % index})
    path, manifest = local.folder / "00001.tar", tmp_path / "remote.json"

    def read(url: str, **changes: Any) -> bytes:
        own = RemoteSettings(cache=tmp_path / "cache")
        (found,) = load_sources(settings(url, remote=own, **{"manifest": manifest, **changes}))
        with closing(found.open(1, 1)) as reader:
            return reader.read(1, 2)["txt"]

    with serve(local.folder) as server:
        url = f"{server.url}/{{00000..00001}}.tar"
        command = (url, "--to", manifest, "--cache", tmp_path / "cache")
        if tag == "ETag":
            server.etags[f"/{path.name}"] = '"one"'
        assert run(*command) == 0
        assert read(url) == read(url, index="none", manifest=None, slots=1) == b"wrong 5"
        time = path.stat().st_mtime
        path.write_bytes(path.read_bytes().replace(b"wrong", b"right"))
        if tag == "ETag":
            server.etags[f"/{path.name}"] = '"two"'
        os.utime(path, (time, time if tag == "ETag" else time - 100))
        assert run(*command, "--check") == 1
        assert "00001.tar: 3 samples" in capsys.readouterr().out
        before = server.asked.copy()
        assert run(*command) == 0
        assert read(url) == read(url, index="none", manifest=None, slots=1) == b"right 5"
        assert server.asked["/00000.tar"] == before["/00000.tar"]
        assert run(*command, "--check") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "there is no folder none"),
        ("x.csv", "a csv file needs no manifest"),
        ("none/{0..2}.tar --to m", "missing shards (3): 0.tar, 1.tar, 2.tar"),
    ],
)
def test_index_refuses(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*text.split()) == 2
    assert words in capsys.readouterr().err


def test_data_after_the_end_mark_are_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = (folder / f"{i:05d}.tar" for i in range(3))
    data = bytearray(two.read_bytes())
    sample = data.index(b"0002.")  # the header of the third of five samples
    data[sample : sample + 512] = bytes(512)
    two.write_bytes(data)
    end = find_end(three)
    three.write_bytes(three.read_bytes() + one.read_bytes())
    with open(one, "ab") as file:
        file.write(bytes(5000))  # padding, of any length
    assert run(folder) == 0
    assert load_manifest(folder).sizes == [3, 2, 2]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"00001.tar has data after its end mark at byte {sample:,}")
    assert first.endswith("counted 2 samples")
    assert second.startswith(f"00002.tar has data after its end mark at byte {end:,}")


def find_end(path: Path) -> int:
    with open(path, "rb", buffering=0) as file:
        return TarIndex(file).end


@pytest.mark.slow
def test_error_while_counting_does_not_wait_for_the_other_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "raw", [1] * 60)
    log = tmp_path / "log"
    command = f"pipe:echo >> {log}; cat {tmp_path}/raw/{{00000..00059}}.tar"

    def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        index_shards(find_shards(command, RemoteSettings(pipe=True)), workers=1, progress=fail)
    # The worker has a few more tasks of several shards each in its queue.
    assert log.read_text().count("\n") < 40
