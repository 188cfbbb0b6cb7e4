"""Draw report.png: curves of loss, accuracy and throughput, and evaluated images with predictions.

Rank 0 draws it from metrics.jsonl and examples.npz only, so a run that was killed or is still
running has a report too. matplotlib is imported only when a picture is drawn, so it does not slow
down the start of training.
"""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from disco_ds.metrics.logger import METRICS_FILE, read_records
from disco_ds.metrics.step_metrics import METRICS
from disco_ds.runs.run_folder import CHANGES, FINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from torch.utils.tensorboard import SummaryWriter

REPORT = "report.png"
EXAMPLES = "examples.npz"
NUM_MEANS = 40
"""A curve with at least twice as many points also shows this many means."""
_COLUMNS = 6
"""Number of example images in a row."""
_MAX_LETTERS = 28
"""Maximum number of letters of a label; longer labels are cut."""
# Colors of right and wrong predictions, which a check mark and a line style distinguish too.
RIGHT, WRONG = "C0", "C2"
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.edgecolor": "none",
    "axes.formatter.limits": (-3, 5),
    "figure.constrained_layout.w_pad": 0.1,
    "text.parse_math": False,  # labels may contain dollar signs
}
Curves = dict[str, list[tuple[float, float]]]
"""Name -> (samples, value)."""

logger = logging.getLogger(__name__)


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Log any error in the block instead of raising it: a missing picture must not stop a run."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s: %s", what, type(error).__name__, error)


def save_examples(
    folder: Path, name: str, examples: Sequence[tuple[NDArray[numpy.uint8], str, list[str]]]
) -> None:
    """Save evaluated images for the report.

    Args:
        folder: The run folder.
        name: Name of the evaluation set.
        examples: (image [H, W, 3], label, predicted labels from best to worst).
    """
    images, labels, best = zip(*examples, strict=True)
    partial = folder / f"partial-{EXAMPLES}"
    numpy.savez_compressed(partial, name=name, image=images, label=labels, best=best)
    partial.replace(folder / EXAMPLES)


def write_report(folder: Path, writer: SummaryWriter | None = None) -> Path:
    """Draw report.png of a run folder; with a writer, also add it as a TensorBoard image.

    Returns:
        The path of the picture.

    Raises:
        ValueError: If the folder has no metrics.jsonl.
    """
    from matplotlib import style

    path = folder / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {METRICS_FILE}")
    records, num_bad = read_records(path)
    if num_bad:
        logger.warning("%s: unreadable lines skipped: %d", path, num_bad)
    examples: dict[str, Any] = {}
    if (folder / EXAMPLES).exists():
        with numpy.load(folder / EXAMPLES) as saved:
            examples = dict(saved)
    last = records[-1] if records else {"step": 0, "samples": 0}
    state = "finished" if (folder / FINISHED).exists() else "not finished"
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    global_batch = last["samples"] // max(last["step"], 1)
    title = (
        f"{folder.resolve().name}: {last['step']:,} steps of {global_batch:,} samples"
        f"{describe_changes(folder)}, {state}, last record {written}"
    )
    partial = folder / f"partial-{REPORT}"
    with style.context(["default", "seaborn-v0_8-colorblind", STYLE]), warnings.catch_warnings():
        # The font may lack the script of a label.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = draw_report(read_curves(records), global_batch, title, examples)
        figure.savefig(partial)
        if writer is not None:
            writer.add_figure("report", figure, last["samples"])
            writer.flush()
    partial.replace(folder / REPORT)
    return folder / REPORT


def describe_changes(folder: Path) -> str:
    """Describe all settings that were changed when the run was resumed; empty if there are none."""
    if not (folder / CHANGES).exists():
        return ""
    lines = map(json.loads, (folder / CHANGES).read_text(encoding="utf-8").splitlines())
    return "".join(
        "; from step {step:,} on {setting} is {new}, was {old}".format_map(line) for line in lines
    )


def read_curves(records: Sequence[dict[str, Any]]) -> Curves:
    """Return the numeric values in the records as curves over the number of samples seen."""
    curves: Curves = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float):
                curves[name].append((record["samples"], value))
    return curves


def draw_report(curves: Curves, global_batch: int, title: str, examples: dict[str, Any]) -> Figure:
    """Draw loss, accuracy, a panel for each metric with a curve label, and the examples."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = math.ceil(len(examples["label"]) / _COLUMNS) if examples else 0
    heights = (4.6, 2.4, 0.3 + 1.6 * rows)
    num_parts = 3 if examples else 2
    figure = Figure((14, sum(heights[:num_parts])), dpi=110, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    parts: Any = figure.subfigures(num_parts, height_ratios=heights[:num_parts])
    upper, lower = parts[:2]
    loss, accuracy = upper.subplots(1, 2)
    draw_curve(loss, curves, "loss", "training loss")
    if global_batch > 1:
        chance = math.log(global_batch)
        label = f"guessing among {global_batch:,} by softmax: {chance:.2f}"
        loss.axhline(chance, color="gray", linestyle="--", linewidth=1, label=label)
    finish_axes(loss, "loss", "Loss")
    draw_accuracy(accuracy, curves)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1))
    panels = [metric for metric in METRICS if metric.curve]
    for axes, metric in zip(lower.subplots(1, len(panels)), panels, strict=True):
        draw_curve(axes, curves, metric.name)
        finish_axes(axes, metric.curve)
    if examples:
        draw_examples(parts[2], examples, rows)
    return figure


def draw_accuracy(axes: Axes, curves: Curves) -> None:
    """Draw the accuracy in the batch, and the zero-shot accuracy of every set next to chance."""
    draw_curve(axes, curves, "i2t_accuracy", "in the batch, image to text")
    draw_curve(axes, curves, "t2i_accuracy", "in the batch, text to image")
    sets = [name.removesuffix("_top1") for name in curves if name.endswith("_top1")]
    for name in sets:
        samples, values = zip(*curves[f"{name}_top1"], strict=True)
        label = f"{name.removeprefix('eval/')}, zero-shot top-1: {values[-1]:.1%}"
        (line,) = axes.plot(samples, values, marker="o")
        if f"{name}_chance" in curves:
            chance = curves[f"{name}_chance"][-1][1]
            axes.axhline(chance, color=line.get_color(), linestyle="--", linewidth=1)
            label += f" (chance, dashed: {chance:.2%})"
        line.set_label(label)
    finish_axes(axes, "accuracy", "Learning")
    axes.set_ylim(bottom=0)


def draw_curve(axes: Axes, curves: Curves, name: str, label: str | None = None) -> None:
    """Draw a curve; a long curve is a thin line, with a thick line of the means of its parts."""
    points = numpy.array(curves.get(name, []), dtype=numpy.float64).reshape(-1, 2)
    points = points[numpy.isfinite(points).all(axis=-1)]
    if not len(points):
        return
    if len(points) < 2 * NUM_MEANS:
        axes.plot(*points.T, marker=".", label=label)
        return
    (line,) = axes.plot(*points.T, linewidth=0.6, alpha=0.35)
    means = [part.mean(axis=0) for part in numpy.array_split(points, NUM_MEANS)]
    axes.plot(*zip(*means, strict=True), color=line.get_color(), linewidth=1.8, label=label)


def finish_axes(axes: Axes, label: str, title: str = "") -> None:
    """Set the axis labels, title and legend."""
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel="samples seen", ylabel=label, title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center")
    elif title:
        # A fixed place: matplotlib needs ten seconds to find the "best" one on a long curve.
        axes.legend(loc="lower left" if label == "loss" else "upper left")


def draw_examples(figure: SubFigure, examples: dict[str, Any], rows: int) -> None:
    """Draw each image below its label and above the nearest labels, marked as right or wrong."""
    labels, best = examples["label"].tolist(), examples["best"].tolist()
    num_right = sum(label == top[0] for label, top in zip(labels, best, strict=True))
    title = (
        f"{len(labels)} images of {examples['name']} with the labels nearest to each: the first is "
        f"right for {num_right} (solid frame)"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for axes in grid[len(labels) :]:
        axes.axis("off")
    for axes, image, label, top in zip(grid, examples["image"], labels, best, strict=False):
        color, line = (RIGHT, "-") if label == top[0] else (WRONG, "--")
        axes.imshow(image, interpolation="nearest")
        axes.spines[:].set(visible=True, color=color, linestyle=line, linewidth=2)
        guesses = [f"{'✓' if guess == label else '✗'} {_shorten(guess)}" for guess in top]
        axes.set(xticks=[], yticks=[], xlabel="\n".join(guesses))
        axes.set_title(_shorten(label), loc="center", size=9)


def _shorten(label: str) -> str:
    return " ".join(label.split())[:_MAX_LETTERS]
