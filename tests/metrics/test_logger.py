"""The log records of a run: the digest of a batch, metrics.jsonl after a resume, and points for trackers by samples."""

import errno
import json
import math
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings
from disco_ds.metrics import step_metrics
from disco_ds.metrics.logger import METRICS_FILE, MetricsLogger, rewind_tensorboard
from disco_ds.metrics.step_metrics import digest
from helpers.dist import run_ranks
from helpers.paths import ROOT
from helpers.schedule import plain

VALUES = {
    "loss": 2.5,
    "i2t_accuracy": 0.25,
    "t2i_accuracy": 0.5,
    "scale": 14.0,
    "lr": 1e-3,
    "grad_norm": 0.125,
}
MASK = 2**64 - 1


def point(
    step: int, index: torch.Tensor, **changes: Any
) -> tuple[int, dict[str, Any], torch.Tensor]:
    """Return the arguments of MetricsLogger.log for a step whose metrics are VALUES, except for `changes`."""
    metrics: dict[str, Any] = {name: torch.tensor(value) for name, value in VALUES.items()}
    metrics |= {"lr": VALUES["lr"], "bias": None, "text_tokens": None}
    metrics |= dict.fromkeys(("broken_samples", "dropped_samples", "skipped_batches"), 0)
    return step, metrics | changes, index


def test_dropped_share_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsLogger(tmp_path, {}, plain(4, 100))
    metrics.log(*point(1, torch.arange(4), dropped_samples=12))
    metrics.close()
    assert "75% dropped" in capsys.readouterr().out


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def write(folder: Path, lines: list[str]) -> None:
    (folder / METRICS_FILE).write_text("".join(lines))


def test_a_bias_is_recorded_where_the_model_has_one(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, {}, plain(4, 2))
    metrics.log(*point(1, torch.arange(4)))
    metrics.log(*point(2, torch.arange(4), bias=torch.tensor([-9.5])))
    metrics.close()
    assert [record["bias"] for record in read(tmp_path)] == [None, -9.5]


def test_digest_same_ids_in_any_order_and_split_is_the_same() -> None:
    ids = torch.randint(0, 2**40, (1000,), generator=torch.Generator().manual_seed(0))
    whole = digest(ids)
    assert whole.ndim == 0
    assert whole.dtype == torch.int64
    assert digest(ids.flip(0)) == whole
    assert torch.stack([digest(part) for part in ids.split(37)]).sum() == whole
    assert digest(ids.to(torch.int32).long()) != whole, "the upper 32 bits of an id must count too"


def test_digest_different_multisets_differ() -> None:
    sets = [
        [],
        [0],
        [1],
        [0, 0],
        [0, 1],
        [1, 1],
        [0, 3],
        [1, 2],
        [0, 1, 2, 3],
        [0, 0, 3, 3],
        [1, 1, 2, 2],
    ]
    values = [digest(torch.tensor(ids, dtype=torch.int64)).item() for ids in sets]
    assert len(set(values)) == len(sets)
    # All triples of small ids must have different digests. Sums of ids would not.
    triples = torch.combinations(torch.arange(30), 3)
    assert len({digest(triple).item() for triple in triples}) == len(triples)


def test_digest_with_repeated_ids_differs() -> None:
    assert digest(torch.tensor([26, 26, 55])) != digest(torch.tensor([27, 27, 53]))
    assert digest(torch.tensor([25, 25, 57])) != digest(torch.tensor([28, 28, 51]))


def test_log_writes_a_record_on_the_samples_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[tuple[str, float, int]] = []
    metrics = MetricsLogger(tmp_path, {"TensorBoard": events.extend}, plain(32, 40))
    metrics.log(*point(10, torch.arange(32), broken_samples=3))
    metrics.log(*point(20, torch.arange(32, 64), grad_norm=None))
    metrics.write_values(20, {"eval/validation_top1": 0.75})
    metrics.close()
    metrics.close()
    first, second, third = read(tmp_path)
    assert VALUES.items() <= first.items()
    assert (first["step"], first["samples"], first["broken_samples"]) == (10, 320, 3)
    assert first["ids"] == f"{digest(torch.arange(32)).item() & MASK:016x}" != second["ids"]
    assert first["peak_memory_bytes"] > 10 * 2**20
    assert (second["grad_norm"], second["samples"]) == (None, 640)
    assert third == {"step": 20, "samples": 640, "eval/validation_top1": 0.75}

    points = {(name, samples): value for name, value, samples in events}
    assert len(points) == len(events)
    assert points["train/loss", 320] == 2.5
    assert points["train/lr", 640] == 1e-3
    assert points["eval/validation_top1", 640] == 0.75
    assert ("train/grad_norm", 320) in points
    assert ("train/grad_norm", 640) not in points
    assert not {"train/ids", "train/step", "train/samples"} & {name for name, _ in points}

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert (
        " left)  loss 2.5000  i2t 25.0%  t2i 50.0%  scale 14.00  lr 1.00e-03  norm 0.125"
        in lines[0]
    )
    assert lines[0].endswith("3 broken samples skipped")
    assert "norm skipped" in lines[1]
    assert "broken" not in lines[1]


def test_log_rates_count_from_the_last_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    metrics = MetricsLogger(
        tmp_path, {}, plain(32, 40, 4), peak_samples_per_s=lambda num_tokens: 256.0
    )
    for step, seconds, wait in ((8, 2.0, 1.0), (10, 4.0, 1.0)):
        clock[0] += seconds
        metrics.add_wait(wait / 2)
        metrics.add_wait(wait / 2)
        metrics.log(*point(step, torch.arange(32)))
    metrics.close()
    first, second = read(tmp_path)
    assert first["samples_per_s"] == pytest.approx(4 * 32 / 2)
    assert first["data_wait"] == pytest.approx(0.5)
    assert second["samples_per_s"] == pytest.approx(2 * 32 / 4)
    assert second["data_wait"] == pytest.approx(0.25)
    assert first["mfu"] == pytest.approx(64 / 256)


def test_metrics_of_a_resumed_run_drop_what_will_be_done_again(tmp_path: Path) -> None:
    kept = [
        f'{{"step": {step}, "samples": {8 * step}, "loss": {step}.5, "time/loss_s": 1.0}}\n'
        for step in (10, 20)
    ]
    repeated = [f'{{"step": {step}, "samples": {8 * step}}}\n' for step in (21, 30)]
    write(tmp_path, [*kept, *repeated, '{"step": 4'])
    metrics = MetricsLogger(tmp_path, {}, plain(8, 40, 20))
    metrics.log(*point(25, torch.arange(8)))
    metrics.close()
    text = (tmp_path / METRICS_FILE).read_text()
    assert text.startswith("".join(kept))
    assert [record["step"] for record in read(tmp_path)] == [10, 20, 25]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


@pytest.mark.parametrize("cut", ['{"step": 2', '{"step": 20, "loss": 1.0}', "{", '{"step": 3}'])
def test_metrics_last_line_without_its_end_is_dropped(cut: str, tmp_path: Path) -> None:
    write(tmp_path, ['{"step": 10, "samples": 80}\n', cut])
    MetricsLogger(tmp_path, {}, plain(8, 40, 20)).close()
    assert read(tmp_path) == [{"step": 10, "samples": 80}]


def test_metrics_whole_file_is_left_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, ['{"step": 10, "samples": 80}\n', '{"step": 20, "samples": 160}\n'])
    path = tmp_path / METRICS_FILE
    before = path.stat()
    MetricsLogger(tmp_path, {}, plain(8, 40, 20)).close()
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_points_of_a_resumed_run_replace_those_it_does_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for first_step, steps in ((0, (5, 10, 15)), (10, (15, 20))):
        board = SimpleNamespace(summary_writer=SummaryWriter(tmp_path / "points"))
        if first_step:
            rewind_tensorboard(SimpleNamespace(tb_monitor=board), first_step * 8)

        def write(events: list[tuple[str, float, int]], board: Any = board) -> None:
            for event in events:
                board.summary_writer.add_scalar(*event)

        metrics = MetricsLogger(tmp_path, {"TensorBoard": write}, plain(8, 40, first_step))
        for step in steps:
            metrics.log(*point(step, torch.arange(8)))
            metrics.write_values(step, {"eval/top1": step / 100})
        metrics.close()
        board.summary_writer.close()
    points = EventAccumulator(str(tmp_path / "points")).Reload()
    assert [point.step for point in points.Scalars("train/loss")] == [40, 80, 120, 160]
    assert [point.step for point in points.Scalars("eval/top1")] == [40, 80, 120, 160]
    assert [record["step"] for record in read(tmp_path)] == [5, 5, 10, 10, 15, 15, 20, 20]


def test_records_wait_for_room_on_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the file size simulates a full disk, which may write a part of a record."""
    metrics = MetricsLogger(tmp_path, {}, plain(8, 40))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        metrics.log(*point(10, torch.arange(8)))
        metrics.write_values(10, {"eval/top1": 0.5})
        assert (tmp_path / METRICS_FILE).stat().st_size == 10
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large; the records wait in memory" in caplog.text
    metrics.log(*point(20, torch.arange(8)))
    metrics.close()
    assert [record["step"] for record in read(tmp_path)] == [10, 10, 20]


def test_a_monitor_that_cannot_write_costs_the_others_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[tuple[str, float, int]] = []

    def fail(events: list[tuple[str, float, int]]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics = MetricsLogger(
        tmp_path, {"TensorBoard": fail, "csv_monitor": kept.extend}, plain(8, 40)
    )
    for step in (1, 2):
        metrics.write_values(step, {"eval/top1": 0.5})
    metrics.close()
    assert kept == [("eval/top1", 0.5, 8), ("eval/top1", 0.5, 16)]
    assert (
        caplog.text.count(
            "TensorBoard gets no more points until the run is resumed: [Errno 28] No space left"
        )
        == 1
    )


def log_on_ranks(folder: str) -> dict[str, Any] | None:
    rank = comm.rank()
    metrics = MetricsLogger(
        Path(folder), {}, plain(8, 1), peak_samples_per_s=lambda tokens: 1 / (tokens or 1)
    )
    metrics.since -= 100.0
    metrics.add_wait(50.0 * rank)
    part = torch.arange(8)[rank::2]
    metrics.log(*point(1, part, broken_samples=rank + 1, text_tokens=10.0 + 20 * rank))
    metrics.close()
    return read(Path(folder))[0] if rank == 0 else None


def test_log_of_two_ranks_is_of_the_whole_batch(tmp_path: Path) -> None:
    record, _ = run_ranks(log_on_ranks, 2, str(tmp_path))
    assert len(read(tmp_path)) == 1
    assert record["ids"] == f"{digest(torch.arange(8)).item() & MASK:016x}"
    assert record["broken_samples"] == 3
    assert record["text_tokens"] == 20.0, "the mean of 10 and 30"
    assert math.isclose(record["mfu"], 8 / 100 * 20, rel_tol=0.1), "the mean over ranks"
    assert math.isclose(record["data_wait"], 0.5, rel_tol=0.1), (
        "data_wait must be that of the slowest rank"
    )


def test_a_figure_is_one_entry_as_the_manual_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    entry, loss = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.findall(r"`(Metric\(.*?\.format\))`", text)
    added = [eval(each, {"Metric": step_metrics.Metric}) for each in shown]
    assert len(added) == 2
    temperature = eval(f"{{{entry}}}", {"output": SimpleNamespace(scale=torch.tensor([14.0]))})
    for module in ("step_metrics", "logger"):
        monkeypatch.setattr(f"disco_ds.metrics.{module}.METRICS", (*step_metrics.METRICS, *added))
    namespace: dict[str, Any] = {}
    exec(loss, namespace)
    image, other = torch.eye(8)[:4], torch.eye(8)[4:]
    embeddings = Embeddings(image, torch.cat([image[:2], other[2:]]), torch.tensor([14.0]))
    out = namespace["ClipLossWithCosine"]()(embeddings)

    events: list[tuple[str, float, int]] = []
    metrics = MetricsLogger(tmp_path, {"TensorBoard": events.extend}, plain(4, 10))
    metrics.log(*point(1, torch.arange(4), **out.metrics, **temperature))
    metrics.close()
    (record,) = read(tmp_path)
    assert record["pair_cosine"] == pytest.approx(0.5)
    assert record["temperature"] == pytest.approx(1 / 14)
    assert ("train/temperature", pytest.approx(1 / 14), 4) in events
    assert "temperature 0.0714" in (line := capsys.readouterr().out)
    assert "cosine 0.500" in line
