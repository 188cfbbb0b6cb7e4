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
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from disco_ds.metrics.logger import METRICS_FILE, read_records
from disco_ds.runs.run_folder import FINISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT = "report.png"
EXAMPLES = "examples.npz"
PANELS = {
    "loss": ("loss", "eval/*_loss_at_*"),
    "accuracy in the batch": ("i2t_accuracy", "t2i_accuracy"),
    "accuracy (top-1; dashed: chance)": ("eval/*_top1",),
    "R@1": ("eval/*_r1",),
    "logit scale": ("scale",),
    "learning rate": ("lr",),
    "gradient norm": ("grad_norm",),
    "samples / s": ("samples_per_s",),
}
"""Label of a panel -> patterns of the names of its curves. Panels without curves are left out."""
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
    """Draw the panels of PANELS that have curves, and the examples."""
    from matplotlib.figure import Figure

    panels = {label: list_curves(curves, patterns) for label, patterns in PANELS.items()}
    panels = {label: names for label, names in panels.items() if names}
    panel_rows = math.ceil(len(panels) / 3) or 1
    image_rows = math.ceil(len(examples["label"]) / 6) if examples else 0
    heights = [3.5] * panel_rows + [1.7] * image_rows
    figure = Figure((14, sum(heights)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    for number, (label, names) in enumerate(panels.items()):
        row, column = divmod(number, 3)
        axes = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
        for name in names:
            draw_curve(axes, curves, name)
        finish_axes(axes, label, len(names))
    if examples:
        columns = examples["image"], examples["label"], examples["best"]
        for number, example in enumerate(zip(*columns, strict=True), 6 * panel_rows):
            draw_example(figure.add_subplot(grid[number // 6, number % 6]), *example)
    return figure


def list_curves(curves: Curves, patterns: Sequence[str]) -> list[str]:
    """Return the names of the curves that match one of the patterns, in the order of the patterns."""
    return [name for pattern in patterns for name in curves if fnmatchcase(name, pattern)]


def draw_curve(axes: Axes, curves: Curves, name: str) -> None:
    """Draw a curve. If it has many points, draw it thin, with a thick line through the means of its parts.

    A dashed line marks the chance level of an evaluation set.
    """
    points = numpy.array(curves[name], dtype=numpy.float64)
    points = points[numpy.isfinite(points).all(axis=-1)]
    if not len(points):
        return
    label = name.removeprefix("eval/")
    if len(points) < 2 * NUM_MEANS:
        (line,) = axes.plot(*points.T, marker=".", label=label)
    else:
        (line,) = axes.plot(*points.T, linewidth=0.6, alpha=0.35)
        means = [part.mean(axis=0) for part in numpy.array_split(points, NUM_MEANS)]
        axes.plot(*zip(*means, strict=True), color=line.get_color(), linewidth=1.8, label=label)
    for _, chance in curves.get(name.replace("_top1", "_chance"), [])[-1:]:
        if name.endswith("_top1"):
            axes.axhline(chance, color=line.get_color(), linestyle="--", linewidth=1)


def finish_axes(axes: Axes, label: str, num_curves: int) -> None:
    """Set the axis labels, and a legend above the axes if there are several curves."""
    from matplotlib.ticker import EngFormatter, PercentFormatter

    axes.set(xlabel="samples seen", ylabel=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if label.startswith(("accuracy", "R@1")):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if num_curves > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


def draw_example(axes: Axes, image: NDArray[numpy.uint8], label: str, best: list[str]) -> None:
    """Draw an image with its label above it and the nearest labels below it, each marked as right or wrong."""
    axes.imshow(image, interpolation="nearest")
    guesses = [f"{'✓' if guess == label else '✗'} {_shorten(guess)}" for guess in best]
    axes.set(xticks=[], yticks=[], xlabel="\n".join(guesses))
    axes.set_title(_shorten(label), size=9)


def _shorten(label: str) -> str:
    return " ".join(label.split())[:_MAX_LETTERS]
