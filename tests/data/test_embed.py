"""`disco-ds embed` stores the teacher's embeddings of the same augmented images that training later sees."""

import json
import resource
import tarfile
from contextlib import ExitStack, closing
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.data.embed import IMAGE, SCORE, TEXT, Embedder, read_scores
from disco_ds.data.images import ImageSpec
from disco_ds.data.sources.base import Source
from disco_ds.data.sources.shards import load_manifest, read_manifest
from disco_ds.data.stored import find_view_key
from disco_ds.training.build import build
from helpers.dist import run_ranks
from helpers.shards import picture, write_shards
from helpers.tiny_run import expect, recipe, refused
from helpers.towers import BPE_SIZE, write_tiny

AUGMENT = {"rotate_degrees": 20.0, "color_scale": 0.3}


def sample(index: int, members: dict[str, bytes]) -> dict[str, bytes]:
    if index == 5:
        return {"png": b"broken", "txt": b"broken"}
    syn = {"texts": [f"synthetic {index}", f"second {index}"]}
    return {"png": picture(index), "txt": b"%d" % index, "syn.json": json.dumps(syn).encode()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write shards with one broken sample, and a recipe that reads them."""
    write_shards(tmp_path / "raw", [9, 4, 7], sample)
    data = {
        "shards": str(tmp_path / "raw"),
        "image_key": "png",
        "workers": 0,
        "slots": 3,
        "captions": {"{txt}": 1.0, "{syn.json[texts][*]}": 2.0},
        "crop_scale": [0.3, 1.0],
        "augment": AUGMENT,
    }
    return recipe(tmp_path, data=data)


def embed(path: Path, to: Path, *more: str) -> int:
    """Run `disco-ds embed` with the tiny model as the teacher. Return its exit code."""
    folder = path.parent
    weights = folder / "teacher.pt"
    model = write_tiny(folder, BPE_SIZE)
    if not weights.exists():
        open_clip.add_model_config(model)
        torch.manual_seed(4)
        torch.save(open_clip.create_model(Path(model).stem).state_dict(), weights)
    arguments = ["--model", model, "--pretrained", str(weights), "--config", str(path)]
    if "--score" not in more:
        arguments += ["--views", "3"]
    return main(["embed", *arguments, "--to", str(to), "--batch", "8", *more])


def features_of_training(path: Path, to: Path) -> list[float]:
    """Compare stored embeddings with those of the teacher for the images and texts that training reads.

    Returns:
        The largest difference of an image embedding, and that of a text embedding.
    """
    teacher = {"image": "img.npy", "text": "txt.npy", "scale": 14.0}
    overrides = [f"data.shards={to}", f"teacher={json.dumps(teacher)}", "log.tensorboard=false"]
    worst = [0.0, 0.0]
    with ExitStack() as stack:
        run = build(load_config(path, [*overrides, "seed=11"]), None, stack)
        model: Any = run.engine.module.eval()
        state = torch.load(path.parent / "teacher.pt", weights_only=True)
        del state["logit_scale"]  # its shape differs in this package
        model.load_state_dict(state, strict=False)
        keys = {find_view_key(picture(i), view): view for i in range(20) for view in range(3)}
        views = set()
        for _ in range(6):
            data = run.loader.start_step()
            for batch in run.loader.first_pass():
                assert data.error is None, data.error
                views |= {keys[key] for key in batch["view_key"].tolist()}
                image, text, _ = run.towers.prepare(batch)
                with torch.no_grad():
                    found = model(image, text.text)[:2]
                for side, name in enumerate(("image_embedding", "text_embedding")):
                    difference = (found[side] - batch[name]).abs().max().item()
                    worst[side] = max(worst[side], difference)
        assert views == {0, 1, 2}
    return worst


def test_stored_embeddings_are_those_of_what_training_sees(path: Path, tmp_path: Path) -> None:
    to = tmp_path / "embedded"
    assert embed(path, to) == 0
    counts = [shard.samples for shard in read_manifest(to / "manifest.json").shards]
    assert counts == [8, 4, 7], "the broken sample must be left out"
    (worst,) = run_ranks(features_of_training, 1, path, to)
    assert max(worst) < 1e-3, worst


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_interrupted_command_continues_on_any_number_of_ranks(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, to = tmp_path / "whole", tmp_path / "embedded"
    assert embed(path, whole) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    assert embed(path, to) == 0
    assert not (to / "manifest.json").exists()
    first = (to / "000001.tar").stat().st_ino
    (to / ".000000.tar.partial").write_bytes(b"killed here")
    monkeypatch.setenv("RANK", "0")
    assert embed(path, to) == 0
    assert contents(to).keys() == contents(whole).keys()
    for name, data in contents(whole).items():
        if name.endswith(".tar"):
            assert (to / name).read_bytes() == data
    assert (to / "000001.tar").stat().st_ino == first, "a complete shard must not be written again"


def few_files(path: Path, to: Path) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    return embed(path, to, "--views", "0", "--batch", "60", "data.workers=1")


@pytest.mark.slow  # fast representative: test_interrupted_command_continues_on_any_number_of_ranks
def test_large_batches_need_few_open_files(path: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "raw", [9, 150], sample)
    to = tmp_path / "embedded"
    assert run_ranks(few_files, 1, path, to, timeout_s=120, joined=False) == [0]
    assert [shard.samples for shard in read_manifest(to / "manifest.json").shards] == [8, 150, 7]


class OneUnreadable(Source):
    """A source of three samples. Reading the second one fails."""

    sizes: ClassVar[list[int]] = [3]
    fingerprint = "one unreadable"

    def open(self, num_slots: int, window: int) -> Any:
        return self

    def read(self, shard: int, entry: int) -> dict[str, bytes]:
        if entry == 1:
            raise KeyError("no row")
        return {"png": picture(entry), "txt": b"a text", "_note": b"kept"}

    def name(self, shard: int, entry: int) -> str:
        return f"row {entry}"

    def close(self) -> None:
        pass


def test_unreadable_sample_of_a_custom_source_is_left_out(path: Path, tmp_path: Path) -> None:
    to = tmp_path / "embedded"
    custom = ["data.shards=null", f"data.source={__name__}:OneUnreadable", "data.slots=1"]
    assert embed(path, to, *custom, "data.captions={'{txt}': 1}") == 0
    with tarfile.open(to / "000000.tar") as tar:
        names = tar.getnames()
    members = ["_note", "img.npy", "png", "txt", "txt.npy"]
    assert names == [f"00000{number}.{member}" for number in (0, 1) for member in members]


def test_column_that_no_sample_has_is_one_line(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["data.captions={'{nothing}': 1}", "data.max_broken=0"]
    assert embed(path, tmp_path / "to", *overrides) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "17 of 17 samples are broken" in line


def test_folder_of_other_embeddings_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "embedded"
    assert embed(path, to) == 0
    before = contents(to)
    assert embed(path, to, "data.crop_scale=[0.5,1]") == 2
    assert "was begun with crop_scale [0.3, 1.0], now it is [0.5, 1.0]" in capsys.readouterr().err
    assert embed(path, tmp_path / "raw") == 2
    assert "has shards that embed did not write" in capsys.readouterr().err
    # The same names and counts, but other samples.
    write_shards(
        tmp_path / "other", [9, 4, 7], lambda index, _: sample(index + 1, {}) | {"txt": b"other"}
    )
    for change, words in (
        (f"data.shards={tmp_path / 'other'}", "was begun with"),
        ("data.filter={similarity: {min: 0.3}}", "was begun with filter {}"),
        ("data.image_key=png;jpg", "was begun with image_key png, now it is png;jpg"),
    ):
        assert embed(path, to, change) == 2
        assert words in capsys.readouterr().err
    assert contents(to) == before
    run_ranks(other_crop, 2, path, to)


def other_crop(path: Path, to: Path) -> None:
    teacher = json.dumps({"image": "img.npy", "text": "txt.npy"})
    (to.parent / "list.txt").write_text(f"{to}/000000.tar\n{to.parent}/raw/00001.tar\n")
    (to.parent / "manifest.json").write_text(joined_manifest(to.parent))
    stages = "stages=[{until: 32, crop_scale: [0.5, 1]}, {until: 64}]"
    for shards, change, words in (
        (to, "data.crop_scale=[0.5,1]", "were computed with data.crop_scale [0.3, 1.0]"),
        (to, "data.captions={'{txt}': 1}", "were computed with data.captions"),
        (to, "data.image_key=jpg;png", "were computed with data.image_key png"),
        (to, stages, "data.crop_scale [0.3, 1.0], but this run has [0.5, 1.0]"),
        (f"{to.parent}/*/*0.tar", "data.crop_scale=[0.5,1]", "were computed with data.crop_scale"),
        (to.parent / "list.txt", "data.crop_scale=[0.5,1]", "were computed with data.crop_scale"),
    ):
        overrides = [f"data.shards={shards}", f"teacher={teacher}", change]
        if shards != to:
            overrides.append(f"data.manifest={to.parent / 'manifest.json'}")
        if change == stages:
            overrides.append("steps=null")
        expect(refused(load_config(path, overrides)), words)


def joined_manifest(folder: Path) -> str:
    """Return the manifest of the shards of all subfolders."""
    manifests = folder.glob("*/manifest.json")
    shards = [
        {**shard._asdict(), "name": f"{path.parent.name}/{shard.name}"}
        for path in manifests
        for shard in read_manifest(path).shards
    ]
    return json.dumps({"shards": shards})


def test_image_without_augmentation_is_stored_once(path: Path, tmp_path: Path) -> None:
    to = tmp_path / "embedded"
    assert embed(path, to, "--views", "0", "data.augment={}") == 0
    teacher = json.dumps({"image": "img.npy", "text": "txt.npy"})
    config = load_config(path, [f"data.shards={to}", f"teacher={teacher}", "data.crop_scale=null"])
    run_ranks(build_only, 1, config)


def build_only(config: Any) -> None:
    with ExitStack() as stack:
        run = build(config, None, stack)
        run.loader.start_step()
        for batch in run.loader.first_pass():
            for side in ("image", "text"):
                assert (batch[f"{side}_embedding"].norm(dim=1) - 1).abs().max() < 1e-2


def scored(index: int, members: dict[str, bytes]) -> dict[str, bytes]:
    """Return a sample with a json member, which already has a similarity of another model."""
    fields = {"uid": f"{index:032x}", "similarity": 0.9}
    return sample(index, members) | {"json": json.dumps(fields).encode()}


def read_members(folder: Path) -> list[dict[str, Any]]:
    """Return the members of all samples in the shards of a folder."""
    manifest = load_manifest(folder)
    with closing(manifest.open()) as reader:
        return [reader.read(s, i) for s, size in enumerate(manifest.sizes) for i in range(size)]


@pytest.mark.parametrize("views", [None, pytest.param("0", marks=pytest.mark.slow), "2"])
def test_scores_are_mean_cosines_that_the_filter_reads(
    views: str | None, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(tmp_path / "raw", [9, 4, 7], scored if views else sample)
    to, plain = tmp_path / "scored", tmp_path / "plain"
    assert embed(path, plain, "--views", "0") == 0
    assert embed(path, to, "--score", *(["--views", views] if views else [])) == 0
    expected = []
    for members in read_members(plain):
        image, texts = (torch.from_numpy(np.load(BytesIO(members[x]))) for x in (IMAGE, TEXT))
        expected.append((texts.double() @ image.double()).mean().item())
    scores = []
    for number, members in enumerate(read_members(to)):
        assert (IMAGE in members) == (TEXT in members) == (views is not None)
        if views:
            fields = json.loads(members["json"])
            assert fields["uid"] == f"{number + (number > 4):032x}"
            scores.append(fields["similarity"])
        else:
            scores.append(float(members["similarity"]))
    assert scores == pytest.approx(expected, abs=1e-3)
    assert len(set(scores)) > 15, "the samples must differ"
    out = capsys.readouterr().out
    ordered = sorted(scores)
    assert f"10% are below {ordered[1]:.2f}, 30% are below {ordered[5]:.2f}" in out
    for share, cut in ((70, 5), (50, 9), (30, 13)):
        rule = f"{{similarity: {{min: {ordered[cut]}}}}}"
        assert f"the best {share}%: data.filter='{rule}'" in out
        data = load_config(path, [f"data.shards={to}", f"data.filter={rule}"]).data
        assert sum(score >= data.filter["similarity"]["min"] for score in scores) == 19 - cut
        with Image.open(to / f"best_{share}.png") as drawn:
            assert drawn.size == (960, 760)
    assert embed(path, to) == 2, "the folder must be refused without --score"


@pytest.mark.parametrize(("size", "first"), [(6, 6), (40, 0)])
def test_pairs_are_those_around_the_threshold(
    size: int, first: int, path: Path, tmp_path: Path
) -> None:
    values = [((i * 7) % 20) / 20 for i in range(20)]

    def member(index: int, members: dict[str, bytes]) -> dict[str, bytes]:
        return {"png": picture(index), "txt": b"%d" % index, SCORE: b"%.2f" % values[index]}

    write_shards(tmp_path / "raw", [9, 4, 7], member)
    data = load_config(path, ["data.captions={'{txt}': 1}"]).data
    model = torch.nn.Module()
    spec: Any = SimpleNamespace(image=ImageSpec((16, 16), "bicubic", "shortest"))
    embedder = Embedder(data, spec, model, {}, None, 8, score=True)
    scores = read_scores(tmp_path / "raw")
    assert scores.tolist() == values
    around = scores.argsort(kind="stable")[first : first + size]
    pairs = list(embedder.read_pairs(tmp_path / "raw", scores, around))
    expected = sorted(range(20), key=values.__getitem__)[first : first + size]
    assert [caption for _, caption, _ in pairs] == [str(index) for index in expected]
    assert [note for *_, note in pairs] == [f"{values[index]:.4f}" for index in expected]
    assert all(image.shape == (3, 16, 16) for image, *_ in pairs)


def test_ranks_score_all_shards(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "scored"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank, prints in (("0", False), ("1", True), ("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        assert embed(path, to, "--score") == 0
        assert ("similarity of 19 samples" in capsys.readouterr().out) == prints
