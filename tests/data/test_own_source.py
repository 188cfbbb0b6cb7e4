"""Custom data sources, `package.module:Class`: a run with the example source, its resume, and a mixture of sources."""

import json
import os
import pickle
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from disco_ds.config import check_config, load_config
from disco_ds.data import load_sources
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.runs.run_folder import FINISHED
from helpers.dist import run_ranks
from helpers.minimal import MINIMAL
from helpers.own_code import disco_ds
from helpers.paths import ROOT
from helpers.shards import (
    color,
    make_loader,
    make_sample,
    read_global,
    read_step,
    settings,
    write_shards,
)
from helpers.tiny_run import recipe, refused

NAME = "our_package.my_sources:Pairs"
OTHERS = """
from disco_ds.data import Source

class NotOne:
    pass

class Bare(Source):
    pass

class Empty(Source):
    sizes, fingerprint = [0, 0], "empty"

class Unnamed(Source):
    sizes, fingerprint = [3], 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on PYTHONPATH that contains our_package."""
    folder = tmp_path / "path"
    (folder / "our_package").mkdir(parents=True)
    code = (ROOT / "examples" / "sqlite_source.py").read_text()
    for name, text in {
        "__init__": "",
        "my_sources": code,
        "others": OTHERS,
        "fails": "1 / 0",
    }.items():
        (folder / "our_package" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "our_package"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def write_pairs(path: Path, first: int, num: int, without: int = -1) -> str:
    """Write a table of samples with ids from `first` on; sample `without` has no image."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE pairs(image BLOB, caption TEXT)")
        for index in range(first, first + num):
            sample = make_sample(index)
            image = None if index == without else sample["png"]
            database.execute("INSERT INTO pairs VALUES (?, ?)", (image, sample["txt"].decode()))
    return str(path)


def own(path: str, **changes: Any) -> Any:
    return settings(
        **{"shards": None, "source": NAME, "options": {"path": path}, "slots": 4, **changes}
    )


def test_global_batches_do_not_depend_on_ranks_workers_and_resume(
    package: Path, tmp_path: Path
) -> None:
    data = own(write_pairs(tmp_path / "a.sqlite", 0, 50, without=7))
    found = load_sources(data)
    batches, state, broken = read_global(found, data, 1, 6)
    assert {index for step in batches for index, epoch in step if epoch == 0} == set(range(50)) - {
        7
    }
    assert broken >= 1
    middle = read_global(found, data, 2, 2, workers=0)[1]
    rest = read_global(found, data.model_copy(update={"workers": 1}), 2, 4, state=middle)
    assert (rest[0], rest[1]) == (batches[2:], state)
    other = own(write_pairs(tmp_path / "b.sqlite", 0, 51))
    found = load_sources(other)
    with pytest.raises(ValueError, match="fingerprint pairs-50, this run has pairs-51"):
        read_global(found, other, 1, 1, state=state)


def test_own_source_is_mixed_with_shards(package: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [20, 20])
    part = {
        "source": NAME,
        "options": {"path": write_pairs(tmp_path / "a.sqlite", 40, 20)},
        "weight": 1,
    }
    data = settings(
        shards=None, sources=[{"shards": str(tmp_path / "shards"), "weight": 2}, part], slots=2
    )
    batches = read_global(load_sources(data), data, 2, 3)[0]
    counts = [sum(index < 40 for index, _ in step) for step in batches]
    assert all(abs(count - 16) <= 2 for count in counts), counts
    assert {index for step in batches for index, _ in step} > set(range(40, 58))


@pytest.mark.slow  # a fast test does the same with a custom loss
def test_recipe_with_an_own_source_trains_and_resumes(package: Path, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.sqlite", 0, 48)
    data = {"source": NAME, "options": {"path": path}, "workers": 1, "slots": 4}
    config = str(recipe(tmp_path, data=data, steps=4, log={"every_steps": 1}))
    done = disco_ds("doctor", "--config", config, cwd=tmp_path)
    assert re.search(r"ok +samples +\d+ read, 0 broken", done.stdout), done.stdout + done.stderr
    done = disco_ds("train", "--config", config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = ids(tmp_path / "runs" / "tiny")
    # Resume from step 2, with the table at another path.
    Path(path).rename(tmp_path / "moved.sqlite")
    folder = tmp_path / "runs" / "tiny"
    (folder / FINISHED).unlink()
    step = str(folder / "checkpoints" / "step-00000002")
    moved = f"data.options.path={tmp_path / 'moved.sqlite'}"
    done = disco_ds("train", "--config", config, moved, "--resume", step, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ids(folder) == whole


def ids(folder: Path) -> list[tuple[int, str]]:
    records = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    found = [(record["step"], record["ids"]) for record in records if "loss" in record]
    assert [step for step, _ in found] == [1, 2, 3, 4]
    return found


def missing_on_one_rank(folder: str) -> str:
    rank = int(os.environ["RANK"])
    data = {
        "source": "disco_ds.data:ImageFolder",
        "options": {"folder": f"{folder}/rank{rank}"},
        "slots": 4,
    }
    return refused(load_config(recipe(Path(folder) / f"of{rank}", data=data), []))


def test_mistake_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "rank0" / "cat").mkdir(parents=True)
    (tmp_path / "rank0" / "cat" / "1.png").write_bytes(make_sample(0)["png"])
    for rank in range(2):
        (tmp_path / f"of{rank}").mkdir()
    first, second = run_ranks(missing_on_one_rank, 2, str(tmp_path))
    assert first == second
    assert first.startswith("data (rank 1)")
    assert "disco_ds.data:ImageFolder cannot be constructed: FileNotFoundError" in first


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "nowhere.at_all:Source",
            {},
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("our_package.fails:Source", {}, "cannot be imported: ZeroDivisionError"),
        ("our_package.my_sources:Pear", {}, "my_sources has no Pear"),
        (
            "our_package.others:NotOne",
            {},
            "is not a Source: derive the class from disco_ds.data.Source",
        ),
        (NAME, {"pth": "x"}, "missing a required argument: 'path'; its options: path, table"),
        (
            NAME,
            {"path": "x", "tabel": "y"},
            "got an unexpected keyword argument 'tabel'; its options: path, table",
        ),
        (
            NAME,
            {"path": "nowhere.sqlite"},
            "cannot be constructed: OperationalError: unable to open database file",
        ),
        ("our_package.others:Bare", {}, "NotImplementedError: the class defines no sizes"),
        ("our_package.others:Empty", {}, "at least one sample in `sizes`"),
        ("our_package.others:Unnamed", {}, "a str as `fingerprint`"),
    ],
)
def test_mistake_is_named(name: str, options: dict[str, Any], words: str, package: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load_sources(own("unused", source=name, options=options))
    assert str(caught.value).startswith(f"data.source: {name}")
    assert words in str(caught.value)
    mixed = settings(
        shards=None, sources=[{"source": "synthetic"}, {"source": name, "options": options}]
    )
    with pytest.raises(ValueError, match=re.escape("data.sources[1]: ") + re.escape(name)):
        load_sources(mixed)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": "synthetik"}, "data.source must match pattern '^(shards|synthetic|"),
        ({"source": "a:"}, "got 'a:'"),
        ({"sources": [{"shards": "a"}, {"options": {}}]}, "data.sources.1.shards is missing"),
    ],
)
def test_settings_that_make_no_sense_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        check_config({**MINIMAL, "data": data, "deepspeed": {}}, "test")
    assert words in str(error.value)


def test_source_pickles_unopened(package: Path, tmp_path: Path) -> None:
    (source,) = load_sources(own(write_pairs(tmp_path / "a.sqlite", 3, 8)))
    reader = pickle.loads(pickle.dumps(source)).open(1, 1)
    assert reader.read(7, 0)["txt"] == b"10"
    reader.close()


def test_image_folder_is_a_source(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / f"c{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.png").write_bytes(make_sample(number)["png"])
    data = settings(
        shards=None,
        source="disco_ds.data:ImageFolder",
        options={"folder": str(tmp_path)},
        image_key="image",
        captions={"a {cls}": 1},
        slots=2,
    )
    (tmp_path / "c0a").mkdir()  # a folder without images
    (folder,) = load_sources(data)
    assert (folder.sizes, folder.num_samples) == ([4, 0, 4], 8)
    loader = make_loader([folder], data, batch=8)
    step = read_step(loader)
    loader.close()
    assert step.error is None
    rows = [
        row
        for batch in step.micro_batches
        for row in zip(batch["index"], batch["image"], batch["text"], strict=True)
    ]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for index, image, text in rows:
        assert image[:, 4, 4].tolist() == list(color(order[index]))
        assert bytes(text[text > 0].tolist()) == f"a c{order[index] % 2}".encode()
    assert sorted(int(index) for index, _, _ in rows) == list(range(8))
    before = folder.fingerprint
    (tmp_path / "c1" / "7.png").rename(tmp_path / "c1" / "8.png")
    (folder,) = load_sources(data)
    assert folder.fingerprint != before
