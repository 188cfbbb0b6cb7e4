"""report.png from complete, short, damaged and long records, and with examples from two ranks."""

import io
import json
import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.data import load_manifest, read_all, resolve_shards
from disco_ds.distributed import comm
from disco_ds.metrics.logger import METRICS_FILE, read_records
from disco_ds.metrics.report import EXAMPLES, REPORT, read_curves, save_examples, write_report
from disco_ds.runs.run_folder import FINISHED
from disco_ds.training.build import build
from disco_ds.training.loop import finish
from helpers.dist import run_ranks
from helpers.tiny_run import recipe

UNSEEN = "bundled:emoji/unseen"
LABEL = "{json[caption]}"


def line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "samples": 32 * step, "ids": "0f", **values}) + "\n"


def logged(step: int) -> str:
    values = {
        "i2t_accuracy": 0.1,
        "t2i_accuracy": 0.2,
        "scale": 14.0,
        "lr": 1e-3,
        "grad_norm": None,
    }
    return line(step, loss=10.0 / step, samples_per_s=300.0, **values)


def evaluated(step: int) -> str:
    return line(
        step,
        **{
            "eval/a_top1": step / 100,
            "eval/a_top5": 0.5,
            "eval/a_chance": 0.01,
            "eval/b_top1": 0.3,
            "eval/c_i2t_r1": 0.2,
            "eval/d_loss_at_512": 3.0,
        },
    )


def write(folder: Path, *lines: str) -> Path:
    (folder / METRICS_FILE).write_text("".join(lines), encoding="utf-8")
    return folder


def pixels(picture: Path | bytes) -> numpy.ndarray:
    return numpy.asarray(Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture))


def some_examples(*labels: str) -> list[tuple[Any, str, list[str]]]:
    images = numpy.random.default_rng(0).integers(
        0, 256, (len(labels), 16, 16, 3), dtype=numpy.uint8
    )
    return [
        (image, label, [label, "$x_{", "a\nb"]) for image, label in zip(images, labels, strict=True)
    ]


def test_curves_are_what_was_logged_without_bad_lines(tmp_path):
    bad = [
        "\n",
        "[1]\n",
        '{"step": null, "samples": 3}\n',
        '{"step": 4}\n',
        "\x00\x00\n",
        '{"step": 5, "sam',
    ]
    folder = write(tmp_path, logged(1), evaluated(1), *bad[:5], line(2, loss=math.nan), bad[5])
    records = read_records(folder / METRICS_FILE)
    assert (records[-1]["step"], records[-1]["samples"]) == (2, 64)
    curves = read_curves(records)
    assert curves["loss"] == [(32, 10.0)], "a loss that is not finite is left out"
    assert curves["eval/a_top1"] == [(32, 0.01)]
    assert "grad_norm" not in curves
    assert "ids" not in curves


def test_report_of_a_long_run_takes_seconds(tmp_path):
    lines = [f'{{"step": {n}, "samples": {2 * n}, "loss": {10 / n}}}\n' for n in range(1, 50_000)]
    write(tmp_path, *lines)
    start = time.process_time()
    write_report(tmp_path)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("lines", "panels"),
    [
        ([], 0),
        ([logged(1)], 5),
        ([line(1, loss=math.nan, scale=math.inf)] * 60, 0),
        ([evaluated(5), "{\n"], 3),
    ],
    ids=["empty", "one step", "not finite", "evaluation only"],
)
def test_curves_of_a_short_or_damaged_record(lines, panels, tmp_path):
    picture = pixels(write_report(write(tmp_path, *lines)))
    assert picture.shape[1] == 1540
    # The first curve of a panel is blue. There are three panels in a row.
    rows = numpy.split(picture[:, :, :3], picture.shape[0] // 385)
    drawn = [part for row in rows for part in numpy.array_split(row, 3, axis=1)]
    assert sum((part == (0, 0x72, 0xB2)).all(axis=-1).any() for part in drawn) == panels


def test_report_of_a_whole_record_with_odd_labels(tmp_path):
    write(tmp_path, *map(logged, range(1, 101)), evaluated(50), evaluated(100))
    save_examples(tmp_path, "a", some_examples("cat", "a $5 note", "日本", "word " * 20, ""))
    picture = pixels(write_report(tmp_path))
    assert picture.shape[1] == 1540
    colors = numpy.unique(picture[-187:].reshape(-1, 4), axis=0)
    assert len(colors) > 1000, "the example images, which have random pixels, must be drawn"
    names = sorted(path.name for path in tmp_path.glob("*.*"))
    assert names == sorted([EXAMPLES, METRICS_FILE, REPORT])


def test_command_draws_and_refuses_what_is_no_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["disco-ds", "report", str(write(tmp_path, logged(1)))])
    assert main() == 0
    assert capsys.readouterr().out == f"{tmp_path / REPORT}\n"
    monkeypatch.setattr(sys, "argv", ["disco-ds", "report", str(tmp_path / "nowhere")])
    assert main() == 2
    assert "nowhere is not a run folder: it has no metrics.jsonl" in capsys.readouterr().err


def end_a_run(path: Path) -> list[Any] | None:
    """Finish a run twice; the first time, report.png cannot be written. Collective.

    Returns:
        On rank 0, the nearest labels of each example, found by a plain loop.
    """
    with ExitStack() as stack:
        config = load_config(
            path, [f"eval={{labeled: {{unseen: '{UNSEEN}'}}, label_key: '{LABEL}'}}"]
        )
        run = build(config, None, stack)
        if comm.rank() == 0:
            (run.folder / REPORT).mkdir()
        finish(run)
        if comm.rank() == 0:
            assert (run.folder / FINISHED).exists()
            (run.folder / REPORT).rmdir()
        finish(run)
        run.engine.eval()
        data, manifest = config.data, load_manifest(resolve_shards(UNSEEN))
        samples = list(read_all(manifest, data, run.encoder.spec, 0, 1, LABEL))
        labels = sorted({label for _, label, _ in samples})
        with torch.no_grad():
            image, text, *_ = run.engine(
                torch.stack([image for image, _, _ in samples]), run.encoder.tokenize(labels)
            )
        best = (image @ text.T).topk(3, dim=1).indices.tolist()
        return [
            (image.permute(1, 2, 0).numpy(), label, [labels[n] for n in near])
            for (image, label, _), near in zip(samples, best, strict=True)
        ]


def test_finished_run_has_its_pictures_and_keeps_what_it_did_without(tmp_path):
    plain, _ = run_ranks(end_a_run, 2, recipe(tmp_path))
    folder = tmp_path / "runs" / "tiny"
    with numpy.load(folder / EXAMPLES) as kept:
        examples = dict(kept)
    assert examples["name"] == "unseen"
    # Every 7th of 155 images, on any rank.
    assert len(examples["label"]) == 23
    for number, (image, label, best) in enumerate(plain[::7]):
        assert numpy.array_equal(examples["image"][number], image)
        assert (examples["label"][number], examples["best"][number].tolist()) == (label, best)
    assert (folder / REPORT).is_file()
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert events.Scalars("eval/unseen_chance")[0].value == pytest.approx(1 / 155)
