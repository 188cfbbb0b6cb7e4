"""Runs with a teacher.

The result does not depend on the number of ranks or micro-batches. A resumed run is bit-identical to an uninterrupted
one. Resuming with another teacher is refused.
"""

import io
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from torch.nn import functional as F

from disco_ds.checkpoints.keep import list_complete
from disco_ds.config import load_config
from disco_ds.data import index_shards, write_manifest
from disco_ds.distributed import comm
from disco_ds.plan.towers import trace
from disco_ds.runs.run_folder import CHECKPOINTS
from disco_ds.training.build import Run, build
from disco_ds.training.loop import train
from helpers.dist import run_ranks
from helpers.launched import (
    CASES,
    equal_checkpoints,
    records,
    same_as_uninterrupted,
    train_until_killed,
    train_without_launcher,
    write_recipe,
)
from helpers.tiny_run import expect, image_sample, recipe, refused, write_shard
from helpers.towers import BPE_SIZE, TINY, distance, masters


def write_teacher(folder: Path, context: int = 12, seed: int = 0) -> dict[str, Any]:
    """Write a teacher whose width and image size differ from the student's. Return its settings in a recipe."""
    path, weights = folder / f"teacher-{context}.json", folder / f"teacher-{context}-{seed}.pt"
    tree = TINY | {
        "embed_dim": 24,
        "vision_cfg": TINY["vision_cfg"] | {"image_size": 48},
        "text_cfg": TINY["text_cfg"] | {"vocab_size": BPE_SIZE, "context_length": context},
    }
    path.write_text(json.dumps(tree))
    open_clip.add_model_config(path)
    torch.manual_seed(seed)
    torch.save(open_clip.create_model(path.stem).state_dict(), weights)
    return {"model": str(path), "pretrained": str(weights), "weight": 0.4}


def start(path: Path, overrides: list[str], stack: ExitStack, resume: str | None = None) -> Run:
    return build(load_config(path, [*overrides, "log.tensorboard=false"]), resume, stack)


def run_steps(path: Path, overrides: list[str], resume: str | None = None) -> Run:
    with ExitStack() as stack:
        run = start(path, overrides, stack, resume)
        train(run)
    comm.barrier()
    return run


def resume_and_refuse(path: Path, change: str) -> list[dict[str, Any]]:
    """Check that a resumed run equals an uninterrupted one. Return its metrics."""
    whole = run_steps(path, ["name=whole"])
    run_steps(path, ["name=part", "stages=[]", "steps=4"])
    folder = path.parent / "runs" / "part" / CHECKPOINTS
    assert [tag.name for tag in list_complete(folder.parent)] == ["step-00000002", "step-00000004"]
    with ExitStack() as stack:
        resumed = start(path, ["name=part"], stack, str(folder / "step-00000002"))
        train(resumed)
    comm.barrier()
    if comm.rank() == 0:
        equal_checkpoints(*(run.folder / CHECKPOINTS / "step-00000004" for run in (whole, resumed)))
    comm.barrier()
    name, _, _ = change.partition("=")
    config = load_config(path, ["name=part", change])
    said = refused(config, str(folder / "step-00000002"))
    expect(said, name.replace("pretrained", "weights"))
    return records(whole.folder)


def resume_both(model: Path, other: str, stored: Path) -> None:
    last = resume_and_refuse(model, f"teacher.pretrained={other}")[-1]
    assert last["loss"] == pytest.approx(
        0.6 * last["pair_loss"] + 0.4 * last["teacher_loss"], rel=1e-5
    )
    assert 0 < last["teacher_kl"] < last["teacher_loss"]
    assert 0 <= last["teacher_agreement"] <= 1
    resume_and_refuse(stored, "teacher.scale=[20,6]")


def write_both(folder: Path, context: int = 12) -> list[Path]:
    """Write a recipe with a teacher model, and one with stored embeddings of two teachers."""
    changes = {"teacher": write_teacher(folder, context)}, write_stored(folder / "shards")
    paths = []
    for name, given in zip(("model", "stored"), changes, strict=True):
        (folder / name).mkdir()
        paths.append(recipe(folder / name, **given))
    return paths


def test_runs_resume_to_the_bit_and_refuse_another_teacher(tmp_path: Path) -> None:
    model, stored = write_both(tmp_path)
    run_ranks(resume_both, 2, model, write_teacher(tmp_path, seed=1)["pretrained"], stored)


def first_update(path: Path, name: str, overrides: list[str]) -> dict[str, torch.Tensor]:
    """Take one step, and return the change of each master weight. Collective."""
    with ExitStack() as stack:
        run = start(path, [f"name={name}", "steps=1", *overrides], stack)
        before = masters(run.engine)
        train(run)
        after = masters(run.engine)
    comm.barrier()
    return {key: after[key] - before[key] for key in before}


SGD = [
    "optim={name: sgd, momentum: 0.0, weight_decay: 0.0, lr: 1.0, warmup_steps: 0}",
    "checkpoint.every_steps=0",
]


@pytest.mark.parametrize("context", [pytest.param(12, marks=pytest.mark.slow), 7])
def test_update_is_that_of_one_process_that_computes_the_formula(
    tmp_path: Path, context: int
) -> None:
    """A context length of 7 differs from the student's, so the teacher needs separate tokens."""
    paths = write_both(tmp_path, context)
    run_ranks(formulas, 1, *paths)
    for errors in run_ranks(accumulated, 2, paths):
        assert max(errors) < 2e-5, errors


def accumulated(paths: list[Path]) -> list[float]:
    return [
        distance(
            first_update(path, "accumulated", [*SGD, "micro_batch=4"]),
            torch.load(path.with_name("formula.pt")),
        )
        for path in paths
    ]


def formulas(model: Path, stored: Path) -> None:
    """Compute the expected updates by the formula of the loss, in float64, on the whole batch. Save them."""
    formula(model)
    stored_formula(stored)


def formula(path: Path) -> None:
    with ExitStack() as stack:
        run = start(path, ["name=formula", "steps=1", "micro_batch=16", *SGD], stack)
        run.loader.start_step()
        (batch,) = run.loader.first_pass()
        frozen = run.towers.teacher
        assert frozen is not None
        teacher = frozen.model.double()
        student = run.engine.module.double()
        texts = batch.get("teacher_text", batch["text"])
        pixels = batch["image"].double() / 255
        resized = F.interpolate(pixels.float(), (48, 48), mode="bicubic", antialias=True)
        with torch.no_grad():
            image, text, scale, _ = teacher(resized.clamp(0, 1).double(), texts)
        y = (scale * image @ text.T).double()
        image, text, scale, _ = student(batch["image"], batch["text"])
        x = (scale * image @ text.T).double()
        save_update(path, run, student, x, [y.softmax(1), y.T.softmax(1)])


def save_update(
    path: Path, run: Run, student: torch.nn.Module, x: torch.Tensor, targets: list[torch.Tensor]
) -> None:
    """Save the update of SGD for logits `x` and the targets of both directions, next to the recipe."""
    sides = [x.log_softmax(1), x.T.log_softmax(1)]
    pairs = -sum(side.diagonal().mean() for side in sides) / 2
    taught = -sum((t * s).sum(1).mean() for t, s in zip(targets, sides, strict=True)) / 2
    parameters = dict(student.named_parameters())
    gradients = torch.autograd.grad(0.6 * pairs + 0.4 * taught, list(parameters.values()))
    norm = torch.nn.utils.get_total_norm(gradients)
    clip = run.config.optim.clip_norm
    factor = min(1.0, clip / norm.item()) if clip else 1.0
    update = zip(parameters, gradients, strict=True)
    torch.save(
        {name: -factor * gradient for name, gradient in update}, path.with_name("formula.pt")
    )


def write_stored(folder: Path) -> dict[str, Any]:
    """Write shards with stored embeddings of two teachers. Return the settings of a recipe that uses them.

    Each sample has embeddings of three augmentations and of two captions.
    """
    generator = np.random.default_rng(0)

    def array(rows: int) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, generator.standard_normal((rows, 12)).astype("float16"))
        return buffer.getvalue()

    folder.mkdir()
    for shard in range(4):
        samples = [
            image_sample(8 * shard + k)
            | {"alt": b"other %d" % k, "i.npy": array(3), "t.npy": array(2)}
            for k in range(8)
        ]
        write_shard(folder / f"{shard}.tar", samples)
    write_manifest(index_shards(folder))
    teacher = {
        "image": "i.npy",
        "text": "t.npy",
        "widths": [8, 4],
        "scale": [20.0, 5.0],
        "weight": 0.4,
    }
    data = {"shards": str(folder), "image_key": "png", "workers": 0, "slots": 4}
    augment = {"rotate_degrees": 10.0}
    captions = {"{txt}": 1.0, "{alt}": 1.0}
    return {"teacher": teacher, "data": data | {"captions": captions, "augment": augment}}


def stored_formula(path: Path) -> None:
    with ExitStack() as stack:
        run = start(path, ["name=stored-formula", "steps=1", "micro_batch=16", *SGD], stack)
        run.loader.start_step()
        (batch,) = run.loader.first_pass()
        # The plan counts every array of a micro-batch.
        num_bytes = sum(x.nbytes for x in batch.values() if isinstance(x, torch.Tensor))
        assert num_bytes == 16 * trace(run.config, 16).sample
        image, text, *_ = run.towers.prepare(batch)
        embeddings = torch.stack([batch["image_embedding"], batch["text_embedding"]], 1)
        targets = []
        for side in (0, 1):
            found = []
            for part, scale in zip(embeddings.double().split([8, 4], 2), (20.0, 5.0), strict=True):
                rows, columns = (F.normalize(x, dim=1) for x in (part[:, side], part[:, 1 - side]))
                found.append((scale * rows @ columns.T).softmax(1))
            targets.append(sum(found) / 2)
        student = run.engine.module.double()
        image, text, scale, _ = student(image.double(), text.text)
        save_update(path, run, student, (scale * image @ text.T).double(), targets)


@pytest.mark.slow  # fast representative: test_runs_resume_to_the_bit_and_refuse_another_teacher
@pytest.mark.parametrize("kind", ["stored", "model"])
def test_killed_run_with_a_teacher_resumes_to_the_bit(tmp_path: Path, kind: str) -> None:
    """The run has dropout, two micro-batches on each of two ranks, and a checkpoint in the middle of an epoch."""
    folder = tmp_path / "run"
    arguments = write_recipe(folder, CASES["zero1-fp32"])
    changes = {"teacher": write_teacher(tmp_path)}
    if kind == "stored":
        changes = write_stored(tmp_path / "shards")
    arguments += [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    arguments += ["steps=30", "checkpoint.every_steps=5", "lost_after_s=5"]
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=whole"])
    run = train_until_killed(folder, [*arguments, "name=cut"], "cut", 7)
    run_ranks(train_without_launcher, 2, folder, [*arguments, "name=cut", "--resume", "latest"])
    same_as_uninterrupted(run, folder / "runs" / "whole")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": {"name": "nt_xent"}}, "a teacher needs loss.name=clip or disco"),
        ({"loss": {"options": {"teacher_weight": 0.5}}}, "teacher.weight sets it"),
        ({"data": {"source": "synthetic"}}, "synthetic data have none"),
        ({"teacher": {"model": "ViT-B-32"}}, "either model and pretrained, or image and text"),
        ({"teacher": {"image": "i.npy", "text": "t.npy", "model": "x"}}, "either model and"),
        ({"teacher": {"image": "i.npy", "text": "t.npy", "scale": [1, 2]}}, "one for each of"),
        (
            {"teacher": {"image": "i.npy", "text": "t.npy"}, "loss": {"name": "siglip"}},
            "set teacher.bias",
        ),
    ],
)
def test_recipe_that_cannot_have_a_teacher_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    teacher = {"teacher": {"model": "ViT-B-32", "pretrained": "openai"}}
    path = recipe(tmp_path, **teacher | changes)
    with pytest.raises(ValueError, match=words):
        load_config(path)
