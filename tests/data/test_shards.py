"""Tar shards and their manifest: comparison with webdataset, truncated shards, and every error message."""

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

from disco_ds.data import (
    BrokenSample,
    Manifest,
    Shard,
    index_shards,
    load_manifest,
    resolve_shards,
    write_manifest,
)
from disco_ds.data.errors import DroppedSample
from disco_ds.data.sources.tar import TarReader
from helpers.shards import read_global, settings, write_shards, write_tar

LONG = "directory/" * 12 + "a" * 90
MEMBERS = [
    ("a.JPG", b"1"),
    ("a.txt", b"22"),
    ("b.txt", b"x" * 1500),
    ("__meta__", b"skipped"),
    ("b.seg.png", b"y" * 512),
    ("README", b"no extension"),
    ("dir.v1/c.txt", b""),
    (f"{LONG}.txt", b"long"),
    ("caf\u00e9.txt", b"accents"),
    ("a.txt", b"the same key again"),
]


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_member_breaks_its_sample_alone(tmp_path: Path, form: str) -> None:
    names = ["a.bmp", "a.txt", "b.bmp", "b.txt"]
    with open(tmp_path / "a.bmp", "wb") as file:
        for start in range(2**20, 64 * 2**20, 2**21):  # too many parts for one header
            file.seek(start)
            file.write(b"a" * 2**16)
    for name in names[1:]:
        (tmp_path / name).write_bytes(b"all of " + name.encode())
    make = ["tar", "-S", f"--format={form}", "-cf", "0.tar", *names]
    subprocess.run(make, cwd=tmp_path, check=True)
    reader = TarReader(tmp_path, [Shard("0.tar", 0, 0)], 1)
    assert index_shards(tmp_path).sizes == [2]
    with pytest.raises(BrokenSample, match="its bmp member is stored as a sparse file"):
        reader.read(0, 0)
    assert reader.read(0, 0, {"txt"}) == {"txt": b"all of a.txt"}
    assert reader.read(0, 1) == {"bmp": b"all of b.bmp", "txt": b"all of b.txt"}
    reader.close()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_webdataset(tmp_path: Path, form: int) -> None:
    # The longest path that ustar can hold is split into prefix and name.
    path = write_tar(tmp_path / "0.tar", MEMBERS, format=form, encoding="utf-8")
    with open(path, "rb") as file:
        samples = list(group_by_keys(tar_file_expander([{"url": "0.tar", "stream": file}])))
    expected = [{key: data for key, data in sample.items() if key[0] != "_"} for sample in samples]
    reader = TarReader(tmp_path, [Shard("0.tar", 0, 0)], 1)
    assert index_shards(tmp_path).sizes == [len(expected)]
    assert [reader.read(0, entry) for entry in range(len(expected))] == expected
    assert [reader.name(0, entry) for entry in range(len(expected))] == [
        f"0.tar/{sample['__key__']}" for sample in samples
    ]
    assert reader.read(0, 1, {"txt"}) == {"txt": b"x" * 1500}
    reader.close()


def test_repeated_extension_begins_a_new_sample(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "0.tar", [("a.jpg", b"1"), ("a.txt", b"2"), ("a.jpg", b"3"), ("a.txt", b"4")]
    )
    reader = TarReader(tmp_path, [Shard("0.tar", 0, 0)], 1)
    assert [reader.read(0, entry)["jpg"] for entry in range(2)] == [b"1", b"3"]
    reader.close()


def test_directories_and_links_are_no_members(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes(b"text")
    (tmp_path / "a" / "y.txt").symlink_to("x.txt")
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.add(tmp_path / "a", arcname="a")
    assert index_shards(tmp_path).sizes == [1]


def test_every_truncation_keeps_the_complete_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = write_tar(
        tmp_path / "whole.tar",
        [(f"{i}.{ext}", b"z" * 700) for i in range(4) for ext in ("jpg", "txt")],
    )
    data = whole.read_bytes()
    whole.unlink()
    sample = 2 * (512 + 1024)
    for size in range(sample + 512 + 700, 4 * sample + 512, 200):
        (tmp_path / "cut.tar").write_bytes(data[:size])
        caplog.clear()
        # A sample counts if it is followed by the header of the next one or by the end mark.
        assert index_shards(tmp_path).sizes == [(size - 512) // sample]
        assert "cut.tar is truncated" in caplog.text
    (tmp_path / "cut.tar").write_bytes(data[: 4 * sample + 512])
    assert index_shards(tmp_path).sizes == [4]


def test_bytes_that_are_no_header_end_the_shard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tar(tmp_path / "0.tar", [(f"{i}.txt", b"text") for i in range(5)])
    data = bytearray(path.read_bytes())
    data[3 * 1024 + 20] = 1
    path.write_bytes(data)
    assert index_shards(tmp_path).sizes == [2]
    assert "no end mark at byte 3072" in caplog.text


def test_shard_with_another_count_is_named_and_its_absent_entries_are_no_damage(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path, [3])
    reader = TarReader(tmp_path, [Shard("00000.tar", 4, 0)], 1)
    with (
        pytest.warns(UserWarning, match=r"00000.tar has 3 samples, but the manifest says 4"),
        pytest.raises(DroppedSample, match="3 samples"),
    ):
        reader.read(0, 3)
    assert reader.name(0, 3) == "00000.tar/entry 3"
    (tmp_path / "00000.tar").write_bytes(b"")
    with pytest.raises(BrokenSample, match="png member has 0 of"):
        reader.read(0, 1)
    assert reader.name(0, 1) == "00000.tar/entry 1"
    reader.close()


def test_reader_keeps_no_more_than_it_is_told(tmp_path: Path) -> None:
    write_shards(tmp_path, [2] * 70)
    reader = TarReader(tmp_path, [Shard(f"{i:05d}.tar", 2, 0) for i in range(70)], 5)
    for _ in range(2):
        assert [reader.read(shard, 1)["txt"] for shard in range(70)] == [
            b"%d" % (2 * i + 1) for i in range(70)
        ]
    assert reader._index.cache_info().currsize == 5
    assert len(reader._files) == 64
    reader.close()


def test_manifest_roundtrip(tmp_path: Path) -> None:
    calls = []
    write_shards(tmp_path, [3, 5, 1])
    manifest = index_shards(tmp_path, progress=lambda: calls.append("shard"))
    assert calls == ["shard"] * 3
    assert write_manifest(manifest) == tmp_path / "manifest.json"
    assert load_manifest(tmp_path) == manifest
    assert manifest.sizes == [3, 5, 1]
    assert manifest.num_samples == 9
    tree = json.loads((tmp_path / "manifest.json").read_text())
    assert tree["version"] == 1
    assert tree["shards"][0] == {
        "name": "00000.tar",
        "samples": 3,
        "bytes": (tmp_path / "00000.tar").stat().st_size,
        "tag": str((tmp_path / "00000.tar").stat().st_mtime_ns),
    }
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".tar") == [
        "manifest.json"
    ]


def test_indexing_with_processes_counts_the_same(tmp_path: Path) -> None:
    write_shards(tmp_path, [3, 5, 1, 2, 2])
    assert index_shards(tmp_path, workers=1) == index_shards(tmp_path)


def test_fingerprint_follows_names_and_samples_alone() -> None:
    manifest = Manifest(Path("a"), (Shard("0.tar", 5, 100), Shard("1.tar", 6, 100)))
    assert (
        manifest.fingerprint
        == Manifest(Path("b"), (Shard("0.tar", 5, 1), Shard("1.tar", 6, 1))).fingerprint
    )
    assert (
        manifest.fingerprint
        != Manifest(Path("a"), (Shard("0.tar", 6, 100), Shard("1.tar", 5, 100))).fingerprint
    )
    assert manifest.fingerprint == "355df8e02e312601"


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        load_manifest(folder)
    return str(error.value)


def test_manifest_refusals_name_the_remedy(tmp_path: Path) -> None:
    assert f"no folder {tmp_path / 'none'}" in refusal(tmp_path / "none")
    assert "no .tar file" in refusal(tmp_path)
    with pytest.raises(ValueError, match=r"no .tar file"):
        index_shards(tmp_path)

    write_shards(tmp_path, [2, 2])
    path = tmp_path / "manifest.json"
    good = path.read_text()
    command = f"disco-ds index {tmp_path}"
    path.unlink()
    assert f"{path} does not exist; index the shards" in refusal(tmp_path)
    assert command in refusal(tmp_path)
    for text, words in [
        ("{", "is not a manifest"),
        ("[]", "is not a manifest"),
        ('{"version": 1, "shards": [{"name": "0.tar"}]}', "'samples'"),
        ('{"version": 1, "shards": [{"name": "0.tar", "sample": 3}]}', "'sample'"),
        (good.replace('"samples": 2', '"samples": 0'), "no complete sample"),
    ]:
        path.write_text(text)
        assert words in refusal(tmp_path)
    path.write_text(good)
    (tmp_path / "00001.tar").rename(tmp_path / "x.tar")
    assert "missing shards: 00001.tar" in refusal(tmp_path)
    assert command in refusal(tmp_path)
    write_tar(tmp_path / "00001.tar", [("a.txt", b"a")])
    assert "manifest.json does not list x.tar; index" in refusal(tmp_path)


def test_shard_of_another_size_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_shards(tmp_path, [2, 2])
    with open(tmp_path / "00001.tar", "ab") as file:
        file.write(b"\0" * 512)
    assert load_manifest(tmp_path) == manifest
    assert "1 of 2 shards changed in size since they were counted: 00001.tar" in caplog.text
    assert "disco-ds index --check" in caplog.text


def test_shards_without_samples_are_skipped(tmp_path: Path) -> None:
    write_shards(tmp_path, [3, 0, 5, 0])
    manifest = load_manifest(tmp_path)
    assert manifest.sizes == [3, 0, 5, 0]
    (step,) = read_global(manifest, settings(slots=1), 1, 1, batch=8)[0]
    assert {index for index, _ in step} == set(range(8))


def test_manifest_messages_name_a_few_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, [1] * 8)
    for i in range(7):
        (tmp_path / f"{i:05d}.tar").unlink()
    names = ", ".join(f"{i:05d}.tar" for i in range(5))
    assert f"{names} and 2 more" in refusal(tmp_path)


def test_resolve_shards() -> None:
    assert resolve_shards("some/folder") == Path("some/folder")
    assert resolve_shards("~/x") == Path.home() / "x"
    assert resolve_shards("bundled:emoji/train").is_dir()


class _RecordingFile(io.FileIO):
    """A file that records the bytes of each read."""

    def __init__(self, path):
        super().__init__(path)
        self.reads = []

    def read(self, size=-1):
        data = super().read(size)
        self.reads.append(len(data))
        return data


@pytest.mark.parametrize("whole", [True, False])
def test_a_shard_is_read_sequentially_before_its_scan_unless_it_is_large(tmp_path, whole):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 2**20
            tar.addfile(member, io.BytesIO(bytes(2**20)))
    size = path.stat().st_size
    if not whole:
        os.truncate(path, 3 * 2**30)  # zeros after the end mark, which take no space
    file = _RecordingFile(path)
    reader = TarReader(tmp_path, [Shard("0.tar", 0, 0)], 1, lambda shard: file)
    assert reader.read(0, 2) == {"txt": bytes(2**20)}
    reader.close()
    if whole:
        assert sum(file.reads[: file.reads.index(0)]) == size
    else:
        assert sum(file.reads) < 2**16
