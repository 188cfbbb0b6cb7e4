"""report.png of a run folder: loss, accuracy and pace against samples, and evaluated images with their best labels.

Drawn by rank 0 from metrics.jsonl and examples.npz alone, so that a run that was killed, or still runs, has one too.
matplotlib is imported where a picture is drawn: training starts without it.
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

from disco_ds.metrics.figures import FIGURES
from disco_ds.metrics.records import METRICS_FILE
from disco_ds.metrics.run_folder import CHANGES, FINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

REPORT = "report.png"
EXAMPLES = "examples.npz"
MAX_POINTS = 2000
"""Points of a curve: in a longer file, the lines are averaged in this many stretches."""

_COLUMNS, _LETTERS = 4, 32
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#595959"
"""A palette for the colour-blind too; right and wrong also differ by a mark and a line style."""
STYLE: dict[str, Any] = {
    **{"font.size": 9, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 10},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3},
    **{"legend.edgecolor": "none", "axes.formatter.limits": (-3, 5), "figure.constrained_layout.w_pad": 0.1},
    "text.parse_math": False,  # a label may hold dollar signs
}

logger = logging.getLogger(__name__)


@dataclass
class History:
    """The content of a metrics.jsonl."""

    curves: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Name -> (samples, value), NaN where a value is not finite."""
    step: int = 0
    samples: int = 0
    bad_lines: int = 0
    bad_values: int = 0

    @property
    def global_batch(self) -> int:
        return self.samples // self.step if self.step else 0

    @property
    def remarks(self) -> str:
        """A note on what is left out of the curves; empty when nothing is."""
        lines = [f"lines of {METRICS_FILE} that cannot be read: {self.bad_lines:,}"] if self.bad_lines else []
        return "; ".join(lines + ([f"values that are not finite: {self.bad_values:,}"] if self.bad_values else []))


def read_history(path: Path) -> History:
    """Every curve of a metrics.jsonl, in bounded memory. Raises: ValueError when there is no such file."""
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a run folder: it has no {path.name}")
    history = History()
    with path.open(encoding="utf-8", errors="replace") as file:
        stretch = math.ceil(sum(1 for _ in file) / MAX_POINTS)
        file.seek(0)
        while lines := list(islice(file, stretch)):
            points: dict[str, list[float]] = defaultdict(list)
            for line in lines:
                _read_line(line, history, points)
            for name, values in points.items():
                history.curves[name].append((history.samples, sum(values) / len(values)))
    return history


def _read_line(line: str, history: History, points: dict[str, list[float]]) -> None:
    try:
        record = json.loads(line)
        step, samples = int(record.pop("step")), int(record.pop("samples"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        history.bad_lines += 1
        return
    history.step, history.samples = step, samples
    for name, value in record.items():
        if isinstance(value, int | float):
            fine = math.isfinite(value)
            history.bad_values += not fine
            points[name].append(value if fine else math.nan)


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Log any error of the block, which draws a picture: that is no reason to lose a run."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s: %s", what, type(error).__name__, error)


def save_examples(folder: Path, name: str, examples: Sequence[tuple[NDArray[numpy.uint8], str, list[str]]]) -> None:
    """Keep images of the set `name` for reports: (image [H, W, 3], label, its best labels, the best first)."""
    images, labels, best = zip(*examples, strict=True)
    partial = folder / f"partial-{EXAMPLES}"
    numpy.savez_compressed(partial, name=name, image=images, label=labels, best=best)
    partial.replace(folder / EXAMPLES)


def write_report(folder: Path, writer: SummaryWriter | None = None) -> Path:
    """Draw report.png of a run folder, and the same as TensorBoard images where a writer is given.

    Raises: ValueError for a folder without metrics.jsonl.
    """
    history = read_history(folder / METRICS_FILE)
    if history.remarks:
        logger.warning("%s: %s", folder, history.remarks)
    state = "finished" if (folder / FINISHED).exists() else "not finished"
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / METRICS_FILE).stat().st_mtime))
    steps = f"{history.step:,} steps of {history.global_batch:,} samples"
    examples: dict[str, Any] = {}
    if (folder / EXAMPLES).exists():
        with numpy.load(folder / EXAMPLES) as kept:
            examples = dict(kept)
    steps += describe_changes(folder)
    pictures = draw_report(history, f"{folder.resolve().name}: {steps}, {state}, last record {written}", examples)
    partial = folder / f"{REPORT}.partial"
    Image.fromarray(numpy.concatenate(list(pictures.values()))).save(partial, format="png")
    partial.replace(folder / REPORT)
    if writer is not None:
        for name, picture in pictures.items():
            writer.add_image(f"report/{name}", picture, history.samples, dataformats="HWC")
        writer.flush()
    return folder / REPORT


def describe_changes(folder: Path) -> str:
    """`; from step N on SETTING is NEW, was OLD` for every setting that a resume has changed; empty for none."""
    if not (folder / CHANGES).exists():
        return ""
    lines = map(json.loads, (folder / CHANGES).read_text(encoding="utf-8").splitlines())
    return "".join("; from step {step:,} on {setting} is {new}, was {old}".format_map(line) for line in lines)


def draw_report(history: History, title: str, examples: dict[str, Any]) -> dict[str, NDArray[numpy.uint8]]:
    """The report's parts by name, from top to bottom, [H, W, 3] of one width."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(examples["label"]) / _COLUMNS) if examples else 0
    pictures = {}
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label in a script that the font lacks
        for name, height in (("curves", 7.0), ("examples", 0.4 + 1.05 * rows))[: 1 + bool(rows)]:
            figure = Figure((14, height), dpi=110, layout="constrained")
            canvas = FigureCanvasAgg(figure)
            if name == "curves":
                draw_curves(figure, history, title)
            else:
                draw_examples(figure, examples, rows)
            canvas.draw()
            pictures[name] = numpy.asarray(canvas.buffer_rgba())[..., :3]
    return pictures


def draw_curves(figure: Figure, history: History, title: str) -> None:
    """Draw loss and accuracy, and below them the figures that have a curve of their own."""
    from matplotlib.ticker import PercentFormatter

    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1))
    lower = figure.add_subfigure(grid[1])
    loss, accuracy = figure.add_subfigure(grid[0]).subplots(1, 2)
    draw_curve(loss, history, "loss", BLUE, "training loss")
    if history.global_batch > 1:
        guess = math.log(history.global_batch)
        label = f"guessing among {history.global_batch:,} by softmax: ln {history.global_batch} = {guess:.2f}"
        loss.axhline(guess, color=GREY, linestyle="--", linewidth=1, label=label)
    finish_axes(loss, "loss", "Loss")
    draw_accuracy(accuracy, history)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1))
    panels = [figure for figure in FIGURES if figure.curve]
    for axes, each in zip(lower.subplots(1, len(panels)), panels, strict=True):
        draw_curve(axes, history, each.name, BLUE)
        finish_axes(axes, each.curve)
    if history.remarks:
        lower.supxlabel(history.remarks, x=0.01, ha="left", color=ORANGE, fontsize=9)


def draw_accuracy(axes: Axes, history: History) -> None:
    """Draw the accuracy in the batch, and of every evaluated set against chance."""
    for name, label, colour in (("i2t", "image to text", BLUE), ("t2i", "text to image", GREEN)):
        draw_curve(axes, history, f"{name}_accuracy", colour, f"in the batch, {label}")
    sets = [name.removesuffix("_top1") for name in history.curves if name.endswith("_top1")]
    for name, colour, marker in zip(sets, cycle((ORANGE, PURPLE, GREY)), cycle("osD"), strict=False):
        samples, values = zip(*history.curves[f"{name}_top1"], strict=True)
        label = f"{name.removeprefix('eval/')}, zero-shot top-1: {values[-1]:.1%}"
        if chance := history.curves.get(f"{name}_chance"):
            axes.axhline(chance[-1][1], color=colour, linestyle="--", linewidth=1)
            label += f" (chance, dashed: {chance[-1][1]:.2%})"
        axes.plot(samples, values, color=colour, marker=marker, label=label)
    finish_axes(axes, "accuracy", "Learning")
    axes.set_ylim(bottom=0)


def draw_curve(axes: Axes, history: History, name: str, colour: str, label: str | None = None) -> None:
    """Draw a curve as a thin line, and its running mean as a thick one."""
    samples, values = numpy.array(history.curves.get(name, []), dtype=numpy.float64).reshape(-1, 2).T
    known, width = numpy.isfinite(values), len(values) // 25
    if not known.any():
        return
    if width < 2:
        axes.plot(samples, values, color=colour, marker=".", label=label)
        return
    axes.plot(samples, values, color=colour, linewidth=0.6, alpha=0.35)
    ones = numpy.ones(width)
    sums, counts = (numpy.convolve(part, ones, "same") for part in (numpy.where(known, values, 0), known))
    with numpy.errstate(invalid="ignore"):
        axes.plot(samples, sums / counts, color=colour, linewidth=1.8, label=label and f"{label}, running mean")


def finish_axes(axes: Axes, label: str, title: str = "") -> None:
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel="samples seen", ylabel=label, title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", color=GREY)
    elif title:
        # A fixed place, because matplotlib takes ten seconds to find the "best" one on a long curve.
        axes.legend(loc="lower left" if label == "loss" else "upper left")


def draw_examples(figure: Figure, examples: dict[str, Any], rows: int) -> None:
    """Draw images, each beside its label in bold and the nearest labels below that, the right one marked."""
    from matplotlib.patches import Rectangle

    labels, best = examples["label"].tolist(), examples["best"].tolist()
    first, found = (sum(label in top[:n] for label, top in zip(labels, best, strict=True)) for n in (1, len(best[0])))
    title = f"{len(labels)} images of {examples['name']} and the labels nearest to each: {first} right at once"
    title += f" (solid frame), {found} among the first {len(best[0])}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    # Texts stay out of the layout, so that all columns have one width.
    text: dict[str, Any] = {"va": "center", "in_layout": False}
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flatten().tolist()
    for axes in grid:
        axes.axis("off")
    for axes, image, label, top in zip(grid, examples["image"], labels, best, strict=False):
        colour, line = (BLUE, "-") if label == top[0] else (ORANGE, "--")
        axes.imshow(image, extent=(0, 1, 0, 1), interpolation="nearest")
        axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, clip_on=False, edgecolor=colour, linestyle=line, lw=2))
        axes.set(xlim=(0, 3.7), ylim=(0, 1))
        axes.text(1.1, 0.9, _shorten(label), weight="bold", **text)
        for place, guess in enumerate(top):
            mark, colour = ("✓", BLUE) if guess == label else ("✗", ORANGE)
            axes.text(1.1, 0.64 - 0.25 * place, f"{mark} {_shorten(guess)}", color=colour, **text)


def _shorten(label: str) -> str:
    label = " ".join(label.split())
    return label if len(label) <= _LETTERS else f"{label[: _LETTERS - 1]}…"
