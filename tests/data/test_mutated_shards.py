"""Fuzzing of shards, csv files and images: every sample is either read or skipped as broken.

Each case writes a shard or a csv file with a few valid samples, damages it slightly, as disks, networks and people do,
and reads it with the code that the data workers use. Every fifth case is a csv file. A shard is read twice: with the
number of samples that was counted before the damage, and with a new count. The seed determines a case. Every case is
run twice and must give the same results.
"""

import csv
import hashlib
import io
import json
import random
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
import torch

from disco_ds.config import DataSettings
from disco_ds.data import BrokenSample, InputSpec, Source, index_shards, load_sources
from disco_ds.data.errors import breaks_sample, name_broken
from disco_ds.data.samples import SampleKey, prepare
from disco_ds.data.sources.selection import Selection
from helpers.shards import CONTEXT, SPEC, VOCAB, encode, noise, settings, tokenize

SEED = 20_261_123
FEW, MANY, MOST_S = 150, 5_000, 20
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
CAPTIONS = {"{txt}": 1.0, "{json[label]} {json[list][0]}": 1.0}
NUMBERS = (-1, 0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**63 - 1, 2**63, -(2**40))
SETTINGS = settings(image_key="png;jpeg;webp;gif;bmp", captions=CAPTIONS, max_pixels=2**22)
Mutation = Callable[[random.Random, bytearray], None]


@cache
def image(kind: str) -> bytes:
    return encode(noise(24, 18), kind)


def members(rng: random.Random) -> list[tuple[str, bytes]]:
    """Return (name, content) of the members of three valid samples."""
    found = []
    for i in range(3):
        name = rng.choice(("", "folder/", "d.v1/", "x" * 120 + "/", "caf\u00e9/")) + f"{i:03d}"
        kind = rng.choice(KINDS)
        text = json.dumps(
            {"label": f"label {i}", "list": ["a", i, None], "nested": {"a": [1.5, {"b": 2}]}}
        )
        found += [(f"{name}.{kind.lower()}", image(kind)), (f"{name}.txt", b"text %d" % i)]
        found += [(f"{name}.json", text.encode())]
    return found


def write(members: list[tuple[str, bytes]], form: int) -> bytearray:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return bytearray(buffer.getvalue())


# Changes of a payload: an image, a text or a JSON.


def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 50))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flip_early(rng: random.Random, data: bytearray) -> None:
    """Change bytes near the start, where formats store sizes and counts."""
    for _ in range(rng.choice((1, 2, 4))):
        if data:
            data[rng.randrange(min(len(data), 64))] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def zero(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    stop = min(len(data), start + rng.choice((1, 8, 100, 512)))
    data[start:stop] = bytes(stop - start)


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(
        (
            b"\0",
            b"\xff\xfe",
            b"[" * 300,
            b'{"a":' * 300,
            b"\\ud800",
            b'"',
            b"9" * 5000,
            b"x" * 3000,
            b"\r",
            rng.randbytes(9),
        )
    )


def repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.randrange(1, 200)]
    data[start:start] = part * rng.randrange(1, 20)


PAYLOAD: tuple[Mutation, ...] = (flip, flip_early, cut, zero, insert, repeat)


# Changes of a tar.


def headers(data: bytearray) -> list[int]:
    return [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]


def seal(data: bytearray, at: int) -> None:
    """Correct the header's checksum."""
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def change_header(rng: random.Random, data: bytearray) -> None:
    at = rng.choice(headers(data))
    way = rng.randrange(5)
    if way == 0:
        data[at + 124 : at + 136] = tarfile.itn(rng.choice(NUMBERS), 12, tarfile.GNU_FORMAT)
    elif way == 1:
        data[at + 156] = rng.choice(b"01234567SLKxgNV\0 Z\xff")
    elif way == 2:
        name = rng.choice(
            (b"", b"/" * 99, b"." * 99, b"a.b/c", b"\xff\xfe.png", b"\x1b[1m\n.txt", b"a" * 100)
        )
        data[at : at + 100] = name.ljust(100, b"\0")
    elif way == 3:
        for _ in range(rng.randrange(1, 5)):
            data[at + rng.randrange(512)] = rng.randrange(256)
    else:
        data[at + 124 : at + 136] = b"%011o\0" % rng.randrange(4000)
    seal(data, at)


def swap_blocks(rng: random.Random, data: bytearray) -> None:
    a, b = (512 * rng.randrange(len(data) // 512) for _ in range(2))
    data[a : a + 512], data[b : b + 512] = data[b : b + 512], data[a : a + 512]


def zero_block(rng: random.Random, data: bytearray) -> None:
    at = 512 * rng.randrange(len(data) // 512)
    data[at : at + 512] = bytes(512)


def double(rng: random.Random, data: bytearray) -> None:
    data += bytes(data)


def prefix_pax(rng: random.Random, data: bytearray) -> None:
    """Insert arbitrary pax records before a member."""
    key = rng.choice(("size", "path", "GNU.sparse.size", "GNU.sparse.map", "hdrcharset", "mtime"))
    value = rng.choice(("", "x", "../../etc", "1,2,3", "1e400", "nan", *map(str, NUMBERS)))
    records = {
        key: value,
        **({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"} if rng.random() < 0.3 else {}),
    }
    info = tarfile.TarInfo("x")
    info.pax_headers = records
    at = rng.choice(headers(data))
    data[at:at] = info.create_pax_header(info.get_info(), "utf-8")[:-512]


TAR: tuple[Mutation, ...] = (
    flip,
    cut,
    zero,
    change_header,
    change_header,
    swap_blocks,
    zero_block,
    double,
    prefix_pax,
)


def make_tar(rng: random.Random) -> tuple[bytes, bytes]:
    """Return a valid tar and its damaged version."""
    sound, form = members(rng), rng.choice(FORMS)
    whole, changed = write(sound, form), list(sound)
    if rng.random() < 0.5:
        k = rng.randrange(len(sound))
        data = bytearray(sound[k][1])
        for _ in range(rng.choice((1, 1, 3))):
            rng.choice(PAYLOAD)(rng, data)
        changed[k] = (sound[k][0], bytes(data))
        if rng.random() < 0.2:
            rng.shuffle(changed)
        return bytes(whole), bytes(write(changed, form))
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(TAR)(rng, data)
        if not headers(data):
            break
    return bytes(whole), bytes(data)


def read_tar(folder: Path, rng: random.Random) -> Iterator[str]:
    """Write a shard, damage it, and read it with the manifest from before the damage and then with a new manifest.

    Yields:
        For each sample, the hash of its pixels and tokens, or the reason why it is broken.
    """
    whole, changed = make_tar(rng)
    path = folder / "0.tar"
    path.write_bytes(whole)
    sound = index_shards(folder)
    assert sound.sizes == [3]
    path.write_bytes(changed)
    yield from read(sound, SETTINGS)
    try:
        manifest = index_shards(folder)
    except ValueError as error:
        yield str(error)
    else:
        yield from read(manifest, SETTINGS)


def read(source: Source, data: DataSettings) -> Iterator[str]:
    """Yield, for each sample, the hash of its pixels and tokens, or the report that it is broken."""
    spec = InputSpec(SPEC, tokenize, CONTEXT, VOCAB)
    selection = Selection(data)
    entries = [(shard, entry) for shard, size in enumerate(source.sizes) for entry in range(size)]
    with closing(source.open(1, 1)) as reader:
        for index, (shard, entry) in enumerate(entries):
            try:
                with breaks_sample(OSError):
                    members = selection.read(reader, shard, entry)
                    sample = prepare(members, SampleKey(0, 0, index), data, spec)
                pixels = sample["image"]
                assert pixels.shape == (3, *SPEC.size)
                assert pixels.dtype == torch.uint8
                text = sample["text"].numpy().tobytes()
                yield hashlib.sha256(pixels.numpy().tobytes() + text).hexdigest()
            except BrokenSample as error:
                line = name_broken(reader.name, shard, entry, error)
                assert line.isprintable()
                assert len(line.encode()) < 4000
                yield line


def read_csv(folder: Path, rng: random.Random) -> Iterator[str]:
    for i, kind in enumerate(KINDS):
        (folder / f"{i}.{kind.lower()}").write_bytes(image(kind))
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(("filepath", "txt"))
    writer.writerows((f"{i}.{kind.lower()}", f'the "{i}",\nnext') for i, kind in enumerate(KINDS))
    data = bytearray(buffer.getvalue().encode())
    heading = data.index(b"\n") + 1
    rows = data[heading:]
    for _ in range(rng.choice((1, 2, 4))):
        rng.choice((*PAYLOAD, odd_csv))(rng, rows)
    path = folder / "pairs.csv"
    path.write_bytes(bytes(data[:heading]) + bytes(rows))
    how = settings(path, image_key="filepath", captions={"{txt}": 1.0}, slots=1)
    try:
        (source,) = load_sources(how)
    except ValueError as error:
        yield str(error)
    else:
        yield from read(source, how)


def odd_csv(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(
        (
            b'"',
            b'""',
            b"\r",
            b"\n",
            b"\0",
            b"/dev/zero,x\n",
            b"/dev/stdin,x\n",
            b"/proc/kcore,x\n",
            b"a" * 140_000,
            b",,,,",
        )
    )


@contextmanager
def within(seconds: int, case: int) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"case {case} takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(folder: Path, case: int) -> tuple[int, int]:
    """Run a case twice, and check that the results are equal. Return (samples read, samples broken).

    Args:
        folder: Folder for the files of the case.
        case: Number of the case, which determines its random numbers.
    """
    kind = read_csv if case % 5 == 4 else read_tar
    with within(MOST_S, case):
        try:
            first, again = (list(kind(folder, random.Random(SEED + case))) for _ in range(2))
        except Exception as error:
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
    assert first == again, f"case {case}"
    broken = sum(": " in line for line in first)
    return len(first) - broken, broken


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_few_mutations_end_in_samples_or_broken_samples(tmp_path: Path) -> None:
    counts = [check(tmp_path, case) for case in range(FEW)]
    good, broken = map(sum, zip(*counts, strict=True))
    assert good > FEW  # samples that were not touched are read
    assert broken > FEW // 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_many_mutations_end_in_samples_or_broken_samples(tmp_path: Path) -> None:
    start = time.monotonic()
    counts = [check(tmp_path, case) for case in range(FEW, FEW + MANY)]
    good, broken = map(sum, zip(*counts, strict=True))
    assert good > MANY
    assert broken > MANY // 4
    print(
        f"{MANY:,} mutations, seed {SEED}: {good:,} read, {broken:,} broken, {time.monotonic() - start:.0f} s"
    )
