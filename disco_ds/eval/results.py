"""Results of evaluations, and how they are recorded and printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Example(NamedTuple):
    """An image with the model's predictions, for the report."""

    image: NDArray[np.uint8]
    """Pixels, [H, W, 3]."""
    label: str
    best: list[str]
    """Names of the three nearest classes, nearest first."""


@dataclass(frozen=True)
class Result:
    """The metrics of one evaluation set."""

    kind: str
    """zero-shot, retrieval, validation or probe."""
    name: str
    """Name of the set."""
    values: dict[str, float]
    """Metric -> value. Accuracies and recalls are fractions."""
    counts: dict[str, int]
    """How many items the values were computed from, and how many images could not be read (num_broken)."""
    examples: Sequence[Example] = ()
    """Example images with predictions; the same for any number of ranks."""


def record(results: Sequence[Result]) -> dict[str, float]:
    """Return the values of all results for metrics.jsonl and TensorBoard: eval/SET_METRIC -> value."""
    return {
        f"eval/{result.name}_{metric}": value
        for result in results
        for metric, value in result.values.items()
    }


def describe(results: Sequence[Result]) -> str:
    """Return the results as text: a table for each kind of evaluation, with a line for each evaluation set."""
    lines = []
    for columns, group in groupby(results, key=lambda result: (result.kind, *result.values)):
        rows: list[list[str]] = []
        for result in group:
            values = [_format(metric, value) for metric, value in result.values.items()]
            rows.append([result.name, *values, *map("{:,}".format, result.counts.values())])
        rows.insert(0, [name.removeprefix("num_") for name in (*columns, *result.counts)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells))
    return "\n".join(lines)


def _format(metric: str, value: float) -> str:
    if "loss" in metric:
        return f"{value:.4f}"
    return f"{value:.3g}" if "median" in metric or metric == "linear_C" else f"{value:.2%}"
