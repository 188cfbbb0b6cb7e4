"""Evaluation sets in every layout, and the mistakes that are reported at the start."""

import json
import math
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor

from disco_ds.config import DataSettings, EvalSettings
from disco_ds.data import ImageFolder, ImageSpec, read_all
from disco_ds.data.sources.counting import index_shards
from disco_ds.data.sources.shards import write_manifest
from disco_ds.eval import ImageSet, load_sets
from disco_ds.eval.pairs import RetrievalSet, find_ranks, score_batch
from disco_ds.eval.sets import PLAIN, read_classes, read_templates
from helpers.eval_sets import CAPTIONS, WNIDS, write_benchmark, write_folder
from helpers.shards import write_shards, write_tar

DATA = DataSettings(source="synthetic")


def load(folder: Path, **changes: object) -> ImageSet:
    """Load the labeled set in a folder."""
    (found,) = load_sets(EvalSettings(labeled={"x": str(folder)}, **changes), DATA)  # type: ignore[arg-type]
    return found


def make_folder(folder: Path, names: list[str]) -> Path:
    """Create a sub-folder for each name, the first with an image."""
    for name in names:
        (folder / name).mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(folder / names[0] / "0.png")
    return folder


def refused(folder: Path | str, *words: str, **changes: object) -> None:
    with pytest.raises(ValueError) as error:
        load_sets(EvalSettings(labeled={"x": str(folder)}, **changes), DATA)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value), error.value


def test_imagenet_folders_have_open_clips_names_and_templates(tmp_path: Path) -> None:
    some = load(write_folder(tmp_path / "some"))
    assert some.classes == WNIDS, (
        "images must be classified among the classes of their set only, as for ImageNet-R"
    )
    assert isinstance(some.source, ImageFolder)
    assert some.source.sizes == [3, 3, 0]
    assert some.templates == tuple(fill("{}") for fill in open_clip.OPENAI_IMAGENET_TEMPLATES)
    numbered = load(make_folder(tmp_path / "v2", [str(number) for number in range(1000)]))
    assert list(numbered.classes.values()) == list(open_clip.IMAGENET_CLASSNAMES)
    assert list(numbered.classes) == [str(number) for number in range(1000)], (
        "classes must be in the order of their numbers"
    )


def test_shards_keep_their_labels_and_may_be_given_words_and_prompts(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [9])
    plain = load(tmp_path / "shards")
    assert (plain.templates, plain.classes) == (
        PLAIN,
        {f"label {k}": f"label {k}" for k in range(3)},
    )
    (tmp_path / "names.json").write_text(json.dumps({f"label {k}": f"thing {k}" for k in range(5)}))
    given = load(
        tmp_path / "shards", classes={"x": tmp_path / "names.json"}, templates={"x": "imagenet"}
    )
    assert given.classes == {f"label {k}": f"thing {k}" for k in range(5)}
    assert len(given.templates) == 80


def test_shards_are_read_in_a_run_on_a_csv(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.jpg", b"jpeg"), ("0.txt", b"a cat")])
    write_manifest(index_shards(tmp_path))
    data = DataSettings(source="synthetic", image_key="filepath")
    (found,) = load_sets(EvalSettings(validation={"x": str(tmp_path)}), data)
    assert found.data.image_key.split(";")[:2] == ["filepath", "jpg"]


def test_benchmark_layout_brings_its_classes_templates_and_captions(tmp_path: Path) -> None:
    found = load(write_benchmark(tmp_path / "labeled", None))
    assert found.classes == {"0": "red", "1": "green", "2": "blue", "3": "never seen"}
    assert found.templates == ("a photo of a {}.", "{}, drawn")
    captioned = write_benchmark(tmp_path / "captioned", CAPTIONS)
    (found,) = load_sets(EvalSettings(retrieval={"c": str(captioned)}), DATA)
    assert (type(found), found.source.num_samples, found.text) == (RetrievalSet, 11, "{txt}")
    refused(captioned, "eval.labeled.x: the template {cls} gives no text", "eval.label_key")
    (tmp_path / "labeled" / "classnames.txt").write_text("red\ngreen\n")
    refused(tmp_path / "labeled", "class names: 2", "labels: 3", "without a name: 2")
    (tmp_path / "labeled" / "classnames.txt").unlink()
    refused(tmp_path / "labeled", "classnames.txt", "No such file")
    (tmp_path / "labeled" / "test" / "nshards.txt").write_text("3")
    refused(tmp_path / "labeled", "nshards.txt says 3", "has 2 .tar")


LABELS = ["n2", "n10", "n3"]


@pytest.mark.parametrize(
    ("name", "text", "labels", "words"),
    [
        (
            "a.txt",
            "a cat\na dog\na bird\n",
            LABELS,
            {"n10": "a cat", "n2": "a dog", "n3": "a bird"},
        ),
        ("a.txt", "zero\none\ntwo\n", ["2", "0"], {"0": "zero", "1": "one", "2": "two"}),
        ("a.json", '["zero", "one"]', ["1"], {"0": "zero", "1": "one"}),
        ("a.txt", "\ufeff1 euro\n2 euro\n", ["x", "y"], {"x": "1 euro", "y": "2 euro"}),
        ("a.txt", "\ufeff1\t1 euro\n5\t 5 euro\n", ["1", "5"], {"1": "1 euro", "5": "5 euro"}),
        ("a.json", '{"n2": "two", "n9": "nine"}', ["n2"], {"n2": "two", "n9": "nine"}),
        ("a.txt", "0\tzero\n1\tone\n", ["1"], {"0": "zero", "1": "one"}),
    ],
)
def test_class_file_gives_words_to_labels(
    tmp_path: Path, name: str, text: str, labels: list[str], words
) -> None:
    (tmp_path / name).write_text(text)
    assert read_classes(tmp_path / name, labels) == words


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "one\ntwo\n", "class names: 2, labels: 3"),
        ("a.txt", "one\ntwo\nthree\nfour\n", "class names: 4, labels: 3"),
        ("a.json", '{"n2": "two"}', "n10, n3"),
        ("a.json", "{", "Invalid JSON"),
        ("a.json", '{"n10": ["n10", "ten"]}', "valid string"),
        ("a.json", '"abc"', "2 validation errors"),
    ],
)
def test_class_file_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path / name}.*{said}"):
        read_classes(tmp_path / name, LABELS)


def test_class_folder_that_ends_in_a_blank_is_a_class(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", ["cat ", "dog"])
    images = load(folder)
    assert images.classes == {"cat": "cat", "dog": "dog"}
    (sample,) = read_all(images.source, images.data, ImageSpec((4, 4)), 0, 1, images.text)
    assert sample[1] == "cat"


def test_template_file_needs_a_place_for_the_class(tmp_path: Path) -> None:
    path = tmp_path / "templates.txt"
    path.write_text("a {}.\n\n{c}, drawn {here}\n")
    assert read_templates(str(path)) == ("a {}.", "{}, drawn {here}")
    path.write_text("a {}.\nno place\n")
    with pytest.raises(ValueError, match="'no place' has neither"):
        read_templates(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match="neither"):
        read_templates(str(path))


def test_folders_that_are_no_set_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "eval.labeled.x: there is no folder")
    refused(tmp_path, "no sub-folder with an image", "sub-folder per class")
    (tmp_path / "empty" / "n01440764").mkdir(parents=True)
    refused(tmp_path / "empty", "no sub-folder with an image")
    make_folder(tmp_path / "few", ["0", "1"])
    refused(
        tmp_path / "few",
        "eval.classes and eval.templates: eval.labeled has no set named y",
        templates={"y": "f"},
    )
    with pytest.raises(ValueError, match=r"no \.tar shards"):
        load_sets(EvalSettings(retrieval={"x": str(tmp_path / "few")}), DATA)
    write_tar(tmp_path / "few" / "0.tar", [("a.cls", b"1")])
    refused(tmp_path / "few", "disco-ds index")
    write_shards(tmp_path / "shards", [3])
    with pytest.raises(ValueError, match=r"{cap} gives no text .* check eval\.caption_key"):
        load_sets(
            EvalSettings(retrieval={"x": str(tmp_path / "shards")}, caption_key="{cap}"), DATA
        )


def ranks_with(query: Tensor, ids: Tensor, key: Tensor, key_ids: Tensor) -> Tensor:
    """Return find_ranks for queries and keys that match if they have the same id."""
    both = torch.stack([ids.unique(), ids.unique()], 1)
    return find_ranks(query, ids, key, key_ids, both)


def test_ranks_are_those_of_a_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_ds.eval.pairs._ROWS", 7)
    torch.manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(n, 4), dim=1) for n in (50, 120))
    image_id, text_id = torch.arange(50), torch.cat([torch.arange(50), torch.randint(50, (70,))])
    scores = image @ text.T
    own = (
        scores.masked_fill(image_id[:, None] != text_id, -torch.inf).max(dim=1, keepdim=True).values
    )
    assert torch.equal(ranks_with(image, image_id, text, text_id), (scores > own).sum(dim=1) + 1)
    expected = (scores.T.gather(1, text_id[:, None]) < scores.T).sum(dim=1) + 1
    assert torch.equal(ranks_with(text, text_id, image, image_id), expected)


def test_features_that_are_all_alike_find_nothing() -> None:
    ids = torch.arange(40)
    alike = torch.nn.functional.normalize(torch.ones(40, 8), dim=1)
    assert ranks_with(alike, ids, alike, ids).eq(40).all(), "a tie must count as wrong"
    captions = ids.repeat_interleave(5)
    found = ranks_with(alike, ids, alike.repeat_interleave(5, 0), captions)
    assert found.eq(1 + 39 * 5).all(), "other captions of the same image must not count as mistakes"
    loss, i2t, t2i = score_batch(alike, alike, torch.ones(1)).tolist()
    assert (i2t, t2i) == (0, 0)
    assert loss == pytest.approx(math.log(40))
