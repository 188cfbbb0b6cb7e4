"""Zero-shot classification: assign each image to the class with the nearest text."""

from __future__ import annotations

import math

import numpy as np
import torch

from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder
from disco_ds.eval.results import Example, Result
from disco_ds.eval.sets import ImageSet

NUM_EXAMPLES = 24
"""Maximum number of example images in the result. They are spaced evenly over the set."""


def classify(encoder: Encoder, labeled: ImageSet) -> Result:
    """Compute the accuracy on a labeled set. Collective.

    The values are top1 and top5, recall (top-1 accuracy of each class, averaged over the classes),
    and chance (top-1 accuracy of a random guess). Classes that are as near as the true class
    are ranked before it.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    names = list(labeled.classes.values())
    class_of = {label: number for number, label in enumerate(labeled.classes)}
    texts = encoder.encode_classes(names, labeled.templates)
    # For each image: its class, and the rank of its class, counted from 1, among all classes.
    rows = []
    examples = dict[int, Example]()
    every = math.ceil(labeled.source.num_samples / NUM_EXAMPLES)
    for features, samples in encoder.encode_images(labeled):
        scores = features @ texts.T
        targets = torch.tensor([class_of[label] for _, label, _ in samples], dtype=torch.int64)
        own = scores.gather(1, targets.to(scores.device)[:, None])
        ranks = (scores >= own).sum(dim=1, keepdim=True)
        best = scores.topk(min(3, len(names)), dim=1).indices
        found = zip(samples, targets.tolist(), torch.cat([ranks, best], 1).tolist(), strict=True)
        for (image, _, index), target, (rank, *nearest) in found:
            rows.append((target, rank))
            # Examples are chosen by sample id, so that they do not depend on the number of ranks.
            if index % every == 0:
                pixels = image.permute(1, 2, 0).numpy()
                best_names = [names[number] for number in nearest]
                examples[index] = Example(pixels, names[target], best_names)
    gathered = comm.gather_objects((rows, examples))
    classes, ranks = np.array([row for part, _ in gathered for row in part]).T
    top1, top5 = ranks <= 1, ranks <= 5
    # Classes without a readable image have no recall; they remain possible predictions.
    recalls = [top1[classes == number].mean() for number in np.unique(classes)]
    values = {
        "top1": float(top1.mean()),
        "top5": float(top5.mean()),
        "recall": float(np.mean(recalls)),
        "chance": 1 / len(names),
    }
    counts = {
        "num_classes": len(names),
        "num_images": len(classes),
        "num_broken": labeled.source.num_samples - len(classes),
    }
    shown = sorted(item for _, part in gathered for item in part.items())
    return Result("zero-shot", labeled.name, values, counts, [example for _, example in shown])
