"""data.group_by: which samples share a group, for every kind of source, and the metric that a run logs."""

import json
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from disco_ds.config import check_config, load_config
from disco_ds.config.data import Pixels
from disco_ds.data import load_sources
from disco_ds.training.build import build
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.minimal import MINIMAL
from helpers.shards import make_loader, make_sample, read_step, settings, write_shards
from helpers.tiny_run import recipe


def read_groups(sources: Any, data: Any) -> dict[int, int]:
    """Return the group of each sample of two steps, by sample id."""
    found: dict[int, int] = {}
    loader = make_loader(sources, data)
    for _ in range(2):
        step = read_step(loader)
        assert step.error is None, step.error
        for batch in step.micro_batches:
            found |= zip(batch["index"].tolist(), batch["group_id"].tolist(), strict=True)
    loader.close()
    return found


def same_groups(found: dict[int, int], expected: dict[int, Any]) -> bool:
    return all(
        (found[i] == found[j]) == (expected[i] == expected[j]) for i, j in product(found, repeat=2)
    )


def repeat_images(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
    return sample | {"png": make_sample(index % 5)["png"]}


def test_groups_are_samples_with_equal_captions_images_or_fields(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [30, 30], repeat_images)
    ids = range(60)
    labels = {i: f"label {i % 3}" for i in ids}
    caption = {"captions": {"{json[label]}": 1.0}}
    for group_by, changes, expected in (
        ("{json[label]}", {}, labels),
        ("caption", caption, labels),
        ("{txt}", caption, {i: i for i in ids}),
        ("image", caption, {i: i % 5 for i in ids}),
    ):
        data = settings(slots=4, group_by=group_by, **changes)
        found = read_groups(manifest, data)
        assert len(found) == 48
        assert same_groups(found, expected), group_by


@pytest.mark.slow
def test_groups_do_not_depend_on_the_process_that_finds_them(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [30, 30], repeat_images)
    found, again = (
        read_groups(manifest, settings(slots=4, group_by="image", workers=workers))
        for workers in (0, 1)
    )
    assert found == again
    assert len(set(found.values())) == 5


def test_caption_means_the_text_that_is_used(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [30, 30])
    captions = {"{json[label]}": 1.0, "{txt}": 1.0}
    loader = make_loader(manifest, settings(slots=4, group_by="caption", captions=captions))
    texts: dict[int, set[str]] = {}
    for batch in read_step(loader).micro_batches:
        for text, group_id in zip(batch["text"].tolist(), batch["group_id"].tolist(), strict=True):
            texts.setdefault(group_id, set()).add(bytes(text).rstrip(b"\0")[:5].decode())
    loader.close()
    # All samples of a group have the same text: a number or a label. Labels are cut to the length of the context.
    assert all(len(found) == 1 for found in texts.values())
    assert 1 <= sum(found == {"label"} for found in texts.values()) <= 3
    assert len(texts) > 6


def test_column_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(make_sample(3)["png"])
    rows = "".join(f"image.png\ta title {i}\tartist {i % 4}\n" for i in range(48))
    (tmp_path / "pairs.csv").write_text("filepath\ttitle\tartist\n" + rows)
    changes = {"image_key": "filepath", "captions": {"{title}": 1.0}, "slots": 4}
    data = settings(tmp_path / "pairs.csv", group_by="{artist}", **changes)
    found = read_groups(load_sources(data), data)
    assert same_groups(found, {i: i % 4 for i in range(48)})
    missing = settings(tmp_path / "pairs.csv", group_by="{author}", **changes)
    with pytest.raises(ValueError, match=r"has no column author(, title)?; its columns: "):
        load_sources(missing)


def test_sample_without_the_field_is_broken(tmp_path: Path) -> None:
    def spoil(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return sample if index % 10 else sample | {"json": b'{"label": null}'}

    manifest = write_shards(tmp_path, [30, 30], spoil)
    loader = make_loader(manifest, settings(slots=4, group_by="{json[label]}", max_broken=0.2))
    broken = [line for _ in range(2) for line in read_step(loader).broken]
    loader.close()
    assert broken
    assert all("group '{json[label]}': LookupError" in line for line in broken)
    loader = make_loader(manifest, settings(slots=4, group_by="{json[class]}"))
    error = read_step(loader).error
    loader.close()
    assert error is not None
    assert "group '{json[class]}': KeyError" in error


def test_mistakes_are_refused() -> None:
    for group_by, message in (("captions", "has no field such as"), ("{json[", "expected '}'")):
        with pytest.raises(ValueError, match=message):
            settings(group_by=group_by)
    loss = {"name": "inf_cl", "options": {"same_group": "ignored"}}
    with pytest.raises(ValueError, match=r"loss\.options\.same_group=ignored needs data\.group_by"):
        check_config(MINIMAL | {"loss": loss}, "test")


CHOICES = ("negatives", "ignored", "positives")


def run_each(path: Path) -> None:
    for same_group in CHOICES:
        changes = [f"loss.options.same_group={same_group}", f"name={same_group}"]
        with ExitStack() as stack:
            train(build(load_config(path, changes), None, stack))


def test_run_with_groups(tmp_path: Path) -> None:
    """Two ranks log the fraction of grouped pairs, and the groups change the loss."""

    def repeat(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return sample | {"txt": b"unique" if index == 15 else b"picture %d" % (index // 2)}

    write_shards(tmp_path / "data", [8, 8], repeat)
    data = {"shards": str(tmp_path / "data"), "image_key": "png", "workers": 0, "slots": 2}
    path = recipe(tmp_path, steps=1, data=data | {"group_by": "caption"})
    run_ranks(run_each, 2, path)
    losses = {}
    for same_group in CHOICES:
        lines = (tmp_path / "runs" / same_group / "metrics.jsonl").read_text().splitlines()
        (record,) = (json.loads(line) for line in lines if "i2t_accuracy" in line)
        assert record["grouped_pairs"] == 14 / 16
        losses[same_group] = record["loss"]
    assert losses["ignored"] < losses["negatives"]
    # All samples of a group have the same text. So all positives of an image have the same logit, and dividing the
    # target between them does not change the loss.
    assert losses["positives"] == pytest.approx(losses["negatives"], rel=1e-6)


def run_with_each_staging(path: Path) -> None:
    for staging in get_args(Pixels):
        with ExitStack() as stack:
            changes = [f"image_staging={staging}", f"name={staging}"]
            train(build(load_config(path, changes), None, stack))


@pytest.mark.slow
def test_groups_and_sample_state_do_not_depend_on_image_staging(tmp_path: Path) -> None:
    """There are four micro-batches, so the buffers of the first ones are reused before the loss is computed."""
    write_shards(tmp_path / "data", [16, 16])
    data = {"shards": str(tmp_path / "data"), "image_key": "png", "workers": 0, "slots": 2}
    losses = [
        (
            {"name": "disco_fused", "options": {"same_group": "ignored"}},
            {"group_by": "{json[label]}"},
        ),
        ({"name": "fastclip_v1", "options": {"gamma_min": 0.5, "gamma_epochs": 1}}, {}),
    ]
    for loss, grouped in losses:
        folder = tmp_path / str(loss["name"])
        folder.mkdir()
        path = recipe(folder, steps=6, loss=loss, data=data | grouped, log={"every_steps": 1})
        run_ranks(run_with_each_staging, 1, path)
        texts = [folder / "runs" / staging / "metrics.jsonl" for staging in get_args(Pixels)]
        read = [[json.loads(line) for line in text.read_text().splitlines()] for text in texts]
        names = ("ids", "loss", "grouped_pairs")
        first, *others = [[[r.get(name) for name in names] for r in records] for records in read]
        assert others == [first]
