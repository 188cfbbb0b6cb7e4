"""Evaluation over all ranks: each rank takes its share of a set, and all make the same number of forward passes.

sets        what to evaluate on            zero_shot   accuracy on a set with labels
encode      features of images and texts   retrieval   recall on a set with captions
                                           validation  loss on held-out pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Tokenize
from disco_ds.eval.retrieval import Recall, retrieve
from disco_ds.eval.sets import ImageSet, load_sets
from disco_ds.eval.validation import Validation, validate
from disco_ds.eval.zero_shot import Accuracy, Example, classify

__all__ = [
    "Accuracy",
    "Example",
    "ImageSet",
    "Recall",
    "Result",
    "Validation",
    "describe",
    "evaluate_sets",
    "load_sets",
    "record",
    "tabulate",
]

Result = Accuracy | Recall | Validation


def evaluate_sets(
    model: nn.Module, sets: Sequence[ImageSet], spec: ImageSpec, tokenize: Tokenize, chunk: int
) -> list[Result]:
    """Evaluate the model on every set, in eval mode; its mode is restored, and no random number is drawn.

    Collective: every rank must call. Statistics of batch normalisation, which each rank gathers from its own samples,
    become those of rank 0 on all ranks: they are what a checkpoint has.
    Args:   model: an engine or a module; chunk: number of images or texts per rank and forward pass.
    Raises: AgreedError for images that cannot be read.
    """
    training = model.training
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    if sets and buffers:
        for buffer, value in zip(buffers, comm.broadcast([buffer.cpu() for buffer in buffers]), strict=True):
            buffer.copy_(value)
    results: list[Result] = []
    for item in sets:
        evaluate = classify if item.classes else validate if item.batch else retrieve
        results.append(evaluate(model, item, spec, tokenize, chunk))
    model.train(training)
    return results


def record(results: Sequence[Result]) -> dict[str, float]:
    """The results as points of metrics.jsonl and TensorBoard."""
    return {f"eval/{result.name}_{kind}": value for result in results for kind, value in result.values.items()}


def tabulate(results: Sequence[Result]) -> dict[str, list[dict[str, str | float]]]:
    """The results by kind, a row of figures for each set."""
    return {
        next(iter(first.row)): [{"set": result.name, **result.values} for result in (first, *rest)]
        for first, *rest in (list(group) for _, group in groupby(results, key=type))
    }


def describe(results: Sequence[Result]) -> str:
    """A table for each kind of result, with a line for each set."""
    lines = []
    for _, group in groupby(results, key=type):
        rows = [result.row for result in group]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *rest in cells:
            figures = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
            lines.append("  ".join((f"{first:{widths[0]}}", *figures)))
    return "\n".join(lines)
