"""Mixtures of several sources by weight, and csv files as sources."""

import csv
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from disco_ds.checkpoints.resume import identity_of, refuse_changes
from disco_ds.config import check_config
from disco_ds.config.data import DataSettings
from disco_ds.data import Source, load_sources, merge_states
from disco_ds.data.order import Mixture
from helpers.minimal import MINIMAL
from helpers.shards import color, make_loader, read_global, read_step, settings, write_shards

A, B, C = [17, 30, 9, 25], [13, 20, 22], [10, 12]
FIRST_B, FIRST_C, END = sum(A), sum(A + B), sum(A + B + C)
WEIGHTS = (3, 2, 1)

Sources = list[Source]


def mixed(**changes: Any) -> DataSettings:
    sources = [
        {"shards": name, "weight": weight} for name, weight in zip("abc", WEIGHTS, strict=True)
    ]
    return settings(**{"shards": None, "sources": sources, "slots": 8, **changes})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Write three sources with consecutive ids."""
    parts = {"a": (A, 0), "b": (B, FIRST_B), "c": (C, FIRST_C)}
    folder = tmp_path_factory.mktemp("sources")
    return [
        write_shards(folder / name, sizes, first=first) for name, (sizes, first) in parts.items()
    ]


@pytest.fixture(scope="module")
def reference(sources: Sources) -> Any:
    """Read twelve global batches of 24 samples on one rank. Return them and the state after them."""
    return read_global(sources, mixed(), 1, 12)[:2]


def test_shares_follow_the_weights_and_epochs_are_whole(reference: Any) -> None:
    read = [sample for step in reference[0] for sample in step]
    a, b, c = (
        [s for s in read if low <= s[0] < high]
        for low, high in ((0, FIRST_B), (FIRST_B, FIRST_C), (FIRST_C, END))
    )
    assert abs(len(a) - 144) < 8
    assert abs(len(b) - 96) < 8
    assert abs(len(c) - 48) < 8
    assert len(set(read)) == len(read)
    # About 144 samples were read from `a`, which has 81, and 96 from `b`, which has 55. So every slot has finished the
    # first epoch of both.
    assert {index for index, epoch in a if epoch == 0} == set(range(FIRST_B))
    assert {index for index, epoch in b if epoch == 0} == set(range(FIRST_B, FIRST_C))


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        (4, 0),
        (2, 1),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_global_batches_do_not_depend_on_ranks_and_workers(
    sources: Sources, reference: Any, size: int, workers: int
) -> None:
    assert read_global(sources, mixed(workers=workers), size, 12)[:2] == reference


@pytest.mark.parametrize(("done", "size"), [(5, 2), (8, 4)])
def test_resume_goes_on_exactly(sources: Sources, reference: Any, done: int, size: int) -> None:
    middle = read_global(sources, mixed(), 4, done)[1]
    batches, state, _ = read_global(sources, mixed(), size, 12 - done, state=middle)
    assert batches == reference[0][done:]
    assert state == reference[1]


def test_broken_samples_are_skipped_inside_their_source(
    sources: Sources, reference: Any, tmp_path: Path
) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return sample if index % 5 else {**sample, "png": b"no image"}

    damaged = [sources[0], write_shards(tmp_path, B, change, first=FIRST_B), sources[2]]
    one = read_global(damaged, mixed(max_broken=1.0), 1, 12)
    assert read_global(damaged, mixed(max_broken=1.0), 4, 12) == one
    lost = {index for index in range(FIRST_B, FIRST_C) if index % 5 == 0}
    assert not lost & {index for step in one[0] for index, _ in step}
    assert one[2] >= len(lost)
    # All other samples keep their places.
    for broken, whole in zip(one[0], reference[0], strict=True):
        places = [place for place, (index, _) in enumerate(whole) if not FIRST_B <= index < FIRST_C]
        assert [broken[place] for place in places] == [whole[place] for place in places]
        assert sum(FIRST_B <= index < FIRST_C for index, _ in broken) == 24 - len(places)


def test_captions_and_image_key_may_be_a_sources_own(tmp_path: Path) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return {"picture.png": sample["png"], "alt": sample["txt"]}

    found: Sources = [
        write_shards(tmp_path / "a", [20]),
        write_shards(tmp_path / "b", [20], change, first=20),
    ]
    own = {"shards": "b", "weight": 1, "image_key": "picture.png", "captions": {"{alt}": 1}}
    data = settings(shards=None, sources=[{"shards": "a", "weight": 1}, own], slots=4)
    assert {index for step in read_global(found, data, 1, 2)[0] for index, _ in step} == set(
        range(40)
    )


def test_state_of_other_sources_is_refused(sources: Sources) -> None:
    loader = make_loader(sources, mixed())
    state = merge_states([loader.state_dict()])
    loader.close()
    assert len(state["cursor"]) == 3 * 8
    with pytest.raises(ValueError, match="sources 3, this run has 1"):
        make_loader(sources[0], settings(slots=8), state=state)
    other = mixed(sources=[{"shards": name, "weight": 1} for name in "abc"])
    with pytest.raises(ValueError, match="fingerprint"):
        make_loader(sources, other, state=state)


def test_resume_names_what_changed_of_the_sources() -> None:
    def known(*sources: dict[str, Any]) -> dict[str, Any]:
        config = check_config(
            {**MINIMAL, "data": {"sources": list(sources)}, "deepspeed": {}}, "test"
        )
        return identity_of(config, "same", {})

    before = known({"shards": "a", "weight": 2.0}, {"shards": "b", "weight": 1.0})
    refuse_changes(
        before,
        known(
            {"shards": "moved/a", "weight": 2.0}, {"shards": "b", "weight": 1.0, "manifest": "m"}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r"data.sources: .*'weight': 2.0.* in the checkpoint, .*'weight': 3.0.* now",
    ):
        refuse_changes(
            before, known({"shards": "a", "weight": 3.0}, {"shards": "b", "weight": 1.0})
        )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"shards": "a", "sources": [{"shards": "b"}]},
            "data.sources replaces data.shards",
        ),
        (
            {"sources": [{"shards": "a", "weight": 1}, {"shards": "b"}]},
            "data.sources: set a weight for every source",
        ),
        ({"sources": []}, "data.shards is missing"),
        (
            {"sources": [{"shards": "a", "wieght": 1}]},
            "data.sources.0.wieght; did you mean weight?",
        ),
        ({"sources": [{"shards": "a", "captions": {}}]}, "data.sources.0.captions: "),
        ({"sources": [{"weight": 1}]}, "data.sources.0.shards is missing"),
    ],
)
def test_settings_that_make_no_sense_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        check_config({**MINIMAL, "data": data, "deepspeed": {}}, "test")
    assert words in str(error.value)


def test_mixture_is_even_in_every_slot_and_over_them() -> None:
    weights = [1.0, 5.0, 0.5]
    mixture = Mixture([[50], [70, 7], [900]], weights, 64, seed=3, window=9)
    total = Counter()
    for slot in range(64):
        chosen = [mixture.stream(slot, number) for number in range(1000)]
        assert {stream % 64 for stream in chosen} == {slot}
        counts = Counter(stream // 64 for stream in chosen)
        total += counts
        for source, weight in enumerate(weights):
            assert abs(counts[source] - 1000 * weight / 6.5) < 4
    # In batches with one sample per slot, the share of a source varies, because slots do not change sources in step.
    shares = [
        sum(mixture.stream(slot, number) >= 2 * 64 for slot in range(64)) for number in range(200)
    ]
    assert abs(sum(shares) / len(shares) - 64 * 0.5 / 6.5) < 0.5
    assert len(set(shares)) > 5


def test_mixture_source_smaller_than_the_slots_keeps_its_epochs() -> None:
    mixture = Mixture([[3], [100]], [1.0, 1.0], 8, seed=0, window=4)
    order = mixture.orders[0]
    read = Counter()
    for slot in range(8):
        for each in takewhile(lambda each: each.epoch < 8, order.entries(slot, (0, 0), int)):
            read[mixture.sample_id(0, each.shard, each.entry), each.epoch] += 1
    assert read == Counter({(index, epoch): 1 for index in range(3) for epoch in range(8)})


# csv files


def write_table(folder: Path, num: int, separator: str = "\t", missing: int = -1) -> Path:
    """Write a csv whose images and captions encode the row's number."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["filepath", "title", "note"])
        for row in range(num):
            name = f"images/{row}.png"
            if row != missing:
                Image.new("RGB", (12, 10), color(row)).save(folder / name)
            writer.writerow(
                [name if row % 2 else str(folder / name), row, f'a "quoted{separator}"\nline {row}']
            )
    return path


CSV = {"image_key": "filepath", "captions": {"{title}": 1.0}}


@pytest.mark.parametrize("separator", ["\t", ",", ";"])
def test_csv_rows_are_samples_and_ids(tmp_path: Path, separator: str) -> None:
    path = write_table(tmp_path, 30, separator, missing=7)
    data = settings(path, slots=4, **CSV)
    found = load_sources(data)
    one = read_global(found, data, 1, 4, batch=16)
    assert {index for step in one[0] for index, epoch in step if epoch == 0} == set(range(30)) - {7}
    assert read_global(found, data.model_copy(update={"workers": 1}), 2, 4, batch=16) == one
    loader = make_loader(found, data, batch=16)
    broken = [name for _ in range(2) for name in read_step(loader).broken]
    loader.close()
    assert broken[0].startswith("pairs.csv/line 16: ")
    assert "images/7.png cannot be read" in broken[0]


def test_csv_paths_may_be_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path, 6)
    moved = tmp_path / "tables" / "pairs.csv"
    moved.parent.mkdir()
    path.rename(moved)
    monkeypatch.chdir(tmp_path)
    (table,) = load_sources(settings(moved, slots=1, **CSV))
    reader = table.open(1, 1)
    members = [reader.read(*place) for place in [(shard, 0) for shard in range(6)]]
    reader.close()
    assert [member["title"] for member in members] == [str(row).encode() for row in range(6)]


def test_csv_odd_rows_cost_a_sample_each(tmp_path: Path) -> None:
    path = write_table(tmp_path, 20)
    text = path.read_bytes().replace(b"filepath", b"\xef\xbb\xbffilepath", 1)
    rows = b"\n\r\nimages/1.png\timages/1.png\xff\nimages/1.png\n"
    rows += b'images/1.png\t1\tno quotes\tcut\nimages/1.png\t1\t"a \\"big\\" dog"\n'
    path.write_bytes(text + rows + b"images/1.png\t1\tan empty value\t\n \t1\t\n")
    data = settings(path, slots=1, **CSV)
    (table,) = load_sources(data)
    assert sum(table.sizes) == 26
    loader = make_loader([table], data, batch=20)
    broken = [name for _ in range(2) for name in read_step(loader).broken]
    reasons = " ".join(broken)
    loader.close()
    assert "line 44: UnicodeDecodeError: 'utf-8' codec" in reasons
    assert "line 45: caption '{title}': KeyError: 'title'; the sample has filepath" in reasons
    assert "line 46: the row has 4 values, but there are 3 columns; quote the caption" in reasons
    assert "line 47: Error: '\\t' expected after '\"'" in reasons
    assert "line 49: the row has no filepath" in reasons
    assert not any("line 48" in name for name in broken)


def test_csv_row_that_is_broken_is_reported_in_the_first_epoch_only(tmp_path: Path) -> None:
    data = settings(write_table(tmp_path, 20, missing=7), slots=2, workers=1, **CSV)
    loader = make_loader(load_sources(data), data, batch=16)
    steps = [read_step(loader) for _ in range(24)]
    loader.close()
    assert not any(
        step.error for step in steps
    )  # 19 epochs: more than the limit of broken samples, counted repeatedly
    (broken,) = [name for step in steps for name in step.broken]
    assert broken.startswith("pairs.csv/line 16: ")


def test_csv_fingerprint_follows_its_rows(tmp_path: Path) -> None:
    path = write_table(tmp_path, 5)
    (before,) = load_sources(settings(path, **CSV))
    path.write_text(path.read_text().replace("line 3", "line 9"))
    (after,) = load_sources(settings(path, **CSV))
    assert before.fingerprint != after.fingerprint


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (None, CSV, "No such file"),
        ("filepath\ttitle\n", CSV, "no rows"),
        ("", CSV, "has no column title; its columns: "),
        ("filepath\ttitle\na\tb\n", {}, "has no column txt; its columns: filepath, title"),
        (
            "filepath\ttitle\na\tb\n",
            {"captions": {"{title}": 1}},
            "has no column jpg;jpeg;png;webp",
        ),
        ("filepath,title,title\na.png,b,c\n", CSV, "several columns named title"),
    ],
)
def test_csv_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str | None, changes: Any, words: str
) -> None:
    path = tmp_path / "pairs.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_sources(settings(path, **changes))
    assert str(error.value).startswith(f"data.shards: {path}")
    assert words in str(error.value)
