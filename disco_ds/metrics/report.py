"""Draw report.png: curves of loss, accuracy and other metrics, and evaluated images with predictions.

Rank 0 draws it at the end of a run. It is drawn from metrics.jsonl and examples.npz only, so `disco-ds
report` can also draw it for a run that was killed or is still running. matplotlib is imported only when
a picture is drawn, so it does not slow down the start of training.
"""

from __future__ import annotations

import logging
import math
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
from disco_ds.runs.run_folder import FINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT = "report.png"
EXAMPLES = "examples.npz"
NUM_MEANS = 40
"""Number of equal parts into which a long curve is divided. A thick line connects the means of the parts, on top of the
thin curve. A curve is long if each part has at least two points."""
_MAX_LETTERS = 28
"""Maximum number of characters of a label; longer labels are cut."""
STYLE: list[Any] = [
    "default",
    "seaborn-v0_8-whitegrid",
    "seaborn-v0_8-colorblind",
    {"font.size": 9, "text.parse_math": False},  # labels may contain dollar signs
]
Curves = dict[str, list[tuple[float, float]]]
"""Name of a metric -> its points (number of samples, value)."""

logger = logging.getLogger(__name__)


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Log any error in the `with` block as a warning that begins with `what`, so that it does not stop the run."""
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


def write_report(folder: Path) -> Path:
    """Draw report.png of a run folder.

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
    title = f"{folder.resolve().name}: {last['step']:,} steps, {last['samples']:,} samples, {state}"
    if examples:
        title += f"; images of {examples['name']} with the nearest labels below"
    with style.context(STYLE), warnings.catch_warnings():
        # The font may lack characters of a label.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = draw_report(read_curves(records), examples)
        figure.suptitle(title)
        partial = folder / f"partial-{REPORT}"
        figure.savefig(partial)
    partial.replace(folder / REPORT)
    return folder / REPORT


def read_curves(records: Sequence[dict[str, Any]]) -> Curves:
    """Return the numeric values in the records as curves over the number of samples seen."""
    curves: Curves = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float):
                curves[name].append((record["samples"], value))
    return curves


def draw_report(curves: Curves, examples: dict[str, Any]) -> Figure:
    """Draw a panel for each metric of METRICS that has a curve label, a panel for the accuracies, and the examples."""
    from matplotlib.figure import Figure

    panels = [metric for metric in METRICS if metric.curve]
    panel_rows = math.ceil((len(panels) + 1) / 3)
    image_rows = math.ceil(len(examples["label"]) / 6) if examples else 0
    heights = [3.5] * panel_rows + [1.7] * image_rows
    figure = Figure((14, sum(heights)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)

    def add_panel(number: int) -> Axes:
        row, column = divmod(number, 3)
        return figure.add_subplot(grid[row, 2 * column : 2 * column + 2])

    for number, metric in enumerate(panels):
        axes = add_panel(number)
        draw_curve(axes, curves, metric.name)
        finish_axes(axes, metric.curve)
    draw_accuracy(add_panel(len(panels)), curves)
    if examples:
        columns = examples["image"], examples["label"], examples["best"]
        for number, example in enumerate(zip(*columns, strict=True), 6 * panel_rows):
            draw_example(figure.add_subplot(grid[number // 6, number % 6]), *example)
    return figure


def draw_accuracy(axes: Axes, curves: Curves) -> None:
    """Draw the in-batch accuracies and each set's zero-shot accuracy. A dashed line marks each set's chance level."""
    from matplotlib.ticker import PercentFormatter

    draw_curve(axes, curves, "i2t_accuracy", "in the batch, image to text")
    draw_curve(axes, curves, "t2i_accuracy", "in the batch, text to image")
    for name in [name for name in curves if name.endswith("_top1")]:
        samples, values = zip(*curves[name], strict=True)
        set_name = name.removeprefix("eval/").removesuffix("_top1")
        label = f"{set_name}, zero-shot top-1: {values[-1]:.1%}"
        (line,) = axes.plot(samples, values, marker="o", label=label)
        for _, chance in curves.get(name.replace("_top1", "_chance"), [])[-1:]:
            label = f"{set_name}, chance: {chance:.2%}"
            axes.axhline(chance, color=line.get_color(), linestyle="--", linewidth=1, label=label)
    finish_axes(axes, "accuracy")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def draw_curve(axes: Axes, curves: Curves, name: str, label: str | None = None) -> None:
    """Draw the curve `name`. If it has many points, draw it thin, with a thick line through the means of its parts."""
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


def finish_axes(axes: Axes, label: str) -> None:
    """Set the axis labels, and the legend if curves have labels."""
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel="samples seen", ylabel=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center")
    elif axes.get_legend_handles_labels()[0]:
        # A fixed place: matplotlib needs ten seconds to find the "best" one on a long curve.
        axes.legend(loc="upper left")


def draw_example(axes: Axes, image: NDArray[numpy.uint8], label: str, best: list[str]) -> None:
    """Draw an image with its label above it and the nearest labels below it, each marked as right or wrong."""
    axes.imshow(image, interpolation="nearest")
    guesses = [f"{'✓' if guess == label else '✗'} {_shorten(guess)}" for guess in best]
    axes.set(xticks=[], yticks=[], xlabel="\n".join(guesses))
    axes.set_title(_shorten(label), size=9)


def _shorten(label: str) -> str:
    return " ".join(label.split())[:_MAX_LETTERS]
