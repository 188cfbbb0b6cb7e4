"""Stored embeddings: in every format, a sample gets the row of its augmentation and caption, or is refused."""

import gzip
import io
import json
import pickle
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode, functional

from disco_ds.config.recipe import TeacherSettings
from disco_ds.data import (
    BrokenSample,
    ImageSpec,
    InputSpec,
    Loader,
    Manifest,
    Shard,
    Share,
    Staging,
    load_sources,
)
from disco_ds.data.captions import list_captions, pick_caption
from disco_ds.data.stored import (
    OPERATIONS,
    RECORD,
    StoredEmbeddings,
    find_stored,
    read_array,
    replay,
)
from helpers.shards import CONTEXT, SPEC, VOCAB, picture, settings, tokenize, write_shards

WIDTH, VIEWS = 6, 3
CAPTIONS = {"{txt}": 1.0, "{syn.json[syn_text][*]}": 1.0}


def arrays(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings of the image [VIEWS, WIDTH] and of the captions [3, WIDTH] that encode sample and row."""
    rows = np.arange(3)[:, None] + np.zeros((3, WIDTH))
    rows[:, 0], rows[:, -1] = index, 1
    return rows, rows + 10


def npy(array: np.ndarray, dtype: str = "float16") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array.astype(dtype))
    return buffer.getvalue()


def npz(**found: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array.astype("float32") for name, array in found.items()})
    return buffer.getvalue()


def pth_gz(**found: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: torch.tensor(array).bfloat16() for name, array in found.items()}, buffer)
    return gzip.compress(buffer.getvalue())


def add(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
    """Replace a sample by one with three captions that stores both embeddings in all formats."""
    image, text = arrays(index)
    both = {"image_emb": image, "text_emb": text}
    syn = {"syn_text": [f"{index}a", f"{index}b"]}
    return {
        "png": picture(index),
        "txt": sample["txt"],
        "syn.json": json.dumps(syn).encode(),
        "img.npy": npy(image),
        "txt.npy": npy(text),
        "npz": npz(**both),
        "pth.gz": pth_gz(**both),
    }


FIELDS = [
    ("img.npy", "txt.npy"),
    ("npz[image_emb]", "npz[text_emb]"),
    ("pth.gz[image_emb]", "pth.gz[text_emb]"),
]


def loader(folder: Path, stored: StoredEmbeddings, seed: int = 3, **changes: Any) -> Loader:
    data = settings(folder, crop_scale=(0.2, 1.0), **{"captions": CAPTIONS, **changes})
    form = InputSpec(SPEC, tokenize, CONTEXT, VOCAB, stored=stored)
    sources = load_sources(data)
    teacher = TeacherSettings(image=stored.image, text=stored.text, replay=stored.replay)
    assert find_stored([data], teacher, sources) == stored
    return Loader(data, sources, form, Share(0, 1, 10, 10), seed, None, Staging("device"))


def read(loader: Loader, steps: int) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Read steps. Return (id, epoch) -> (pixels, caption, image embedding, text embedding)."""
    with closing(loader):
        return _read(loader, steps)


def _read(loader: Loader, steps: int) -> dict[tuple[int, int], tuple[Any, ...]]:
    found = {}
    for _ in range(steps):
        data = loader.start_step()
        for batch in loader.first_pass():
            assert data.error is None, data.error
            for i, place in enumerate(
                zip(batch["index"].tolist(), batch["epoch"].tolist(), strict=True)
            ):
                caption = bytes(batch["text"][i][batch["text"][i] > 0].tolist()).decode()
                image, text = (batch[f"{side}_embedding"][i].tolist() for side in ("image", "text"))
                found[place] = batch["image"][i].clone(), caption, image, text
    return found


@pytest.mark.parametrize(("image", "text"), FIELDS)
def test_rows_are_those_of_the_augmentation_and_the_caption(
    tmp_path: Path, image: str, text: str
) -> None:
    write_shards(tmp_path, [7, 13], add)
    stored = StoredEmbeddings(image, text, None, WIDTH)
    found = read(loader(tmp_path, stored), 12)  # six epochs
    endings = set()
    for (index, epoch), (_, caption, rows, texts) in found.items():
        assert rows[:2] == [index, epoch % VIEWS]
        number = {"": 0, "a": 1, "b": 2}[caption[len(str(index)) :]]
        assert texts[:2] == [index + 10, number + 10]
        endings.add(number)
    assert endings == {0, 1, 2}
    # Another seed must give the same crops, because the embeddings were computed from them.
    others = read(loader(tmp_path, stored, seed=8), 12)
    seen = {(index, epoch % VIEWS): value[0] for (index, epoch), value in found.items()}
    for (index, epoch), value in others.items():
        if (index, epoch % VIEWS) in seen:
            assert torch.equal(value[0], seen[index, epoch % VIEWS])
    assert not torch.equal(seen[0, 0], seen[0, 1])


def test_one_row_belongs_to_every_augmentation(tmp_path: Path) -> None:
    def one(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        rows, texts = arrays(index)
        return sample | {"png": picture(index), "img.npy": npy(rows[0]), "txt.npy": npy(texts[0])}

    write_shards(tmp_path, [10], one)
    stored = StoredEmbeddings("img.npy", "txt.npy", None, WIDTH)
    found = read(loader(tmp_path, stored, captions={"{txt}": 1.0}), 2)
    assert not torch.equal(found[0, 0][0], found[0, 1][0]), "the crop must differ between epochs"
    other = read(loader(tmp_path, stored, 4, captions={"{txt}": 1.0}), 1)
    assert not torch.equal(found[0, 0][0], other[0, 0][0]), "the crop must differ between seeds"


ENTRIES = [
    [[2, 3, 15, 16], [[1, 0.3], [7, -0.4]]],
    [[0, 0, 20, 24], [[5, -27.0], [10, 4.0]]],
    [[4, 4, 8, 8], None],
]


def by_hand(index: int, entry: Any, size: list[int]) -> torch.Tensor:
    """Return the expected pixels, by calling torchvision's operations one by one."""
    image = Image.open(io.BytesIO(picture(index))).convert("RGB")
    image = functional.resized_crop(image, *entry[0], size, InterpolationMode.BICUBIC)
    policy = transforms.RandAugment(num_ops=1)
    for number, magnitude in entry[1] or ():
        name = list(policy._augmentation_space(31, (8, 8)))[number]
        nearest = InterpolationMode.NEAREST
        if name == "ShearX":
            shear = [float(np.degrees(np.arctan(magnitude))), 0.0]
            image = functional.affine(image, 0.0, [0, 0], 1.0, shear, nearest, None, [0, 0])
        elif name == "Rotate":
            image = functional.rotate(image, magnitude, nearest, fill=None)
        elif name == "Color":
            image = functional.adjust_saturation(image, 1.0 + magnitude)
        elif name == "Posterize":
            image = functional.posterize(image, int(magnitude))
    return functional.pil_to_tensor(image)


@pytest.mark.parametrize("as_text", [False, True])
def test_recorded_augmentations_are_repeated(tmp_path: Path, as_text: bool) -> None:
    policy = transforms.RandAugment()
    assert list(policy._augmentation_space(31, (8, 8))) == list(OPERATIONS)
    recorded = {"param_aug": json.dumps(ENTRIES) if as_text else ENTRIES}

    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return add(index, sample) | {"paug.json": json.dumps(recorded).encode()}

    write_shards(tmp_path, [10], change)
    stored = StoredEmbeddings("img.npy", "txt.npy", "paug.json[param_aug]", WIDTH)
    for (index, epoch), value in read(loader(tmp_path, stored), 4).items():
        expected = by_hand(index, ENTRIES[epoch % VIEWS], list(SPEC.size))
        assert torch.equal(value[0], expected)


def test_every_operation_is_repeated() -> None:
    image = Image.open(io.BytesIO(picture(1)))
    for number in range(len(OPERATIONS)):
        assert replay(
            image, ImageSpec((9, 7)), [None, [[number, 4.0 if number > 9 else 0.3]]]
        ).shape == (3, 9, 7)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"img.npy": None}, "teacher: no img.npy; the sample has"),
        ({"img.npy": npy(np.ones((3, WIDTH, 1)))}, r"the shape \[3, 6, 1\]"),
        ({"img.npy": npy(np.full((3, WIDTH), np.nan))}, "img.npy has a row that is not finite"),
        ({"img.npy": npy(np.full((3, WIDTH), 3e38), "float32")}, "not finite or is zero"),
        ({"txt.npy": npy(np.eye(3, WIDTH, 1) - np.eye(3, WIDTH, 1)[:1])}, "txt.npy has a row that"),
        ({"txt.npy": npy(np.ones((2, WIDTH)))}, "has 2 rows, but data.captions can produce 3"),
        ({"img.npy": npy(np.ones((3, 7)))}, "width of 7"),
        ({"img.npy": npy(np.array([{}, {}]), "O")}, "allow_pickle"),
        ({"paug.json": b'{"param_aug": [null]}'}, "has 1 entries, but img.npy has 3 rows"),
        ({"paug.json": b'{"param_aug": [null, null, null]}'}, "TypeError"),
        (
            {"paug.json": json.dumps({"param_aug": [[[0, 5, 20, 20], None]] * 3}).encode()},
            r"crop \[0, 5, 20, 20\] exceeds the image of 24 x 20 pixels",
        ),
    ],
)
def test_sample_without_the_right_embeddings_is_refused(
    tmp_path: Path, members: dict[str, bytes | None], words: str
) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        found = add(index, sample) | {"paug.json": json.dumps({"param_aug": ENTRIES}).encode()}
        if index >= 5:
            found |= members
        return {name: data for name, data in found.items() if data is not None}

    write_shards(tmp_path, [40], change)
    stored = StoredEmbeddings("img.npy", "txt.npy", "paug.json[param_aug]", WIDTH)
    with pytest.raises(AssertionError, match=words) as caught:
        read(loader(tmp_path, stored), 4)
    assert "00000.tar/00" in str(caught.value), "the error must name the sample"


@pytest.mark.parametrize("changes", [{}, {"index": "none", "slots": 2}])
def test_width_is_that_of_any_sample_with_embeddings(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return add(index, sample) | ({"img.npy": b""} if index < 2 else {})

    write_shards(tmp_path, [0, 2, 10], change)
    stored = StoredEmbeddings("img.npy", "txt.npy", None, WIDTH)
    assert read(loader(tmp_path, stored, **changes), 1)


def test_record_in_the_working_directory_is_not_that_of_remote_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"captions": ["{other}"], "views": 0}))
    monkeypatch.chdir(tmp_path)
    source = Manifest(Path(), (Shard("0.tar", 1, 2048),), ("https://host/0.tar",))
    teacher = TeacherSettings(image="img.npy", text="txt.npy", widths=(WIDTH,))
    stored = find_stored([settings(Path())], teacher, [source])
    assert stored == StoredEmbeddings("img.npy", "txt.npy", None, WIDTH)


class Code:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize("save", [lambda value, file: file.write(pickle.dumps(value)), torch.save])
def test_code_in_a_pickle_does_not_run(save: Any, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = io.BytesIO()
    save({"x": Code()}, buffer)
    with pytest.raises(pickle.UnpicklingError):
        read_array("pth[x]", {"pth": buffer.getvalue()}, {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("a", "weights", "captions"),
    [
        (
            '["x", "y", "z"]',
            {"{json[a][*]}": 1.0, "{json[n]}": 5.0, "{json[n]|txt}!": 2.0},
            ["x", "y", "z", "t!"],
        ),
        ('["x", " ", null]', {"{json[a][*]|json[b][*]}": 1.0}, ["x", "p", "q", "p", "q"]),
        ('[null, "y"]', {"{json[a][*]}": 1.0, "{txt}": 1.0}, ["y", "t"]),
        ("[]", {"{json[a][*]|json[b][*]}": 1.0}, ["p", "q"]),
        ('["x", "y"]', {"{json[a][*]} {json[b][*]}": 1.0}, ["x p", "x q", "y p", "y q"]),
    ],
)
def test_captions_are_listed_in_the_order_of_the_templates(
    a: str, weights: dict[str, float], captions: list[str]
) -> None:
    """Null and blank items of a list have no caption of their own, whichever item is drawn."""
    members = {"txt": b"t", "json": b'{"a": %s, "b": ["p", "q"], "n": null}' % a.encode()}
    assert list_captions(weights, members) == captions
    chosen = set[str]()
    for uniform, item in product(np.linspace(0, 0.99, 9), np.linspace(0, 0.99, 25)):
        try:
            chosen.add(pick_caption(weights, members, uniform, item))
        except BrokenSample:
            continue
    assert chosen == set(captions)
