"""Draw report.png: curves of loss, accuracy and other metrics, and evaluated images with predictions.

Rank 0 draws it at the end of a run. It is drawn from metrics.jsonl and examples.npz only, so `disco-ds
report` can also draw it for a run that was killed or is still running. matplotlib is imported only when
a picture is drawn, so it does not slow down the start of training.
"""

import fnmatch
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from disco_ds.metrics.logger import METRICS_FILE, read_records
from disco_ds.runs.run_folder import FINISHED

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
thin curve."""
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
Example = tuple[NDArray[numpy.uint8], str, list[str]]
"""An image [H, W, 3], its label, and predicted labels from best to worst."""

logger = logging.getLogger(__name__)


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Log any error in the `with` block as a warning that begins with `what`, so that it does not stop the run."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s: %s", what, type(error).__name__, error)


def save_examples(folder: Path, name: str, examples: Sequence[Example]) -> None:
    """Save evaluated images for the report.

    Args:
        folder: The run folder.
        name: Name of the evaluation set.
        examples: The images with their labels and predictions.
    """
    images, labels, best = zip(*examples, strict=True)
    numpy.savez_compressed(folder / EXAMPLES, name=name, image=images, label=labels, best=best)


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
    records = read_records(path)
    last = records[-1] if records else {"step": 0, "samples": 0}
    state = "finished" if (folder / FINISHED).exists() else "not finished"
    title = f"{folder.resolve().name}: {last['step']:,} steps, {last['samples']:,} samples, {state}"
    examples: list[Example] = []
    if (folder / EXAMPLES).exists():
        with numpy.load(folder / EXAMPLES) as saved:
            examples += zip(saved["image"], saved["label"], saved["best"], strict=True)
            title += f"; images of {saved['name']} with the nearest labels below"
    with style.context(STYLE), warnings.catch_warnings():
        # The font may lack characters of a label.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = draw_report(read_curves(records), examples)
        figure.suptitle(title)
        figure.savefig(folder / REPORT)
    return folder / REPORT


def read_curves(records: Sequence[dict[str, Any]]) -> Curves:
    """Return the finite numbers in the records as curves over the number of samples seen."""
    curves: Curves = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value):
                curves[name].append((record["samples"], value))
    return curves


def draw_report(curves: Curves, examples: Sequence[Example]) -> Any:
    """Return a matplotlib Figure with the panels of PANELS that have curves, and the examples."""
    from matplotlib.figure import Figure

    panels = []
    for label, patterns in PANELS.items():
        names = [name for pattern in patterns for name in fnmatch.filter(curves, pattern)]
        if names:
            panels.append((label, names))
    panel_rows = math.ceil(len(panels) / 3) or 1
    heights = [3.5] * panel_rows + [1.7] * math.ceil(len(examples) / 6)
    figure = Figure((14, sum(heights)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    for number, (label, names) in enumerate(panels):
        row, column = divmod(2 * number, 6)
        draw_panel(figure.add_subplot(grid[row, column : column + 2]), label, curves, names)
    for number, example in enumerate(examples, 6 * panel_rows):
        draw_example(figure.add_subplot(grid[number]), *example)
    return figure


def draw_panel(axes: Any, label: str, curves: Curves, names: Sequence[str]) -> None:
    """Draw each curve thin, with a thick line through the means of its parts, and a legend if there are several.

    A dashed line marks the chance level of an evaluation set.
    """
    from matplotlib.ticker import EngFormatter, PercentFormatter

    for name in names:
        points = numpy.array(curves[name])
        (line,) = axes.plot(*points.T, linewidth=0.6, alpha=0.35)
        parts = numpy.array_split(points, min(NUM_MEANS, len(points)))
        means = numpy.array([part.mean(axis=0) for part in parts])
        color = line.get_color()
        axes.plot(*means.T, ".-", color=color, linewidth=1.8, label=name.removeprefix("eval/"))
        if chance := curves.get(f"{name.removesuffix('_top1')}_chance"):
            axes.axhline(chance[-1][1], color=color, linestyle="--", linewidth=1)
    axes.set(xlabel="samples seen", ylabel=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if label.startswith(("accuracy", "R@1")):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if len(names) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


def draw_example(axes: Any, image: NDArray[numpy.uint8], label: str, best: Sequence[str]) -> None:
    """Draw an image with its label above it and the nearest labels below it, each marked as right or wrong."""
    axes.imshow(image, interpolation="nearest")
    guesses = [f"{'✓' if guess == label else '✗'} {_shorten(guess)}" for guess in best]
    axes.set(xticks=[], yticks=[], xlabel="\n".join(guesses))
    axes.set_title(_shorten(label), size=9)


def _shorten(label: str) -> str:
    return " ".join(label.split())[:_MAX_LETTERS]
