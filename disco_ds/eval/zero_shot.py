"""Zero-shot classification: assign each image to the class with the nearest text."""

from __future__ import annotations

import math

import torch

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
    texts = encoder.encode_classes(names, labeled.templates)
    class_of = {label: number for number, label in enumerate(labeled.classes)}
    # The rows count images, top-1 hits and top-5 hits; each column is a class.
    hits = torch.zeros(3, len(names), dtype=torch.int64, device=texts.device)
    examples = dict[int, Example]()
    every = math.ceil(labeled.source.num_samples / NUM_EXAMPLES)
    for features, samples in encoder.encode_images(labeled):
        classes = [class_of[label] for _, label, _ in samples]
        target = torch.tensor(classes, dtype=torch.int64, device=texts.device)
        best = (features @ texts.T).topk(min(5, len(names)), dim=1).indices
        right = best == target[:, None]
        seen = torch.ones_like(target)
        hits.index_add_(1, target, torch.stack([seen, right[:, 0].long(), right.any(dim=1).long()]))
        for (image, label, index), nearest in zip(samples, best[:, :3].tolist(), strict=True):
            # Examples are chosen by sample id, so that they do not depend on the number of ranks.
            if index % every == 0:
                pixels = image.permute(1, 2, 0).numpy()
                best_names = [names[number] for number in nearest]
                examples[index] = Example(pixels, labeled.classes[label], best_names)
    hits = comm.all_reduce_sum(hits).double()
    num_images, top1, top5 = hits.sum(dim=1).tolist()
    # Classes without a readable image have no recall; they remain possible predictions.
    has_images = hits[0] > 0
    values = {
        "top1": top1 / num_images,
        "top5": top5 / num_images,
        "recall": (hits[1, has_images] / hits[0, has_images]).mean().item(),
        "chance": 1 / len(names),
    }
    counts = {
        "num_classes": len(names),
        "num_images": int(num_images),
        "num_broken": labeled.source.num_samples - int(num_images),
    }
    shown = sorted(item for part in comm.gather_objects(examples) for item in part.items())
    return Result("zero-shot", labeled.name, values, counts, [example for _, example in shown])
