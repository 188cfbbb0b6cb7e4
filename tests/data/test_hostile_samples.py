"""Malicious samples: each is skipped, named and counted, and all others are read normally."""

import errno
import io
import itertools
import os
import tarfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from webdataset.tariterators import base_plus_ext

from disco_ds.data import (
    BrokenSample,
    ImageFolder,
    Manifest,
    Shard,
    index_shards,
    load_sources,
)
from disco_ds.data.captions import fill_template, shorten_caption
from disco_ds.data.errors import read_patiently, read_regular
from disco_ds.data.images import decode_image
from disco_ds.data.sources.tar import TarReader, split_name
from helpers.shards import (
    encode,
    make_loader,
    make_sample,
    read_step,
    settings,
    tokenize,
    write_shards,
)

Members = list[tuple[tarfile.TarInfo, bytes]]


BAD = {
    "nested JSON": {"json": b'{"label": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"},
    "a tokenizer that raises": {"json": b'{"label": "upset"}'},
    "a tokenizer that cannot read": {"json": b'{"label": "unreadable"}'},
    "a lone surrogate": {"json": b'{"label": "\\ud800"}'},
    "a huge number": {"json": b'{"label": ' + b"9" * 5000 + b"}"},
    "an image without height": {
        "png": encode(Image.new("RGB", (10, 10)), "GIF").replace(b"\n\0\n\0", b"\n\0\0\0")
    },
    "an image of a line": {"png": encode(Image.new("L", (90_000_000, 1)), "PNG")},
}


def upset(texts: list[str]) -> torch.Tensor:
    if texts == ["upset"]:
        raise RuntimeError("the tokenizer is upset")
    if texts == ["unreadable"]:
        raise OSError("this is not an error of the shard")
    return tokenize(texts)


@pytest.mark.parametrize("what", BAD)
def test_sample_costs_itself_alone(tmp_path: Path, what: str) -> None:
    (line,) = check_costs(
        write_shards(
            tmp_path, [12], lambda i, sample: {**sample, **BAD[what]} if i == 4 else sample
        ),
        {4},
    )
    assert line.startswith("00000.tar/0004: ")


def test_samples_cost_themselves_alone_in_a_worker(tmp_path: Path) -> None:
    bad = list(BAD.values())
    manifest = write_shards(
        tmp_path, [30], lambda i, sample: {**sample, **(bad[i] if i < len(bad) else {})}
    )
    check_costs(manifest, set(range(len(bad))), workers=1, max_broken=1.0)


def check_costs(manifest: Manifest, lost: set[int], **changes: Any) -> set[str]:
    """Read one epoch, check that only `lost` is skipped, and return the reports on broken samples."""
    captions = {"{json[label]}": 1.0}
    loader = make_loader(
        manifest, settings(captions=captions, **changes), batch=manifest.num_samples, tokenize=upset
    )
    data = read_step(loader)
    loader.close()
    assert data.error is None
    read = {i for batch in data.micro_batches for i in batch["index"].tolist()}
    assert read == set(range(manifest.num_samples)) - lost
    assert loader.position.broken == len(data.broken) >= len(lost)
    assert len(set(data.broken)) == len(lost)
    assert all(len(line) < 800 for line in data.broken)
    return set(data.broken)


def header(name: str, size: int, data: bytes = b"", pax: dict[str, str] | None = None) -> bytes:
    """Return a header that claims `size` bytes, in base 256 if the size does not fit in octal digits."""
    info = tarfile.TarInfo(name)
    info.pax_headers = pax or {}
    form = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    block = bytearray(info.tobuf(form))
    field = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    block[-512 + 124 : -512 + 136] = field
    block[-512 + 148 : -512 + 156] = b"        "
    block[-512 + 148 : -512 + 156] = b"%06o\0 " % sum(block[-512:])
    return bytes(block) + data + bytes(-len(data) % 512)


def sparse(size: int) -> bytes:
    """Return a member of 1,024 bytes that represents a sparse file of `size` bytes."""
    data = b"1\n%d\n512\n" % (size - 512)
    pax = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "bad.png",
        "GNU.sparse.realsize": str(size),
    }
    return header("bad.png", 1024, data + bytes(1024 - len(data)), pax)


END = bytes(1024)
GOOD = header("a.png", 3, b"png") + header("a.txt", 1, b"a") + header("b.png", 3, b"png")
"""Two samples; the second counts as complete only when another one follows."""
AFTER = header("z.png", 3, b"png")


@pytest.mark.parametrize(
    ("blocks", "counted", "broken"),
    [
        (sparse(2**45) + AFTER, 4, {2}),
        (header("bad.png", 2**45), 2, set()),
        (header("bad.png", 2**63 - 1), 2, set()),
        (header("bad.png", 2**63), 2, set()),
        (header("bad.png", -1) + AFTER, 4, {2}),
        (header("bad.png", -512) + AFTER, 2, set()),
        (header("bad.png", -(2**40)) + AFTER, 2, set()),
        (header("bad.png", 0, pax={"size": "-1024"}) + AFTER, 2, set()),
        (header("bad.png", 0, pax={"size": str(2**70)}) + AFTER, 2, set()),
        (header("bad.png", 0, pax={"GNU.sparse.map": "x"}) + AFTER, 1, set()),
    ],
)
def test_header_of_any_size_ends_the_shard_or_costs_its_sample(
    tmp_path: Path, blocks: bytes, counted: int, broken: set[int]
) -> None:
    (tmp_path / "0.tar").write_bytes(GOOD + blocks + END)
    start = time.process_time()
    assert index_shards(tmp_path).sizes == [counted]
    with closing(TarReader(tmp_path, [Shard("0.tar", counted, 0)], 1)) as reader:
        assert reader.read(0, 0) == {"png": b"png", "txt": b"a"}
        for entry in range(1, counted):
            if entry in broken:
                with pytest.raises(BrokenSample, match="its png member is"):
                    reader.read(0, entry)
            else:
                assert reader.read(0, entry) == {"png": b"png"}
    assert time.process_time() - start < 2


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [2**45, -512, -1, 2**30, 2**63])
def test_header_of_a_name_has_any_size(tmp_path: Path, kind: bytes, size: int) -> None:
    block = bytearray(header("bad", size)[:512])
    block[156:157] = kind
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "0.tar").write_bytes(GOOD + bytes(block) + AFTER + END)
    (counted,) = index_shards(tmp_path).sizes
    assert counted == 1 or size == -1  # tarfile rounds -1 up to 0 blocks and continues
    # Thousands of such headers in a row.
    block[124:136] = tarfile.itn(0, 12, tarfile.GNU_FORMAT)
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "0.tar").write_bytes(GOOD + bytes(block) * 3000 + AFTER + END)
    assert index_shards(tmp_path).sizes[0] in (1, 3)


@pytest.mark.parametrize(
    "name", ["caf\udce9", "new\nline\x1b[31m", "tab\there", "\udcff\udcfe", "a" * 300]
)
def test_names_are_told_on_one_line_of_utf8(tmp_path: Path, name: str) -> None:
    members = [
        (f"{name}{i}.{kind}", data) for i in range(4) for kind, data in make_sample(i).items()
    ]
    members = [(key, b"" if key == f"{name}1.png" else data) for key, data in members]
    with tarfile.open(
        tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT, errors="surrogateescape"
    ) as tar:
        for key, data in members:
            info = tarfile.TarInfo(key)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    loader = make_loader(index_shards(tmp_path), settings(), batch=4)
    data = read_step(loader)
    loader.close()
    assert data.error is None
    (line,) = set(data.broken)
    assert line.isprintable()
    assert line.encode().decode() == line
    assert line.endswith("it begins with b''")


def test_name_of_slashes_takes_no_time(tmp_path: Path) -> None:
    start = time.process_time()
    for name in (
        "/" * 40_000 + "a.png",
        "a" + "/." * 20_000,
        "." + "/" * 40_000,
        "/" * 40_000 + "\n.png",
    ):
        (tmp_path / "0.tar").write_bytes(header(name, 3, b"png") + AFTER + END)
        index_shards(tmp_path)
    assert time.process_time() - start < 2


def test_names_are_split_as_webdataset_splits_them() -> None:
    for length in range(8):
        for letters in itertools.product("a./", repeat=length):
            name = "".join(letters)
            # Hidden files are skipped. webdataset would take their folder for the key.
            expected = (
                (None, None) if name.rpartition("/")[2].startswith(".") else base_plus_ext(name)
            )
            assert (split_name(name) or (None, None)) == expected, repr(name)


@pytest.mark.parametrize("kind", ["device", "pipe", "link", "folder", "endless", "huge"])
def test_row_or_file_that_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "images" / "cat"
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f"{i}.png").write_bytes(make_sample(i)["png"])
    bad = folder / "1.png"
    bad.unlink()
    ways: dict[str, Callable[[], object]] = {
        "device": lambda: bad.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(bad),
        "link": lambda: bad.symlink_to(bad),
        "folder": bad.mkdir,
        "endless": lambda: bad.symlink_to("/proc/kcore"),
        "huge": lambda: (bad.touch(), os.truncate(bad, 2**40)),
    }
    ways[kind]()
    path = tmp_path / "images" / "pairs.csv"
    path.write_text("filepath,title\n" + "".join(f"cat/{i}.png,{i}\n" for i in range(4)))
    data = settings(path, image_key="filepath", captions={"{title}": 1.0}, slots=1)
    start = time.monotonic()
    loader = make_loader(None, data, batch=4)
    step = read_step(loader)
    loader.close()
    assert step.error is None
    assert step.broken
    assert all(line.startswith("pairs.csv/line 3: ") for line in step.broken)
    source = ImageFolder(tmp_path / "images")
    with pytest.raises(BrokenSample):
        source.read(0, 1)
    assert time.monotonic() - start < 100


def test_caption_is_shortened_where_a_tokenizer_would_take_long() -> None:
    for text in (
        "a b",
        "x" * 2048,
        "\u732b" * 682,
        "word " * 3000,
        "\n".join(["line of words"] * 900),
        "\ud800 b",
    ):
        assert shorten_caption(text) == text
    assert shorten_caption("a " + "x" * 16_000 + " b") == "a " + "x" * 2048 + " b"
    assert shorten_caption("\u732b" * 1000) == "\u732b" * 682
    assert shorten_caption("a\x1cb" * 6000) == ("a\x1cb" * 6000)[:2048]
    assert len(shorten_caption("word " * 10_000)) == 2**14


def test_images_are_bounded_by_their_pixels_in_every_format() -> None:
    webp = encode(Image.new("RGB", (400, 200)), "WEBP")
    assert decode_image(webp, 80_000).size == (400, 200)
    with pytest.raises(BrokenSample, match="400 x 200 pixels"):
        decode_image(webp, 79_999)


def test_json_is_read_in_every_encoding() -> None:
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        assert fill_template("{json[a]}", {"json": '{"a": "b"}'.encode(encoding)}) == "b"


@pytest.mark.parametrize(
    ("row", "rows", "lost"),
    [
        ("1.png," + "x" * 200_000 + "\n", 4, {1}),
        ("1.png,a\rb\n", 4, {1}),
        ('1.png,"a\n', 2, {1}),
        ('1.png,"a\n2.png,"b"\n', 4, {1}),
        ('1.png,"a,\n2.png and ""b"""\n', 4, set()),
    ],
)
def test_csv_row_that_cannot_be_read_costs_itself(
    tmp_path: Path,
    row: str,
    rows: int,
    lost: set[int],
) -> None:
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(make_sample(i)["png"])
    path = tmp_path / "pairs.csv"
    path.write_bytes(f"filepath,title\n0.png,0\n{row}2.png,2\n3.png,3\n".encode())
    data = settings(path, image_key="filepath", captions={"{title}": 1.0}, slots=1)
    (source,) = load_sources(data)
    assert source.num_samples == rows
    loader = make_loader(source, data, batch=rows)
    step = read_step(loader)
    loader.close()
    assert step.error is None
    assert {line.partition(":")[0] for line in step.broken} == {
        f"pairs.csv/line {i + 2}" for i in lost
    }


def test_picture_on_a_disk_that_fails_for_a_while_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stat, errors = tmp_path / "0.png", Path.stat, [errno.ESTALE, errno.EIO]
    path.write_bytes(b"pixels")

    def fail(self: Path, **options: Any) -> os.stat_result:
        if errors:
            raise OSError(errors.pop(), "the disk does not answer")
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", fail)
    assert read_patiently(lambda: read_regular(path), 10) == b"pixels"
    assert not errors
    with pytest.raises(BrokenSample, match="No such file"):
        read_patiently(lambda: read_regular(tmp_path / "missing.png"), 10)
