"""Evaluation over all ranks: each rank takes its share of a set, and all make equally many passes.

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
    """Evaluate the model on every set, in eval mode. Collective: every rank must call this.

    The mode of the model is restored, and no random number is drawn. The running statistics of
    batch normalization differ between ranks; they are overwritten with those of rank 0, which are
    also the ones in a checkpoint.

    Args:
        model: An engine or a module.
        sets: What to evaluate on.
        spec: Size and resizing of the images.
        tokenize: The tokenizer.
        chunk: Number of images or texts per rank and forward pass.

    Raises:
        AgreedError: If images cannot be read.
    """
    training = model.training
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    if sets and buffers:
        of_rank_0 = comm.broadcast([buffer.cpu() for buffer in buffers])
        for buffer, value in zip(buffers, of_rank_0, strict=True):
            buffer.copy_(value)
    results: list[Result] = []
    for item in sets:
        if item.classes:
            results.append(classify(model, item, spec, tokenize, chunk))
        elif item.batch:
            results.append(validate(model, item, spec, tokenize, chunk))
        else:
            results.append(retrieve(model, item, spec, tokenize, chunk))
    model.train(training)
    return results


def record(results: Sequence[Result]) -> dict[str, float]:
    """Return the results as points for metrics.jsonl and TensorBoard."""
    return {
        f"eval/{result.name}_{kind}": value
        for result in results
        for kind, value in result.values.items()
    }


def tabulate(results: Sequence[Result]) -> dict[str, list[dict[str, str | float]]]:
    """Return the metrics as a table for each kind of evaluation, with a row for each set."""
    tables: dict[str, list[dict[str, str | float]]] = {}
    for result in results:
        kind = next(iter(result.row))
        tables.setdefault(kind, []).append({"set": result.name, **result.values})
    return tables


def describe(results: Sequence[Result]) -> str:
    """Format a table for each kind of evaluation, with a line for each set."""
    lines = []
    for _, group in groupby(results, key=type):
        rows = [result.row for result in group]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *rest in cells:
            numbers = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join([f"{first:{widths[0]}}", *numbers]))
    return "\n".join(lines)
