"""Zero-shot classification: assign each image to the class with the nearest text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from disco_ds.data import ImageSpec
from disco_ds.distributed import comm
from disco_ds.eval.encode import Tokenize, encode_classes, encode_images
from disco_ds.eval.sets import ImageSet

NUM_EXAMPLES = 24
"""Maximum number of examples, spaced evenly over the set."""


class Example(NamedTuple):
    """An image with the model's predictions, for the report."""

    image: NDArray[np.uint8]
    """[H, W, 3]."""
    label: str
    best: list[str]
    """Names of the three nearest classes, nearest first."""


@dataclass(frozen=True)
class Accuracy:
    """The accuracy on one labeled set."""

    name: str
    top1: float
    top5: float
    recall: float
    """Top-1 accuracy of each class, averaged over the classes."""
    num_images: int
    num_classes: int
    num_broken: int
    """Number of unreadable images; no other number includes them."""
    examples: list[Example] = field(default_factory=list, repr=False, compare=False)
    """The same at any number of ranks."""

    @property
    def chance(self) -> float:
        """Top-1 accuracy of a random guess."""
        return 1 / self.num_classes

    @property
    def values(self) -> dict[str, float]:
        """Metrics by name."""
        return {"top1": self.top1, "top5": self.top5, "recall": self.recall, "chance": self.chance}

    @property
    def row(self) -> dict[str, str]:
        """A row of the printed table."""
        return {
            "zero-shot": self.name,
            "top-1": f"{self.top1:.2%}",
            "top-5": f"{self.top5:.2%}",
            "class recall": f"{self.recall:.2%}",
            "chance": f"{self.chance:.2%}",
            "labels": f"{self.num_classes:,}",
            "images": f"{self.num_images:,}",
            "broken": f"{self.num_broken:,}",
        }


@torch.no_grad()
def classify(
    model: nn.Module, labeled: ImageSet, spec: ImageSpec, tokenize: Tokenize, chunk: int
) -> Accuracy:
    """Compute the accuracy on a labeled set. Collective.

    Raises:
        AgreedError: If shards cannot be read, or no image can be read.
    """
    names = list(labeled.classes.values())
    texts = encode_classes(model, names, labeled.templates, tokenize, chunk)
    class_of = {label: number for number, label in enumerate(labeled.classes)}
    # Rows: images, top-1 hits and top-5 hits of each class.
    counts = torch.zeros(3, len(names), dtype=torch.int64, device=texts.device)
    shown = dict[int, Example]()
    every = math.ceil(labeled.source.num_samples / NUM_EXAMPLES)
    for features, samples in encode_images(model, labeled, spec, chunk):
        classes = [class_of[label] for _, label, _ in samples]
        target = torch.tensor(classes, dtype=torch.int64, device=texts.device)
        best = (features @ texts.T).topk(min(5, len(names)), dim=1).indices
        right = best == target[:, None]
        hits = torch.stack([torch.ones_like(target), right[:, 0].long(), right.any(dim=1).long()])
        counts.index_add_(1, target, hits)
        for (image, label, index), near in zip(samples, best.tolist(), strict=True):
            # Chosen by id, so that the examples do not depend on the number of ranks.
            if index % every == 0:
                pixels = image.permute(1, 2, 0).numpy()
                nearest = [names[number] for number in near[:3]]
                shown[index] = Example(pixels, labeled.classes[label], nearest)
    counts = comm.all_reduce_sum(counts).double()
    images, top1, top5 = counts.sum(dim=1).tolist()
    if not images:
        raise comm.AgreedError(f"eval.labeled.{labeled.name}: no image could be read")
    # Classes without a readable image have no recall; they remain possible predictions.
    seen = counts[0] > 0
    of_all_ranks = dict[int, Example]()
    for part in comm.gather_objects(shown):
        of_all_ranks |= part
    return Accuracy(
        name=labeled.name,
        top1=top1 / images,
        top5=top5 / images,
        recall=(counts[1, seen] / counts[0, seen]).mean().item(),
        num_images=int(images),
        num_classes=len(names),
        num_broken=labeled.source.num_samples - int(images),
        examples=[of_all_ranks[index] for index in sorted(of_all_ranks)],
    )
