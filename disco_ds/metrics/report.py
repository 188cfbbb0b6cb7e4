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
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray
from PIL import Image

from disco_ds.metrics.logger import METRICS_FILE
from disco_ds.metrics.step_metrics import METRICS
from disco_ds.runs.run_folder import CHANGES, FINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

REPORT = "report.png"
EXAMPLES = "examples.npz"
MAX_POINTS = 2000
"""Maximum number of points per curve; consecutive lines of a longer file are averaged."""
_COLUMNS = 4
"""Number of example images in a row."""
_MAX_LETTERS = 32
"""Longer labels are cut."""
# A color-blind-safe palette. Right and wrong predictions also differ by a mark and a line style.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#AA4499"
GRAY = "#595959"
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

logger = logging.getLogger(__name__)


@dataclass
class History:
    """The content of a metrics.jsonl."""

    curves: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Name -> (samples, value); NaN replaces values that are not finite."""
    step: int = 0
    samples: int = 0
    bad_lines: int = 0
    """Number of lines that could not be read."""

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.samples // self.step if self.step else 0


def read_history(path: Path) -> History:
    """Read all curves of a metrics.jsonl in bounded memory.

    Raises:
        ValueError: If the file does not exist.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a run folder: it has no {path.name}")
    history = History()
    with path.open(encoding="utf-8", errors="replace") as file:
        lines_per_point = math.ceil(sum(1 for _ in file) / MAX_POINTS)
        file.seek(0)
        while lines := list(islice(file, lines_per_point)):
            points: dict[str, list[float]] = defaultdict(list)
            for line in lines:
                _read_line(line, history, points)
            for name, values in points.items():
                history.curves[name].append((history.samples, sum(values) / len(values)))
    return history


def _read_line(line: str, history: History, points: dict[str, list[float]]) -> None:
    """Add the values of a line to `points`, and its step to the history."""
    try:
        record = json.loads(line)
        step, samples = int(record.pop("step")), int(record.pop("samples"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        history.bad_lines += 1
        return
    history.step, history.samples = step, samples
    for name, value in record.items():
        if isinstance(value, int | float):
            points[name].append(value if math.isfinite(value) else math.nan)


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Log any error of the block instead of raising it: a missing picture must not stop a run."""
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
    """Draw report.png of a run folder; with a writer, also add its parts as TensorBoard images.

    Returns:
        The path of the picture.

    Raises:
        ValueError: If the folder has no metrics.jsonl.
    """
    path = folder / METRICS_FILE
    history = read_history(path)
    if history.bad_lines:
        logger.warning("%s: unreadable lines skipped: %d", path, history.bad_lines)
    examples: dict[str, Any] = {}
    if (folder / EXAMPLES).exists():
        with numpy.load(folder / EXAMPLES) as saved:
            examples = dict(saved)
    state = "finished" if (folder / FINISHED).exists() else "not finished"
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    title = (
        f"{folder.resolve().name}: {history.step:,} steps of {history.global_batch:,} samples"
        f"{describe_changes(folder)}, {state}, last record {written}"
    )
    pictures = draw_report(history, title, examples)
    partial = folder / f"{REPORT}.partial"
    Image.fromarray(numpy.concatenate(list(pictures.values()))).save(partial, format="png")
    partial.replace(folder / REPORT)
    if writer is not None:
        for name, picture in pictures.items():
            writer.add_image(f"report/{name}", picture, history.samples, dataformats="HWC")
        writer.flush()
    return folder / REPORT


def describe_changes(folder: Path) -> str:
    """Describe all settings that were changed when the run was resumed; empty if there are none."""
    if not (folder / CHANGES).exists():
        return ""
    lines = map(json.loads, (folder / CHANGES).read_text(encoding="utf-8").splitlines())
    return "".join(
        "; from step {step:,} on {setting} is {new}, was {old}".format_map(line) for line in lines
    )


def draw_report(
    history: History, title: str, examples: dict[str, Any]
) -> dict[str, NDArray[numpy.uint8]]:
    """Draw the parts of the report.

    Returns:
        Pictures [H, W, 3] of the same width by name, from top to bottom.
    """
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def draw(figure: Figure) -> NDArray[numpy.uint8]:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return numpy.asarray(canvas.buffer_rgba())[..., :3]

    pictures = {}
    with style.context(["default", STYLE]), warnings.catch_warnings():
        # The font may lack the script of a label.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure((14, 7), dpi=110, layout="constrained")
        draw_curves(figure, history, title)
        pictures["curves"] = draw(figure)
        if examples:
            rows = math.ceil(len(examples["label"]) / _COLUMNS)
            figure = Figure((14, 0.4 + 1.05 * rows), dpi=110, layout="constrained")
            draw_examples(figure, examples, rows)
            pictures["examples"] = draw(figure)
    return pictures


def draw_curves(figure: Figure, history: History, title: str) -> None:
    """Draw loss and accuracy, and below them one panel for each metric with a curve label."""
    from matplotlib.ticker import PercentFormatter

    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1))
    lower = figure.add_subfigure(grid[1])
    loss, accuracy = figure.add_subfigure(grid[0]).subplots(1, 2)
    draw_curve(loss, history, "loss", BLUE, "training loss")
    B = history.global_batch
    if B > 1:
        chance = math.log(B)
        label = f"guessing among {B:,} by softmax: ln {B} = {chance:.2f}"
        loss.axhline(chance, color=GRAY, linestyle="--", linewidth=1, label=label)
    finish_axes(loss, "loss", "Loss")
    draw_accuracy(accuracy, history)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1))
    panels = [metric for metric in METRICS if metric.curve]
    for axes, metric in zip(lower.subplots(1, len(panels)), panels, strict=True):
        draw_curve(axes, history, metric.name, BLUE)
        finish_axes(axes, metric.curve)


def draw_accuracy(axes: Axes, history: History) -> None:
    """Draw the accuracy in the batch, and the zero-shot accuracy of every set next to chance."""
    draw_curve(axes, history, "i2t_accuracy", BLUE, "in the batch, image to text")
    draw_curve(axes, history, "t2i_accuracy", GREEN, "in the batch, text to image")
    sets = [name.removesuffix("_top1") for name in history.curves if name.endswith("_top1")]
    looks = cycle(((ORANGE, "o"), (PURPLE, "s"), (GRAY, "D")))
    for name, (color, marker) in zip(sets, looks, strict=False):
        samples, values = zip(*history.curves[f"{name}_top1"], strict=True)
        label = f"{name.removeprefix('eval/')}, zero-shot top-1: {values[-1]:.1%}"
        if f"{name}_chance" in history.curves:
            chance = history.curves[f"{name}_chance"][-1][1]
            axes.axhline(chance, color=color, linestyle="--", linewidth=1)
            label += f" (chance, dashed: {chance:.2%})"
        axes.plot(samples, values, color=color, marker=marker, label=label)
    finish_axes(axes, "accuracy", "Learning")
    axes.set_ylim(bottom=0)


def draw_curve(
    axes: Axes, history: History, name: str, color: str, label: str | None = None
) -> None:
    """Draw a curve as a thin line with its running mean as a thick line."""
    points = numpy.array(history.curves.get(name, []), dtype=numpy.float64)
    samples, values = points.reshape(-1, 2).T
    known = numpy.isfinite(values)
    if not known.any():
        return
    width = len(values) // 25
    if width < 2:
        axes.plot(samples, values, color=color, marker=".", label=label)
        return
    axes.plot(samples, values, color=color, linewidth=0.6, alpha=0.35)
    sums = numpy.convolve(numpy.where(known, values, 0), numpy.ones(width), "same")
    counts = numpy.convolve(known, numpy.ones(width), "same")
    with numpy.errstate(invalid="ignore"):
        means = sums / counts
    label = label and f"{label}, running mean"
    axes.plot(samples, means, color=color, linewidth=1.8, label=label)


def finish_axes(axes: Axes, label: str, title: str = "") -> None:
    """Set labels, title and legend."""
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel="samples seen", ylabel=label, title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", color=GRAY)
    elif title:
        # A fixed place: matplotlib needs ten seconds to find the "best" one on a long curve.
        axes.legend(loc="lower left" if label == "loss" else "upper left")


def draw_examples(figure: Figure, examples: dict[str, Any], rows: int) -> None:
    """Draw each image with its label in bold and, below it, the nearest labels, right or wrong."""
    from matplotlib.patches import Rectangle

    labels, best = examples["label"].tolist(), examples["best"].tolist()
    num_shown = len(best[0])
    num_first = sum(label == top[0] for label, top in zip(labels, best, strict=True))
    num_found = sum(label in top for label, top in zip(labels, best, strict=True))
    title = (
        f"{len(labels)} images of {examples['name']} with the labels nearest to each: the first is "
        f"right for {num_first} (solid frame), one of the first {num_shown} for {num_found}"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    # Texts are excluded from the layout, so that all columns have the same width.
    text: dict[str, Any] = {"va": "center", "in_layout": False}
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flatten().tolist()
    for axes in grid:
        axes.axis("off")
    for axes, image, label, top in zip(grid, examples["image"], labels, best, strict=False):
        color, line = (BLUE, "-") if label == top[0] else (ORANGE, "--")
        axes.imshow(image, extent=(0, 1, 0, 1), interpolation="nearest")
        frame = Rectangle((0, 0), 1, 1, fill=False, clip_on=False, ec=color, ls=line, lw=2)
        axes.add_patch(frame)
        axes.set(xlim=(0, 3.7), ylim=(0, 1))
        axes.text(1.1, 0.9, _shorten(label), weight="bold", **text)
        for place, guess in enumerate(top):
            mark, color = ("✓", BLUE) if guess == label else ("✗", ORANGE)
            axes.text(1.1, 0.64 - 0.25 * place, f"{mark} {_shorten(guess)}", color=color, **text)


def _shorten(label: str) -> str:
    label = " ".join(label.split())
    return label if len(label) <= _MAX_LETTERS else f"{label[: _MAX_LETTERS - 1]}…"
