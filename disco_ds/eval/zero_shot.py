"""Zero-shot classification: assign each image to the class with the nearest text."""

from __future__ import annotations

import math

import numpy as np

from disco_ds.distributed import comm
from disco_ds.eval.encode import Encoder
from disco_ds.eval.results import Example, Result
from disco_ds.eval.sets import ImageSet

NUM_EXAMPLES = 24
"""Maximum number of examples, spaced evenly over the set."""


def classify(encoder: Encoder, labeled: ImageSet) -> Result:
    """Compute the accuracy on a labeled set. Collective.

    The values are top1 and top5, recall (top-1 accuracy of each class, averaged over the classes),
    and chance (top-1 accuracy of a random guess).

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    names = list(labeled.classes.values())
    class_of = {label: number for number, label in enumerate(labeled.classes)}
    texts = encoder.encode_classes(names, labeled.templates)
    # For each image: its class, whether that is the nearest class, and whether it is among the five nearest.
    rows = []
    examples = dict[int, Example]()
    every = math.ceil(labeled.source.num_samples / NUM_EXAMPLES)
    for features, samples in encoder.encode_images(labeled):
        best = (features @ texts.T).topk(min(5, len(names)), dim=1).indices.tolist()
        for (image, label, index), nearest in zip(samples, best, strict=True):
            target = class_of[label]
            rows.append((target, nearest[0] == target, target in nearest))
            # Examples are chosen by sample id, so that they do not depend on the number of ranks.
            if index % every == 0:
                pixels = image.permute(1, 2, 0).numpy()
                best_names = [names[number] for number in nearest[:3]]
                examples[index] = Example(pixels, names[target], best_names)
    gathered = comm.gather_objects((rows, examples))
    classes, top1, top5 = np.array([row for part, _ in gathered for row in part]).T
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
