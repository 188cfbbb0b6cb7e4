"""data.uids, data.filter, data.transforms, and captions from lists. They drop or change samples, but keep the order."""

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

from disco_ds.data import count_epoch, load_sources
from disco_ds.data.captions import pick_caption
from disco_ds.data.errors import BrokenSample, DataError, DroppedSample
from disco_ds.data.sources.selection import Selection, _contains, _passes, read_uids
from helpers.shards import CONTEXT, make_loader, read_global, read_step, settings, write_shards

SIZES = [20, 31, 17, 25, 22, 19]
NAME = __name__


def uid(index: int) -> str:
    return f"{index * 2**60 % 2**128:032x}"


def add_fields(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
    fields = {
        "score": index / 100,
        "language": "en" if index % 3 else "de",
        "uid": uid(index),
        "captions": [f"{index} {word}" for word in "abcd"[: 1 + index % 4]],
    }
    return {**sample, "json": json.dumps(fields).encode()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("selection"), SIZES, add_fields).folder


def keep_some() -> list[Any]:
    return [
        wds.select(lambda sample: json.loads(sample["json"])["score"] >= 0.5),
        wds.map(lambda sample: {**sample, "json": json.loads(sample["json"])}),
        wds.map_dict(png=lambda data: Image.open(io.BytesIO(data))),
        wds.rename(jpg="png", txt="txt", json="json"),
    ]


def keep_all() -> list[Any]:
    return [wds.map(dict)]


def shuffle() -> list[Any]:
    return [wds.map(dict), wds.shuffle(100)]


def batch() -> list[Any]:
    return [wds.batched(4)]


def split() -> list[Any]:
    return [lambda samples: (part for sample in samples for part in (sample, sample))]


def fail() -> list[Any]:
    raise RuntimeError("no file")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"filter": {"score": {"min": 0.5}}}, lambda i: i >= 50),
        (
            {"filter": {"score": {"min": 0.2, "max": 0.9}, "language": {"in": ["en"]}}},
            lambda i: 20 <= i <= 90 and i % 3,
        ),
        ({"transforms": f"{NAME}:keep_some"}, lambda i: i >= 50),
        ({"transforms": f"{NAME}:keep_all"}, lambda i: True),
    ],
)
def test_selected_samples_come_in_one_order_at_any_number_of_ranks(
    folder: Path, changes: dict[str, Any], expected: Any
) -> None:
    data = settings(folder, slots=4, **changes)
    steps = read_global(load_sources(data), data, 1, 12)[0]
    assert read_global(load_sources(data), data, 2, 12)[0] == steps
    wanted = {i for i in range(sum(SIZES)) if expected(i)}
    assert {index for step in steps for index, _ in step} == wanted
    if len(wanted) == sum(SIZES):
        plain = settings(folder, slots=4)
        assert steps == read_global(load_sources(plain), plain, 1, 12)[0]


def test_epoch_has_as_many_samples_as_uids(folder: Path, tmp_path: Path) -> None:
    uids = np.array([(0, i) for i in range(40)], dtype="u8,u8")
    np.save(tmp_path / "uids.npy", np.sort(uids))
    data = settings(folder, slots=4, uids=tmp_path / "uids.npy")
    assert count_epoch(data, load_sources(data)) == 40
    loader = make_loader(load_sources(data), data)
    assert (loader.epoch_samples, loader.num_samples) == (40, sum(SIZES))
    loader.close()
    plain = settings(folder, slots=4)
    assert count_epoch(plain, load_sources(plain)) == sum(SIZES)


def test_filter_on_a_field_that_no_sample_has_lists_the_fields(folder: Path) -> None:
    selection = Selection(settings(filter={"similarity": {"min": 0.3}}))
    members = add_fields(0, {})
    for _ in range(999):
        with pytest.raises(DroppedSample):
            selection.apply(members, str)
    expected = "1,000 samples .* similarity; their fields: captions, language, score, uid"
    with pytest.raises(DataError, match=expected):
        selection.apply(members, str)


def test_dropped_and_broken_samples_are_counted_apart(tmp_path: Path) -> None:
    def damage(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        sample = add_fields(index, sample)
        return {**sample, "png": b"no image"} if index in (60, 70) else sample

    folder = write_shards(tmp_path, SIZES, damage).folder
    data = settings(folder, slots=2, filter={"score": {"min": 0.5}})
    loader = make_loader(load_sources(data), data)
    broken: list[str] = []
    dropped = 0
    for _ in range(4):
        step = read_step(loader)
        assert step.error is None
        broken += step.broken
        dropped += step.dropped
    assert loader.position.dropped == dropped == loader.state_dict()["dropped"]
    assert loader.position.broken == len(broken)
    assert {name.partition("/")[0] for name in broken} <= {"00002.tar", "00003.tar"}
    assert dropped > 30
    loader.close()


@pytest.mark.parametrize("index", ["manifest", "none"])
def test_stream_whose_samples_are_all_dropped_ends_the_run(folder: Path, index: str) -> None:
    data = settings(folder, slots=2, filter={"score": {"min": 50}}, index=index)
    loader = make_loader(load_sources(data), data)
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert "no usable sample" in error
    assert "data.filter" in error


def test_small_slots_find_rare_samples(folder: Path) -> None:
    """Each slot has one or two samples per epoch. In many epochs, the filter keeps none of them."""
    data = settings(folder, slots=96, filter={"score": {"min": 1.3}})
    loader = make_loader(load_sources(data), data, batch=48)
    steps = [read_step(loader) for _ in range(8)]
    loader.close()
    assert [step.error for step in steps] == [None] * 8


def test_columns_of_a_csv_are_compared_as_text() -> None:
    assert all(_passes(value, {"in": [True]}) for value in (b"true", b"True", True))
    assert not _passes(b"false", {"in": [True]})
    assert _passes(b"3", {"in": [1, 2, 3]})
    assert not _passes(b"4", {"in": [1, 2, 3]})
    assert _passes(3, {"in": [1, 2, 3]})
    # An empty cell is a missing field, so its row is dropped, unless the rule names empty cells.
    assert not _passes(b"", {"min": 0.3})
    assert not _passes("", {"max": 1})
    assert not _passes(b"", {"in": ["a"], "min": 0.3})
    assert _passes(b"", {"in": ["", "a"]})


def test_whole_shards_are_dropped(folder: Path) -> None:
    # Only the last two of the six shards have samples with a score of at least 0.93.
    data = settings(folder, slots=2, filter={"score": {"min": 0.93}}, index="none")
    loader = make_loader(load_sources(data), data)
    steps = [read_step(loader) for _ in range(20)]
    loader.close()
    assert [step.error for step in steps] == [None] * 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transforms": f"{NAME}:shuffle"}, r"stage shuffle, which does not handle"),
        ({"transforms": f"{NAME}:batch"}, r"stage batched, which does not handle"),
        ({"transforms": f"{NAME}:fail"}, r"fail failed: RuntimeError: no file"),
        ({"transforms": f"{NAME}:none"}, r"has no none"),
        ({"uids": "/none.npy"}, r"/none.npy cannot be read as an .npy file of uids"),
        ({"uids": os.devnull}, r"null cannot be read as an .npy file of uids: EOFError"),
    ],
)
def test_selection_that_cannot_work_is_refused_at_the_start(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"data.shards: .*{words}"):
        load_sources(settings(folder, **changes))


@pytest.mark.parametrize(
    "rules",
    [
        {"x": {}},
        {"x": {"min": "a"}},
        {"x": {"in": "en"}},
        {"x": {"most": 1}},
        {"x": {"min": True}},
        {"x": {"max": float("nan")}},
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: Any) -> None:
    with pytest.raises(ValueError, match="the rule for x"):
        settings(filter=rules)


def test_uid_of_a_csv_is_bytes(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "uids.npy", np.array([(0, 7)], dtype="u8,u8"))
    selection = Selection(settings(folder, uids=tmp_path / "uids.npy"))
    row = {"uid": b"%032x" % 7, "title": b"x"}
    assert selection.apply(row, lambda: "") == row
    with pytest.raises(DroppedSample):
        selection.apply({"uid": b"%032x" % 8}, lambda: "")


def test_items_of_several_lists_are_drawn_independently() -> None:
    members = {"json": json.dumps({"a": ["a0", "a1"], "b": ["b0", "b1", "b2"]}).encode()}
    template = {"{json[a][*]} {json[b][*]}": 1}
    found = Counter(pick_caption(template, members, 0.0, (i + 0.5) / 600) for i in range(600))
    assert found == dict.fromkeys([f"a{i} b{j}" for i in range(2) for j in range(3)], 100)


def test_stages_get_the_key_and_the_shard_and_must_not_split(folder: Path) -> None:
    selection = Selection(settings(folder, transforms=f"{NAME}:keep_all"))
    found = selection.apply({"txt": b"x"}, lambda: "part/0.tar/folder/key")
    assert found == {"__key__": "folder/key", "__url__": "part/0.tar", "txt": b"x"}
    selection = Selection(settings(folder, transforms=f"{NAME}:split"))
    with pytest.raises(ValueError, match="one dictionary for each sample"):
        selection.apply({"txt": b"x"}, lambda: "0.tar/key")


@pytest.mark.parametrize("form", ["npy", "unsorted.npy"])
def test_uids_select_samples(folder: Path, tmp_path: Path, form: str) -> None:
    chosen = [3, 8, 40, 41, 77, 100, 120, 133]
    path = tmp_path / f"subset.{form}"
    pairs = sorted((int(uid(i)[:16], 16), int(uid(i)[16:], 16)) for i in chosen)
    np.save(path, np.array(pairs[::-1] if "un" in form else pairs, dtype="u8,u8"))
    assert len(read_uids(path)) == len(chosen)
    data = settings(folder, slots=1, uids=path)
    ids = [index for step in read_global(load_sources(data), data, 1, 3)[0] for index, _ in step]
    assert set(ids) == set(chosen)
    # With one slot, every epoch has each of them once.
    assert set(Counter(ids).values()) == {len(ids) // len(chosen)}


def test_large_list_of_uids_must_be_sorted(tmp_path: Path) -> None:
    uids = np.zeros(1_000_001, dtype="u8,u8")
    uids["f0"] = np.arange(len(uids))
    np.save(tmp_path / "sorted.npy", uids)
    found = read_uids(tmp_path / "sorted.npy")
    assert isinstance(found, np.memmap)
    assert _contains(found, f"{1_000_000:016x}{0:016x}")
    assert not _contains(found, f"{1_000_000:016x}{1:016x}")
    np.save(tmp_path / "reversed.npy", uids[::-1])
    with pytest.raises(ValueError, match="must be sorted, because it has 1,000,001 uids"):
        read_uids(tmp_path / "reversed.npy")


def test_uid_or_field_that_is_missing_is_told_from_a_dropped_sample(tmp_path: Path) -> None:
    np.save(tmp_path / "uids.npy", np.array([(0, 1)], dtype="u8,u8"))
    selection = Selection(settings(uids=tmp_path / "uids.npy"))
    with pytest.raises(DroppedSample):
        selection.apply({"json": json.dumps({"uid": uid(7)}).encode()}, str)
    with pytest.raises(KeyError):
        selection.apply({"json": b"{}"}, str)
    rules = Selection(settings(filter={"width": {"min": 10}}))
    for fields in ({}, {"width": None}, {"width": 9}, {"width": float("nan")}):
        with pytest.raises(DroppedSample):
            rules.apply({"json": json.dumps(fields).encode()}, str)
    with pytest.raises(ValueError, match="wide"):
        rules.apply({"json": b'{"width": "wide"}'}, str)
    assert rules.apply({"width": b"12"}, str)


def test_captions_from_lists_and_alternatives() -> None:
    fields = {"list": ["a", "b", "c"], "none": None, "blank": " ", "pairs": [{"text": "p"}]}
    members = {"txt": b"t", "json": json.dumps(fields).encode(), "meta.json": b'{"a": 1}'}
    items = [pick_caption({"{json[list][*]}": 1}, members, 0.0, i / 300) for i in range(300)]
    assert Counter(items) == {"a": 100, "b": 100, "c": 100}
    for template, text in {
        "{json[none]|txt}": "t",
        "{json[absent]|json[none]|json[list][1]}": "b",
        "{json[blank]|txt} x": "t x",
        "{nothing|txt}": "t",
        "{txt|json[list][0]}": "t",
        "{json[pairs][*][text]}": "p",
        "{json[none][*]|meta.json[a]}": "1",
    }.items():
        assert pick_caption({template: 1}, members, 0.0) == text
    for template in ("{json[none]|absent}", "{txt[*]}", "{json[list]|txt}"):
        with pytest.raises(BrokenSample):
            pick_caption({template: 1}, members, 0.0)


def tokenize_letter(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[ord(text[-1])] + [0] * (CONTEXT - 1) for text in texts])


def test_item_of_a_list_changes_with_the_epoch(folder: Path) -> None:
    data = settings(folder, slots=1, captions={"{json[captions][*]}": 1})
    loader = make_loader(load_sources(data), data, tokenize=tokenize_letter)
    seen: dict[int, set[int]] = {}
    for _ in range(40):
        for micro in read_step(loader).micro_batches:
            for index, text in zip(micro["index"].tolist(), micro["text"], strict=True):
                seen.setdefault(index, set()).add(int(text[0]))
    loader.close()
    assert all(len(letters) <= 1 + index % 4 for index, letters in seen.items())
    assert sum(len(letters) > 1 for letters in seen.values()) > 60
