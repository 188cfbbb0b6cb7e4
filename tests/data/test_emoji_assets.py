"""The bundled emoji shards, and the writer of tools/make/emoji.py on made-up samples.

The drawing is not tested: it needs npm packages and resvg-py.
"""

import io
import json
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.paths import ROOT
from tools.make import emoji as tool

ASSETS = ROOT / "disco_ds" / "assets" / "emoji"
NUM_SHARDS = {"train": 24, "validation": 4, "unseen": 4}
TRAINING_VENDORS = {"noto", "noto-v1", "twemoji", "emojione", "fxemoji"}
HELD_OUT_VENDOR = "fluent-emoji-flat"
TEXTS = ["caption", "group", "hexcode", "key", "keywords", "label", "licence", "subgroup", "vendor"]


def read_shard(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a shard in order: their members by extension, and `tar_key`."""
    samples: dict[str, dict[str, Any]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, extension = member.name.split(".")
            file = tar.extractfile(member)
            assert file is not None
            assert key.startswith(path.stem)
            samples.setdefault(key, {"tar_key": key})[extension] = file.read()
    return list(samples.values())


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, Any]]]:
    """Read all samples of all splits, in the order of shards and keys, with their decoded pixels."""
    result: dict[str, list[dict[str, Any]]] = {}
    for split in NUM_SHARDS:
        result[split] = [
            s for path in sorted((ASSETS / split).glob("*.tar")) for s in read_shard(path)
        ]
        for sample in result[split]:
            with Image.open(io.BytesIO(sample["png"])) as image:
                sample["format"], sample["mode"], sample["size"] = (
                    image.format,
                    image.mode,
                    image.size,
                )
                sample["pixels"] = image.convert("RGB").tobytes()
            sample["fields"] = json.loads(sample["json"])
    return result


@pytest.mark.parametrize("split", NUM_SHARDS)
def test_manifest_matches_shards(splits: dict[str, list[dict[str, Any]]], split: str) -> None:
    text = (ASSETS / split / "manifest.json").read_text()
    manifest = json.loads(text)
    assert text == json.dumps(manifest, indent=1) + "\n"
    assert manifest["version"] == 1
    names = [f"{number:05d}.tar" for number in range(NUM_SHARDS[split])]
    assert [shard["name"] for shard in manifest["shards"]] == names
    assert sorted(path.name for path in (ASSETS / split).iterdir()) == [*names, "manifest.json"]
    counts = Counter(sample["tar_key"][:5] + ".tar" for sample in splits[split])
    for shard in manifest["shards"]:
        path = ASSETS / split / shard["name"]
        assert shard == {
            "name": path.name,
            "samples": counts[path.name],
            "bytes": path.stat().st_size,
        }
    sizes = [shard["samples"] for shard in manifest["shards"]]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("split", NUM_SHARDS)
def test_samples_are_complete(splits: dict[str, list[dict[str, Any]]], split: str) -> None:
    assert len({sample["tar_key"] for sample in splits[split]}) == len(splits[split])
    for sample in splits[split]:
        fields = sample["fields"]
        assert sample.keys() >= {"json", "png", "txt"}
        assert sorted(fields) == sorted([*TEXTS, "width", "height"])
        assert fields["key"] == sample["tar_key"]
        assert re.fullmatch(r"\d{9}", fields["key"])
        assert sample["txt"].decode() == fields["caption"] == fields["caption"].lower()
        assert all(isinstance(fields[name], str) and fields[name] for name in TEXTS)
        assert (sample["format"], sample["mode"]) == ("PNG", "P")
        assert sample["size"] == (fields["width"], fields["height"]) == (64, 64)
        assert min(sample["pixels"]) < 240, f"{fields['label']} of {fields['vendor']} is blank"


def test_vendors_and_labels_keep_to_their_split(splits: dict[str, list[dict[str, Any]]]) -> None:
    vendors = {split: {s["fields"]["vendor"] for s in samples} for split, samples in splits.items()}
    labels = {split: {s["fields"]["label"] for s in samples} for split, samples in splits.items()}
    assert vendors == {
        "train": TRAINING_VENDORS,
        "validation": {HELD_OUT_VENDOR},
        "unseen": {HELD_OUT_VENDOR},
    }
    assert not labels["unseen"] & labels["train"]
    assert labels["validation"] <= labels["train"]
    assert len(labels["unseen"]) == len(splits["unseen"]) == 155
    assert len({s["fields"]["group"] for s in splits["unseen"]}) == 9
    captions = {
        (s["fields"]["label"], s["fields"]["caption"])
        for samples in splits.values()
        for s in samples
    }
    assert len(captions) == len({caption for _, caption in captions}), "two labels share a caption"


def test_no_image_occurs_twice(splits: dict[str, list[dict[str, Any]]]) -> None:
    pixels = Counter(sample["pixels"] for samples in splits.values() for sample in samples)
    assert [count for count in pixels.values() if count > 1] == []


def test_shards_mix_vendors(splits: dict[str, list[dict[str, Any]]]) -> None:
    for shard in {sample["tar_key"][:5] for sample in splits["train"]}:
        vendors = Counter(
            s["fields"]["vendor"] for s in splits["train"] if s["tar_key"][:5] == shard
        )
        assert vendors.keys() == TRAINING_VENDORS
        assert max(vendors.values()) < 0.5 * vendors.total()


def test_attribution_names_every_vendor_licence_and_count(
    splits: dict[str, list[dict[str, Any]]],
) -> None:
    lines = (ASSETS / "ATTRIBUTION.md").read_text(encoding="utf-8").splitlines()
    samples = [(split, s["fields"]) for split, part in splits.items() for s in part]
    licences = {fields["vendor"]: fields["licence"] for _, fields in samples}
    counts = Counter((fields["vendor"], split) for split, fields in samples)
    assert set(licences.values()) == {"Apache-2.0", "CC-BY-4.0", "MIT"}
    for vendor, licence in licences.items():
        work, numbers = [line for line in lines if line.startswith(f"| {vendor} |")]
        assert f"[{licence}](" in work
        assert f"`@iconify-json/{vendor}` " in work
        assert (
            numbers
            == f"| {vendor} | "
            + " | ".join(str(counts[vendor, split]) for split in NUM_SHARDS)
            + " |"
        )


def make_samples(count: int) -> list[Any]:
    names = {"licence": "MIT", "keywords": "a, b", "group": "objects", "subgroup": "tool"}
    return [
        tool.Sample(
            b"png%d" % i,
            vendor=f"v{i % 3}",
            label=f"L{i} é",
            caption=f"l{i} é",
            hexcode=f"{i:X}",
            **names,
        )
        for i in range(count)
    ]


def test_writer_is_deterministic_whatever_the_order(tmp_path: Path) -> None:
    samples = make_samples(11)
    tool.write_shards(samples, tmp_path / "one", 5)
    tool.write_shards(samples[::-1], tmp_path / "two", 5)
    # Writing to the same folder again must remove all earlier files.
    tool.write_shards(samples, tmp_path / "two", 3)
    tool.write_shards(samples[::-1], tmp_path / "three", 3)
    files = {
        folder: {p.name: p.read_bytes() for p in (tmp_path / folder).iterdir()}
        for folder in ("two", "three")
    }
    assert files["two"] == files["three"]
    assert sorted(files["two"]) == ["00000.tar", "00001.tar", "00002.tar", "manifest.json"]
    shards = json.loads(files["two"]["manifest.json"])["shards"]
    assert [shard["samples"] for shard in shards] == [4, 4, 3]
    with tarfile.open(tmp_path / "one" / "00001.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {
            (0, 0, 0, "", "", 0o644)
        }
        assert tar.getnames() == [
            f"00001{i:04d}.{end}" for i in range(2) for end in ("json", "png", "txt")
        ]
    written = [s for path in sorted((tmp_path / "one").glob("*.tar")) for s in read_shard(path)]
    assert sorted(s["txt"].decode() for s in written) == sorted(s.caption for s in samples)


def test_duplicates_keep_one_of_a_label_and_none_of_several() -> None:
    def draw(colour: str, vendor: str, label: str) -> Any:
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), colour).save(buffer, "PNG")
        return tool.Sample(buffer.getvalue(), vendor, "MIT", label, label, "k", "g", "s", "1F600")

    samples = [
        draw("red", "noto", "a"),
        draw("red", "twemoji", "a"),
        draw("blue", "noto", "b"),
        draw("lime", "x", "c"),
    ]
    samples += [draw("blue", "twemoji", "d")]
    assert tool.drop_duplicates(samples) == [samples[0], samples[3]]
