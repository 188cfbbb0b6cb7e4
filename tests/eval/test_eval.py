"""Evaluation on all ranks gives the results of a plain loop over the data, and does not affect training."""

import io
import json
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.cli.main import main
from disco_ds.config import DataSettings, EvalSettings, ModelSettings, load_config
from disco_ds.data import ImageSpec, load_manifest, read_all, resolve_shards
from disco_ds.distributed import comm
from disco_ds.eval import Encoder, Result, describe, evaluate_sets, load_sets
from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.models.clip import build_model, read_preprocessing
from disco_ds.run import evaluation_settings, load_model
from disco_ds.training.build import build
from disco_ds.training.loop import evaluate, train
from helpers.checkpoints import flip
from helpers.dist import run_ranks
from helpers.eval_sets import CAPTIONS, TEMPLATES, WNIDS, write_benchmark, write_folder
from helpers.shards import encode, noise
from helpers.tiny_run import recipe
from helpers.towers import BPE_SIZE, IMAGE_SIZE, write_tiny
from helpers.trained import write_run


def accuracies(path: Path, stage: int) -> tuple[Result, tuple[float, float]]:
    """Train a little, and evaluate. Return the result of all ranks, and top-1 and top-5 of a plain loop."""
    overrides = [
        f"deepspeed.zero_optimization.stage={stage}",
        "steps=45",
        "micro_batch=8",
        "log.every_steps=45",
        "data.crop_scale=null",
        "model={name: quickstart, token_embedding_std: 0.5}",
        f"name=stage{stage}-{comm.size()}",
        "eval={labeled: {unseen: bundled:emoji/unseen}, label_key: '{json[caption]}'}",
    ]
    with ExitStack() as stack:
        config = load_config(path, overrides)
        run = build(config, None, stack)
        train(run)
        tokenize = run.encoder.tokenize
        (found,) = evaluate_sets(run.encoder, run.sets)
        manifest = load_manifest(resolve_shards("bundled:emoji/unseen"))
        samples = list(read_all(manifest, config.data, run.encoder.spec, 0, 1, "{json[caption]}"))
        labels = sorted({label for _, label, _ in samples})
        with torch.no_grad():
            run.engine.eval()
            image, text, *_ = run.engine(
                torch.stack([picture for picture, _, _ in samples]), tokenize(labels)
            )
        best = (image @ text.T).topk(5, dim=1).indices
        right = best == torch.tensor([labels.index(label) for _, label, _ in samples])[:, None]
        return found, (right[:, 0].float().mean().item(), right.any(1).float().mean().item())


@pytest.mark.slow  # fast representative: test_every_layout_at_any_number_of_ranks...
@pytest.mark.parametrize(("size", "stage"), [(1, 1), (2, 3)])
def test_accuracy_of_all_ranks_is_that_of_a_plain_loop(size, stage, tmp_path):
    # 155 is divisible neither by the number of ranks nor by the micro-batch.
    for found, plain in run_ranks(accuracies, size, recipe(tmp_path), stage):
        assert found.counts == {"num_images": 155, "num_classes": 155, "num_broken": 0}
        top1, top5 = found.values["top1"], found.values["top5"]
        assert (top1, top5) == pytest.approx(plain, abs=1.5 / 155)
        assert found.values["recall"] == pytest.approx(top1)
        assert top5 > 1.5 * 5 * found.values["chance"], (
            "an accuracy near chance would not show a difference"
        )


class Alike(nn.Module):
    """A model whose features are all equal. The argument `image` or `text` sets the value of that side."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        self.values = {"image": 0.5, "text": 0.5} | values

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        sides = {"image": image, "text": text}
        rows = [
            None if x is None else torch.full((len(x), 4), self.values[name])
            for name, x in sides.items()
        ]
        return *rows, torch.ones(1), None


def test_equal_features_find_nothing_and_non_finite_ones_name_the_tower() -> None:
    choices: Any = {
        "labeled": {"unseen": "bundled:emoji/unseen"},
        "label_key": "{json[caption]}",
        "retrieval": {"pairs": "bundled:emoji/unseen"},
        "validation": {"held_out": "bundled:emoji/unseen"},
    }
    sets = load_sets(EvalSettings(**choices), DataSettings(**DATA))

    def evaluate_model(model: nn.Module) -> dict[str, float]:
        def tokenize(texts: list[str]) -> Tensor:
            return torch.zeros(len(texts), 3, dtype=torch.int64)

        results = evaluate_sets(Encoder(model, ImageSpec((32, 32)), tokenize, 64), sets)
        return {key: value for result in results for key, value in result.values.items()}

    values = evaluate_model(Alike())
    assert values["chance"] == pytest.approx(1 / 155)
    right = ["top1", "top5", "recall", "i2t_r1", "t2i_r10", "i2t_at_155", "t2i_at_155"]
    assert [values[key] for key in right] == [0] * len(right)
    for side in ("image", "text"):
        for value in (float("nan"), float("inf")):
            with pytest.raises(comm.AgreedError, match=f"the {side} tower are not finite"):
                evaluate_model(Alike(**{side: value}))


DATA = {"shards": "bundled:emoji/unseen", "image_key": "png", "workers": 1}


def settings(folder: Path) -> EvalSettings:
    labeled = {name: str(folder / name) for name in ("folder", "benchmark", "single")}
    return EvalSettings(labeled=labeled, retrieval={"captioned": str(folder / "captioned")})


def encoders(model: Any) -> tuple[Any, Any, Any]:
    """Return functions that encode images, texts and classes as clip_benchmark does, with open_clip's functions."""
    transform = open_clip.image_transform(IMAGE_SIZE, is_train=False)
    tokenize = open_clip.tokenize

    def image(pictures: list[Image.Image]) -> Tensor:
        return F.normalize(
            model.encode_image(torch.stack([transform(picture) for picture in pictures])), dim=-1
        )

    def text(words: list[str]) -> Tensor:
        return F.normalize(
            model.encode_text(tokenize(words, context_length=model.context_length)), dim=-1
        )

    def classes(words: list[str], templates: list[str]) -> Tensor:
        rows = []
        for word in words:
            row = text(
                [template.replace("{}", word).replace("{c}", word) for template in templates]
            ).mean(dim=0)
            rows.append(row / row.norm())
        return torch.stack(rows)

    return image, text, classes


def expected(model: Any, folder: Path) -> tuple[list[float], list[float]]:
    """Compute the expected results in a plain loop, with whole similarity matrices.

    Returns:
        Top-1 and mean per-class recall of the sets `folder` and `benchmark`; the retrieval metrics of `captioned`.
    """
    image, text, classes = encoders(model)
    imagenet = [fill("{}") for fill in open_clip.OPENAI_IMAGENET_TEMPLATES]
    figures = []
    names = [(0, "alpha.png"), (0, "gray.png"), (0, "wide.JPEG"), (1, "a.webp"), (1, "b.bmp")]
    pictures = [
        Image.open(folder / "folder" / list(WNIDS)[k] / name).convert("RGB") for k, name in names
    ]
    best = (image(pictures) @ classes(list(WNIDS.values()), imagenet).T).argmax(dim=1)
    right = best == torch.tensor([k for k, _ in names])
    figures += [
        right.float().mean().item(),
        (right[:3].float().mean().item() + right[3:].float().mean().item()) / 2,
    ]
    pictures = [Image.open(io.BytesIO(encode(noise(40 + n, 50), "WEBP"))) for n in range(7)]
    best = (image(pictures) @ classes(["red", "green", "blue", "never seen"], TEMPLATES).T).argmax(
        dim=1
    )
    right = (best == torch.arange(7) % 3).float()
    figures += [right.mean().item(), sum(right[k::3].mean().item() for k in range(3)) / 3]
    pictures = [Image.open(io.BytesIO(encode(noise(40 + n, 50), "WEBP"))) for n in range(11)]
    texts = [line for lines in CAPTIONS for line in lines]
    scores = text(texts) @ image(pictures).T
    # An image with the same caption as another one is a right answer, too.
    right = torch.tensor([[line in lines for lines in CAPTIONS] for line in texts])
    t2i = [int((row > row[own].max()).sum()) + 1 for row, own in zip(scores, right, strict=True)]
    i2t = [int((scores[:, n] > scores[right[:, n], n].max()).sum()) + 1 for n in range(11)]
    recalls = []
    for ranks in (i2t, t2i):
        recalls += [float(np.mean(np.array(ranks) <= k)) for k in (1, 5, 10)] + [
            float(np.median(ranks))
        ]
    return figures, recalls


def everywhere(folder: Path, config: str) -> tuple[list[Any], tuple[list[float], list[float]]]:
    torch.manual_seed(5)
    model = build_model(ModelSettings(name=config))
    for parameter in model.parameters():  # so that features differ between images
        nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    model.train()
    sets = load_sets(settings(folder), DataSettings(source="synthetic"))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    spec = ImageSpec((IMAGE_SIZE, IMAGE_SIZE))
    results = evaluate_sets(Encoder(model, spec, tokenizer(model), chunk=2), sets)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert model.training
    with torch.no_grad():
        return results, expected(model.eval(), folder)


def tokenizer(model: Any) -> Any:
    return lambda texts: open_clip.tokenize(texts, context_length=model.context_length)


@pytest.fixture
def layouts(tmp_path: Path) -> Path:
    write_folder(tmp_path / "folder")
    write_benchmark(tmp_path / "benchmark", None)
    write_benchmark(tmp_path / "captioned", CAPTIONS)
    (tmp_path / "single" / "n01440764").mkdir(parents=True)
    noise(40, 40).save(tmp_path / "single" / "n01440764" / "one.png")
    return tmp_path


def with_and_without(path: Path, stage: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of two equal runs: "0" evaluates only at the end, "1" after every step.

    Also check that the checkpoint of the second run gives the same results as the run.
    """
    found = {}
    for every in (0, 1):
        overrides = [f"eval.every_steps={every}", f"name=every{every}-{stage}", "steps=2"]
        overrides += [
            f"eval.labeled.benchmark={folder / 'benchmark'}",
            f"deepspeed.zero_optimization.stage={stage}",
        ]
        overrides += [f"eval.retrieval.captioned={folder / 'captioned'}"]
        with ExitStack() as stack:
            run = build(load_config(path, overrides), None, stack)
            train(run)
            evaluate(run, 2)
            comm.barrier()
            found[str(every)] = [
                json.loads(line) for line in (run.folder / METRICS_FILE).read_text().splitlines()
            ]
            for what in ("", "/checkpoints/step-00000002")[:every]:
                config = evaluation_settings(
                    f"{run.folder}{what}", ["eval.retrieval={}"], None, None
                )
                model, tokenize = load_model(f"{run.folder}{what}")
                sets = load_sets(config.eval, config.data)
                mine, other = (
                    evaluate_sets(Encoder(m, run.encoder.spec, tokenize, chunk=4), sets)
                    for m in (model, run.engine)
                )
                assert [result.values for result in mine] == [result.values for result in other]
    return found


def test_config_yaml_next_to_exports_is_not_that_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("a: setting of another program")
    (tmp_path / "exports" / "first").mkdir(parents=True)
    labeled = ["eval.labeled.unseen=bundled:emoji/unseen"]
    assert evaluation_settings("exports/first", labeled, None, None).eval.labeled


def whole(folder: Path, path: Path, stage: int) -> tuple[Any, Any]:
    return everywhere(folder, yaml.safe_load(path.read_text())["model"]["name"]), with_and_without(
        path, stage, folder
    )


@pytest.mark.parametrize(
    ("size", "stage"), [(2, 1), *(pytest.param(n, 3, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_every_layout_at_any_number_of_ranks_and_training_goes_on_undisturbed(size, stage, layouts):
    model = {"name": write_tiny(layouts, BPE_SIZE, patch_dropout=0.5)}
    batch = {"global_batch": 4 * size, "data": DATA | {"slots": 2 * size}}
    for found, runs in run_ranks(
        whole, size, layouts, recipe(layouts, model=model, **batch), stage
    ):
        check_figures(*found)
        check_runs(runs)


def check_figures(results: list[Any], plain: tuple[list[float], list[float]]) -> None:
    """Compare the results with those of a plain loop.

    The set `single` has fewer images than ranks. `folder` has a class without images, and a broken image.
    """
    folder, benchmark, single, captioned = results
    accuracies, recalls = plain
    values = [
        found.values[metric] for found in (folder, benchmark) for metric in ("top1", "recall")
    ]
    assert values == pytest.approx(accuracies)
    assert folder.counts == {"num_classes": 3, "num_images": 5, "num_broken": 1}
    assert benchmark.counts == {"num_classes": 4, "num_images": 7, "num_broken": 0}
    assert (single.values["top1"], single.values["top5"]) == (1, 1)
    assert single.counts == {"num_classes": 1, "num_images": 1, "num_broken": 0}
    assert list(captioned.values.values()) == pytest.approx(recalls)
    num_texts = sum(map(len, CAPTIONS))
    assert captioned.counts == {"num_images": 11, "num_texts": num_texts, "num_broken": 0}


def check_runs(found: dict[str, list[dict[str, Any]]]) -> None:
    kept = ("step", "loss", "ids", "grad_norm", "lr", "scale")
    plain, evaluated = (
        [[r[key] for key in kept] for r in records if "loss" in r] for records in found.values()
    )
    assert plain == evaluated
    assert len(plain) == 2
    points = [record for record in found["1"] if "eval/benchmark_top1" in record]
    assert [record["step"] for record in points] == [1, 2]
    assert {"eval/benchmark_recall", "eval/captioned_i2t_r1", "eval/captioned_t2i_median"} <= set(
        points[0]
    )
    assert len([record for record in found["0"] if "eval/benchmark_top1" in record]) == 1


def test_flipped_bit_is_not_evaluated(tmp_path: Path) -> None:
    name = write_tiny(tmp_path, BPE_SIZE)
    newest = write_run(tmp_path / "run", build_model(ModelSettings(name=name)), name)
    load_model(newest)
    flip(newest / "engine" / "mp_rank_00_model_states.pt")
    for model in (newest, tmp_path / "run"):
        with pytest.raises(
            ValueError, match=r"engine/mp_rank_00_model_states.pt is not what was written"
        ):
            load_model(model)


def test_weights_with_a_logit_bias_are_evaluated(tmp_path: Path) -> None:
    name = write_tiny(tmp_path, BPE_SIZE)
    source: Any = build_model(ModelSettings(name=name), initial_bias=-10.0).eval()
    torch.save(source.state_dict(), tmp_path / "saved.pt")
    model, tokenize = load_model(name, tmp_path / "saved.pt")
    for inputs in (
        {"image": torch.rand(2, 3, IMAGE_SIZE, IMAGE_SIZE)},
        {"text": tokenize(["a", "b c"])},
    ):
        for got, true in zip(model(**inputs)[:3], source(**inputs)[:3], strict=True):
            assert got is true or torch.equal(got, true)


def test_weights_are_evaluated_with_the_activation_and_preprocessing_of_the_recipe(
    tmp_path: Path,
) -> None:
    name = write_tiny(tmp_path, BPE_SIZE)
    changes = {"quick_gelu": True, "image_size": 48, "interpolation": "bilinear"}
    source: Any = build_model(ModelSettings(name=name, **changes)).eval()
    torch.save(source.state_dict(), tmp_path / "saved.pt")
    # What only matters in training, such as locks and two views, must not change the evaluation.
    recipe = ModelSettings(name="another", two_views=True, **changes)
    model, tokenize = load_model(name, tmp_path / "saved.pt", recipe=recipe)
    assert read_preprocessing(model) == read_preprocessing(source)
    assert read_preprocessing(model).size == (48, 48)
    inputs = {"image": torch.rand(2, 3, 48, 48), "text": tokenize(["a", "b c"])}
    for got, true in zip(model(**inputs)[:3], source(**inputs)[:3], strict=True):
        assert torch.equal(got, true)


def run_eval(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disco_ds", "eval", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )


def test_command_prints_a_table_and_writes_json(layouts):
    name = write_tiny(layouts, BPE_SIZE)
    torch.save(build_model(ModelSettings(name=name)).state_dict(), layouts / "tiny.pt")
    sets = [f"eval.labeled.{name}={layouts / name}" for name in ("folder", "benchmark")]
    done = run_eval(
        name,
        "--weights",
        "tiny.pt",
        *sets,
        f"eval.retrieval.c={layouts / 'captioned'}",
        "--json",
        "out.json",
        cwd=layouts,
    )
    assert done.returncode == 0, done.stderr
    # Lines that begin with a bracket are from DeepSpeed.
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("[")]
    assert [line[0] for line in lines] == ["zero-shot", "folder", "benchmark", "retrieval", "c"]
    assert lines[1][-3:] == ["3", "5", "1"]
    folder, _, captioned = json.loads((layouts / "out.json").read_text())["sets"]
    assert f"{folder['top1']:.2%}" == lines[1][1]
    assert (captioned["num_texts"], captioned["i2t_r10"] >= captioned["i2t_r1"]) == (
        sum(map(len, CAPTIONS)),
        True,
    )
    assert "broken.jpg" in done.stderr


@pytest.mark.slow
def test_command_stops_with_1_when_no_image_can_be_read(layouts):
    name = write_tiny(layouts, BPE_SIZE)
    torch.save(build_model(ModelSettings(name=name)).state_dict(), layouts / "tiny.pt")
    (layouts / "single" / "n01440764" / "one.png").write_bytes(b"?")
    done = run_eval(
        name, "--weights", "tiny.pt", f"eval.labeled.single={layouts / 'single'}", cwd=layouts
    )
    assert done.returncode == 1, done.stderr
    assert "zero-shot" not in done.stdout
    assert "no image could be read" in done.stderr
    done = run_eval("nowhere", f"eval.labeled.single={layouts / 'single'}", cwd=layouts)
    assert done.returncode == 2
    assert "--weights FILE" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], "nothing to evaluate on"),
        ([".", "eval.labeled.x=y", "--json", "no/where.json"], "there is no folder no"),
        ([".", "eval.labelled.x=y"], "did you mean labeled"),
        ([".", "--config", "quickstar"], "unknown recipe"),
        ([".", "eval"], "not of the form"),
    ],
)
def test_mistake_on_the_command_line_is_told_before_any_work(arguments, words, capsys):
    assert main(["eval", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_table_has_a_header_for_each_group_of_metrics() -> None:
    recall = {"i2t_r1": 0.5, "i2t_median": 3.0}
    counts = {"num_images": 1000, "num_broken": 0}
    table = describe(
        [
            Result("retrieval", "x", recall, counts),
            Result("retrieval", "longer", recall, counts),
            Result("validation", "y", {"loss_at_40": 1.25}, counts),
            Result("validation", "z", {"loss_at_8": 1.0}, counts),
        ]
    )
    assert [line.split() for line in table.splitlines()] == [
        ["retrieval", "i2t_r1", "i2t_median", "images", "broken"],
        ["x", "50.00%", "3", "1,000", "0"],
        ["longer", "50.00%", "3", "1,000", "0"],
        ["validation", "loss_at_40", "images", "broken"],
        ["y", "1.2500", "1,000", "0"],
        ["validation", "loss_at_8", "images", "broken"],
        ["z", "1.0000", "1,000", "0"],
    ]
    assert len({len(line) for line in table.splitlines()[:3]}) == 1
