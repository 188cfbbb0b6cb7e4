"""Evaluation on all ranks, each of which encodes its share of every set.

sets        what to evaluate on            zero_shot   accuracy on a set with labels
encode      features of images and texts   retrieval   recall on a set with captions
results     what is recorded and printed   validation  loss on held-out pairs
                                           probes      accuracy of classifiers of image features
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder
from disco_ds.eval.probes import probe
from disco_ds.eval.results import Result, describe, record
from disco_ds.eval.retrieval import retrieve
from disco_ds.eval.sets import ImageSet, load_sets
from disco_ds.eval.validation import validate
from disco_ds.eval.zero_shot import classify

__all__ = ["ImageSet", "Result", "describe", "evaluate_sets", "load_sets", "record"]


# The towers are not compiled for evaluations: the batch size varies there, so torch.compile would afterwards compile
# the training step for a variable batch size too.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate_sets(
    model: nn.Module,
    sets: Sequence[ImageSet],
    spec: ImageSpec,
    tokenize: Callable[[list[str]], Tensor],
    chunk: int,
) -> list[Result]:
    """Evaluate the model on every set, in eval mode. Collective: every rank must call this.

    Afterwards, the model's previous mode is restored. No random number is drawn. The running statistics of batch
    normalization differ between ranks. Those of rank 0, which checkpoints contain, overwrite those of the other ranks.

    Args:
        model: An engine or a module.
        sets: What to evaluate on.
        spec: Size and resizing of the images.
        tokenize: The tokenizer.
        chunk: Number of images or texts per rank and forward pass.

    Raises:
        AgreedError: If shards cannot be read, if a set has no readable image, or if the training images of a
            probe have fewer than two labels.
    """
    training = model.training
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    if sets and buffers:
        statistics = comm.broadcast([buffer.cpu() for buffer in buffers])
        for buffer, value in zip(buffers, statistics, strict=True):
            buffer.copy_(value)
    encoder = Encoder(model, spec, tokenize, chunk)
    results = []
    for item in sets:
        if item.classes:
            results.append(classify(encoder, item))
        elif item.train:
            results.append(probe(encoder, item))
        elif item.batch:
            results.append(validate(encoder, item))
        else:
            results.append(retrieve(encoder, item))
    model.train(training)
    return results
